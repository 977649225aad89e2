"""What the driver keeps of a GPU is nobody's: no dialect promises it to anybody."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, DialectOptions, Pod, choose, usage
from gpu_pool.cluster.dialects.base import RESERVED_LABEL
from gpu_pool_client import BadRequest, parse_request
from support.clusters import dra, everything, hami, listed, plain

SHOWN, FOR_PROGRAMS = 81559, 81079  # an H100, as docs/developer/gpu.md has it


def without_label(cluster: Cluster) -> Cluster:
    """Return the cluster as it is where no administrator has labelled its nodes."""
    for node in cluster.nodes:
        del node.labels[RESERVED_LABEL]  # type: ignore[attr-defined]
    return cluster


@pytest.mark.parametrize("name", [each for each in everything() if "mig" not in each and each != "bitfusion"])
def test_no_dialect_promises_more_than_the_driver_leaves(name: str) -> None:
    cluster, options = everything()[name]
    said = {gpu.device.uuid: gpu.device.memory_mib for gpu in choose(cluster, options).dialect.gpus()}  # type: ignore[union-attr]
    found = choose(without_label(cluster), options).dialect
    assert found is not None
    dividable = name == "dra-dividable"  # the sizes of MIG instances are what is left of them
    for gpu in found.gpus():
        left = said[gpu.device.uuid] - gpu.device.memory_mib
        assert left == (0 if dividable else min(640, said[gpu.device.uuid] * 4 // 100))


def test_fifty_times_two_percent_of_an_h100_fit_into_what_its_driver_leaves() -> None:
    h100 = listed("gpu-0", SHOWN, default=f"{SHOWN}Mi")
    clusters = [
        without_label(each)
        for each in (
            dra(h100),
            Cluster.read([hami(memory=SHOWN)]),
            Cluster.read([plain(replicas=50, memory=SHOWN, strategy="time-slicing")]),
        )
    ]
    for cluster in clusters:
        dialect = choose(cluster).dialect
        assert dialect is not None
        memory = dialect.translate(parse_request("2%")).statement.memory_mib
        assert memory is not None
        assert 0 < 50 * memory <= FOR_PROGRAMS


@pytest.mark.parametrize(
    ("label", "setting", "left"),
    [(None, None, 32128), (None, 100, 32668), (None, 0, 32768), ("48", 100, 32720), ("some", 100, 32668)],
)
def test_a_nodes_label_comes_before_the_setting(label: str | None, setting: int | None, left: int) -> None:
    node = hami()
    del node["metadata"]["labels"][RESERVED_LABEL]
    if label is not None:
        node["metadata"]["labels"][RESERVED_LABEL] = label
    (gpu,) = choose(Cluster.read([node]), DialectOptions(reserved_mib=setting)).dialect.gpus()  # type: ignore[union-attr]
    assert gpu.device.memory_mib == left


@pytest.mark.parametrize("wrong", [-1, "640", True, 0.5])
def test_a_setting_that_is_no_amount_is_refused(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="reserved_mib"):
        DialectOptions(reserved_mib=wrong)


def test_who_was_promised_all_that_is_shown_has_all_that_there_is() -> None:
    cluster = without_label(Cluster.read([hami()]))
    allocated = {"hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,32768,100:;"}
    pod = {"metadata": {"name": "p", "annotations": allocated}, "spec": {"nodeName": "n1"}}
    dialect = choose(cluster).dialect
    assert dialect is not None
    (use,) = usage(dialect, [Pod.read(pod)])
    assert use.memory_mib == (32128, 32128)
