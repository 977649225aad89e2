"""Which dialect a cluster is taken to speak, and what is said about it."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects import Cluster, choose, dialect_names, installed_dialects
from gpu_pool_client import BadRequest
from support.clusters import (
    everything,
    gke,
    hami,
    kai,
    koordinator,
    listed,
    named,
    node,
    plain,
    resource_slice,
    volcano,
)


@pytest.mark.parametrize("name", list(everything()))
def test_each_is_recognised(name: str) -> None:
    choice = choose(*everything()[name])
    expected = {"whole", "time-slicing", "mps", "mig-mixed", "mig-single"}
    assert choice.seen == ("device-plugin" if name in expected else name.split("-")[0],)
    assert not choice.ambiguous


def test_a_cluster_without_gpus_is_said_to_be_one() -> None:
    choice = choose(Cluster.read([node()]))
    assert choice.dialect is None
    assert "None of 1 nodes offers GPUs" in str(choice)


def test_several_are_ranked_and_said() -> None:
    choice = choose(Cluster.read([plain("p"), volcano(), hami("h")]))
    assert choice.seen == ("hami", "volcano", "device-plugin")
    assert choice.ambiguous
    assert "Also found, but not used: device-plugin, since 1 nodes offer nvidia.com/gpu" in str(choice)
    assert "set the dialect to hami or volcano or device-plugin" in str(choice)


def test_claims_beside_plain_resources_are_ambiguous() -> None:
    cluster = Cluster.read(
        [plain()], device_classes=named("gpu.nvidia.com"), resource_slices=[resource_slice(listed("gpu-0"))]
    )
    assert choose(cluster).seen == ("dra", "device-plugin")


def test_claims_that_share_gpus_come_right_after_what_limits_memory() -> None:
    classes = named("gpu.nvidia.com")
    shared, alone = (resource_slice(listed("gpu-0", **more)) for more in ({"default": "0"}, {}))
    others = [gke("time-sharing", 10), hami("h"), plain("p")]
    sharing = Cluster.read(others, device_classes=classes, resource_slices=[shared])
    assert choose(sharing).seen == ("hami", "dra", "gke", "device-plugin")
    whole = Cluster.read(others, device_classes=classes, resource_slices=[alone])
    assert choose(whole).seen == ("hami", "gke", "dra", "device-plugin")


def test_what_kai_works_over_is_not_ambiguous() -> None:
    assert choose(kai()).seen == ("kai",)


def test_gke_and_koordinator_come_before_the_plain_plugin() -> None:
    assert choose(Cluster.read([gke("mps", 10), plain("p")])).seen[0] == "gke"
    assert choose(Cluster.read([koordinator(), plain("p")])).seen[0] == "koordinator"


def test_a_device_class_without_devices_is_no_dialect() -> None:
    assert choose(Cluster.read([plain()], device_classes=named("gpu.nvidia.com"))).seen == ("device-plugin",)


def test_a_dialect_that_is_set_is_taken() -> None:
    choice = choose(Cluster.read([hami(), plain("p")]), name="device-plugin")
    assert choice.dialect is not None
    assert choice.dialect.table.name == "device-plugin"
    assert "although this cluster shows no sign of it" in str(choose(Cluster.read([plain()]), name="hami"))


def test_an_unknown_dialect_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(BadRequest, match="auto, aliyun, bitfusion"):
        choose(Cluster(), name="vGPU")


def test_every_dialect_has_a_name_of_its_own() -> None:
    assert len(set(dialect_names())) == len(installed_dialects()[0]) == 10
