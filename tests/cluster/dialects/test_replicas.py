"""Nodes whose only GPU is a pool's by replicas of the device plugin."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, DialectOptions, PodHolding
from gpu_pool.cluster.dialects.objects import Pod
from gpu_pool.cluster.dialects.shared import MOST_PODS, SLICES, Shared
from gpu_pool.cluster.nodes import closures
from gpu_pool_client import NeverFits, Slice, parse_request
from support.clusters import discovered, listed, node, plain, resource_slice

TAINT = {"key": "jupyter-gpu-pool/shared", "value": "hub", "effect": "NoSchedule"}
OPTIONS = DialectOptions(pool="gpu-pool", namespace="hub")


def given(made: dict[str, Any], taint: dict[str, str] = TAINT) -> dict[str, Any]:
    made.setdefault("spec", {})["taints"] = [taint]
    return made


def of(*nodes: dict[str, Any], slices: Any = ()) -> Shared:
    return Shared(Cluster.read(nodes, resource_slices=slices), OPTIONS)


def test_the_gpu_of_a_node_that_is_the_pools_is_divided_and_its_pods_ask_for_a_replica() -> None:
    shared = of(given(plain("n1", replicas=20)), plain("n2", replicas=20))
    assert shared.missing() == ""
    assert shared.evidence() == "1 nodes are the pool's, with replicas of their only GPU"
    (gpu,) = shared.gpus()
    assert (gpu.node, gpu.device.contexts, gpu.device.milli) == ("n1", 20, 1000)
    assert str(shared.translate(parse_request("2%..10%")).statement.counted) == "2%..10%"
    parts = shared.parts((Slice(gpu.device, 20, 655),))
    assert (parts.claims, dict(parts.limits)) == ((), {"nvidia.com/gpu": "1"})
    assert parts.annotations == {SLICES: f"{gpu.device.uuid}=20/655"}
    assert {"key": TAINT["key"], "operator": "Equal", "value": "hub"} in parts.tolerations
    # Kernels are let in there, and only there.
    assert closures(shared, ()) == {}
    assert shared.claim(gpu.device.uuid) is None
    assert shared.is_listed(gpu.device.uuid)


def test_there_are_no_more_places_than_one_claim_has() -> None:
    (gpu,) = of(given(plain("n1", replicas=1000))).gpus()
    assert gpu.device.contexts == MOST_PODS


def test_what_is_renamed_is_asked_for_by_its_name() -> None:
    renamed = node("n1", labels=discovered(replicas=8), allocatable={"nvidia.com/gpu.shared": 8})
    shared = of(given(renamed))
    (gpu,) = shared.gpus()
    assert dict(shared.parts((Slice(gpu.device, 20, 655),)).limits) == {"nvidia.com/gpu.shared": "1"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (plain("n1", gpus=2, replicas=4), "has 2 GPUs, and the device plugin chooses which one a pod gets"),
        (plain("n1"), "hands out a whole GPU, and not replicas by time-slicing"),
        (node("n1"), "shows no GPU of NVIDIA's device plugin"),
    ],
)
def test_a_node_that_cannot_be_divided_is_refused_in_words(made: dict[str, Any], why: str) -> None:
    shared = of(given(made))
    assert [(each.name, each.why_not) for each in shared.unfit] == [("n1", why)]
    assert shared.gpus() == ()
    with pytest.raises(NeverFits, match=f"The node n1 is set aside for the pool, but {why}"):
        shared.translate(parse_request("2%"))


def test_a_gpu_that_the_dra_driver_lists_as_well_is_left_to_it() -> None:
    shared = of(given(plain("n1", replicas=4)), slices=[resource_slice(listed("gpu-0"), name="n1")])
    assert "only one of both may hand them out" in shared.unfit[0].why_not
    assert [gpu.device.uuid for gpu in shared.gpus()] == ["GPU-gpu-0"]


@pytest.mark.parametrize("taint", [{**TAINT, "value": "other"}, {**TAINT, "effect": "PreferNoSchedule"}])
def test_a_node_of_another_pool_or_one_that_keeps_nobody_away_is_none_of_it(taint: dict[str, str]) -> None:
    assert of(given(plain("n1", replicas=4), taint)).gpus() == ()


def pod(**metadata: Any) -> Pod:
    limits = {"nvidia.com/gpu": "1"}
    spec = {"nodeName": "n1", "containers": [{"name": "c", "resources": {"limits": limits}}]}
    found = Pod.read({"metadata": {"name": "p", **metadata}, "spec": spec, "status": {"phase": "Running"}})
    assert found is not None
    return found


def test_a_pod_of_others_on_a_replica_takes_all_of_the_gpu() -> None:
    shared = of(given(plain("n1", replicas=4)))
    (gpu,) = shared.gpus()
    theirs = pod(namespace="research")
    assert shared.holds(theirs) == (PodHolding(1000, gpu.device.memory_mib, gpu.device.uuid),)
    labels = {"jupyter-gpu-pool/pool": "gpu-pool"}
    ours = pod(namespace="hub", labels=labels, annotations={SLICES: f"{gpu.device.uuid}=20/655"})
    assert shared.holds(ours) == (PodHolding(20, 655, gpu.device.uuid),)
