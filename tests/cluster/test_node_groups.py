"""What an administrator says of the groups of nodes that can grow, and the files that this names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, choose
from gpu_pool.cluster.nodes import read_groups
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool_client import BadRequest, parse_request
from support.clusters import hami, listed, named, node, plain, resource_slice

SELECT = {"pool": "gpu"}


def example(folder: Path, *objects: dict[str, Any], file: str = "node.json") -> str:
    """Write objects as ``kubectl get -o json`` does, and return the file's name."""
    typed = [{"kind": "ResourceSlice" if "driver" in each["spec"] else "Node", **each} for each in objects]
    path = folder / file
    path.write_text(json.dumps(typed[0] if len(typed) == 1 else {"kind": "List", "items": typed}))
    return str(path)


def of_group(found: dict[str, Any]) -> dict[str, Any]:
    found["metadata"]["labels"] |= SELECT
    return found


def test_the_example_becomes_a_node_that_could_be_started(tmp_path: Path) -> None:
    seen = of_group(hami("gke-old-1"))
    seen["spec"] |= {"unschedulable": True, "podCIDR": "10.0.0.0/24"}
    seen["spec"]["taints"] += [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]
    seen["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    (group,) = read_groups(
        {"v100": {"example": example(tmp_path, seen), "select": SELECT, "most": 4, "usual_minutes": 3}}
    )
    assert (group.most, group.usual, group.late) == (4, 180.0, 900.0)
    assert [each["key"] for each in group.stand_in["spec"]["taints"]] == ["nvidia.com/gpu"]
    cluster = Cluster.read([group.stand_in])
    (found,) = cluster.nodes
    assert (found.name, found.cordoned, "Ready" in found.conditions) == ("v100/new", False, True)
    assert found.label("kubernetes.io/hostname") == "v100/new"
    dialect = choose(cluster).dialect
    assert dialect is not None
    assert dialect.translate(parse_request("2%")).pod.limits["nvidia.com/gpumem"] == "655"


def test_its_resource_slices_come_along_from_a_second_file(tmp_path: Path) -> None:
    files = [
        example(tmp_path, of_group(node("n7"))),
        example(tmp_path, resource_slice(listed("gpu-0", default="0"), name="n7"), file="slices.json"),
    ]
    (group,) = read_groups({"dra": {"example": files, "select": SELECT, "most": 1}})
    cluster = Cluster.read(
        [group.stand_in], device_classes=named("gpu.nvidia.com"), resource_slices=group.slices
    )
    dialect = choose(cluster).dialect
    assert dialect is not None
    assert [(gpu.node, gpu.device.memory_mib) for gpu in dialect.gpus()] == [("dra/new", 32768)]


def test_both_files_in_one_will_do(tmp_path: Path) -> None:
    file = example(tmp_path, of_group(node("n7")), resource_slice(listed("gpu-0"), name="n7"))
    (group,) = read_groups({"dra": {"example": file, "select": SELECT, "most": 1}})
    assert len(group.slices) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mots": 4}, "has 'mots'"),
        ({"select": {}}, "does not say which nodes are of the group"),
        ({"select": {"pool": 1}}, "does not say which nodes are of the group"),
        ({"select": {"pool": "other"}}, "lacks a label of select"),
        ({"most": 0}, "does not say how many nodes"),
        ({"most": True}, "does not say how many nodes"),
        ({"usual_minutes": -1}, "usual_minutes is -1"),
        ({"late_minutes": "soon"}, "late_minutes is 'soon'"),
        ({"example": None}, "has no example"),
        ({"example": "nowhere.json"}, "'nowhere.json' cannot be read"),
        ({"example": []}, "has no example"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_to_write(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    given = {"example": example(tmp_path, of_group(plain())), "select": SELECT, "most": 2}
    with pytest.raises(BadRequest, match=words) as refused:
        read_groups({"v100": {**given, **change}})
    assert refused.value.remedy
    assert len(read_groups({"v100": given})) == 1


def test_an_example_has_one_node(tmp_path: Path) -> None:
    file = example(tmp_path, of_group(plain("a")), of_group(plain("b")))
    with pytest.raises(BadRequest, match="has 2 nodes") as refused:
        read_groups({"v100": {"example": file, "select": SELECT, "most": 2}})
    assert "kubectl get node NAME -o json" in str(refused.value.remedy)


def test_a_cluster_whose_queue_is_kueues_asks_for_no_nodes_itself(tmp_path: Path) -> None:
    groups = {"v100": {"example": example(tmp_path, of_group(plain())), "select": SELECT, "most": 2}}
    assert len(KubernetesSettings(node_groups=groups).groups) == 1
    with pytest.raises(BadRequest, match="kueue and node_groups"):
        _ = KubernetesSettings(node_groups=groups, kueue=True).groups
