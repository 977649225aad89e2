"""NVIDIA's device plugin: whole GPUs, replicas, MIG; each for what it really is."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, counted_as, usage
from gpu_pool.cluster.dialects.device_plugin import DevicePlugin
from gpu_pool.cluster.dialects.gke import Gke
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import BadRequest, NeverFits, Strength, parse_request
from gpu_pool_client._free import free_now
from support.clusters import A100, discovered, everything, hami, node, plain, pod


def plugin(*nodes: dict[str, Any]) -> DevicePlugin:
    return DevicePlugin(Cluster.read(nodes))


def mig(**amounts: int) -> dict[str, Any]:
    """Return a node of MIG strategy ``mixed``."""
    memory = {"1g.5gb": "4864", "2g.10gb": "9856", "3g.20gb": "19968"}
    labels = {f"nvidia.com/mig-{profile}.memory": value for profile, value in memory.items()}
    labels |= {f"nvidia.com/mig-{profile}.replicas": "1" for profile in memory}
    allocatable = {f"nvidia.com/mig-{name.replace('_', '.').lstrip('g')}": n for name, n in amounts.items()}
    return node("mig", labels={**discovered(A100, 40960), **labels}, allocatable=allocatable)


def test_whole_gpus() -> None:
    translation = plugin(plain(gpus=4)).translate(parse_request("3"))
    assert translation.pod.limits == {"nvidia.com/gpu": "3"}
    assert translation.statement.enforcement.memory.strength is Strength.HARD
    assert translation.pod.tolerations == (
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    )


def test_a_part_of_a_gpu_that_is_handed_out_whole_is_refused() -> None:
    with pytest.raises(NeverFits, match="GPUs can only be granted whole here"):
        plugin(plain()).translate(parse_request("50%"))


def test_a_whole_gpu_where_all_are_shared_is_refused_with_what_there_is() -> None:
    with pytest.raises(NeverFits, match="There are: one of 50 replicas of a GPU"):
        plugin(plain(replicas=50, strategy="time-slicing")).translate(parse_request("1"))


def test_time_slicing_grants_the_share_and_limits_nothing() -> None:
    translation = plugin(plain(replicas=50, strategy="time-slicing")).translate(parse_request("2%"))
    assert translation.pod.limits == {"nvidia.com/gpu": "1"}
    assert translation.statement.nominal == ("memory", "compute")
    assert translation.statement.memory_mib == 655
    assert "Nothing stops a neighbour" in str(translation.statement)


def test_a_renamed_replica_is_asked_for_by_its_name() -> None:
    shared = node(
        labels=discovered(replicas=10, strategy="time-slicing"), allocatable={"nvidia.com/gpu.shared": 10}
    )
    assert plugin(shared).translate(parse_request("10%")).pod.limits == {"nvidia.com/gpu.shared": "1"}


def test_a_replica_is_never_less_than_asked_for_nor_much_more() -> None:
    tenths = plugin(plain(replicas=10, strategy="time-slicing"))
    assert tenths.translate(parse_request("7%")).statement.milli == 100
    for text in ("11%", "6%"):
        with pytest.raises(NeverFits, match="slices have fixed sizes here"):
            tenths.translate(parse_request(text))


def test_what_a_replica_differs_by_is_said() -> None:
    statement = plugin(plain(replicas=40, strategy="time-slicing")).translate(parse_request("2%")).statement
    assert [str(each) for each in statement.rounded] == [
        "compute: asked for 2%, granted 2.5% (one of 40 replicas of a GPU)",
        "memory: asked for 655MiB, granted 819MiB (one of 40 replicas of a GPU)",
    ]


def test_mps_rounds_memory_and_percent_down() -> None:
    capable = {"compute_major": "8", "compute_minor": "0"}
    thirds = plugin(plain(replicas=30, strategy="mps", **capable))
    statement = thirds.translate(parse_request("3%")).statement
    assert (statement.milli, statement.memory_mib) == (30, 1092)
    assert statement.enforcement.memory.strength is Strength.COOPERATIVE
    with pytest.raises(NeverFits):
        thirds.translate(parse_request("3.1%"))


@pytest.mark.parametrize(
    ("capability", "replicas", "offered"),
    [(("7", "0"), 16, True), (("7", "0"), 17, False), (("7", "5"), 48, True), (("8", "0"), 49, False)],
)
def test_mps_has_a_most_number_of_replicas(capability: tuple[str, str], replicas: int, offered: bool) -> None:
    major, minor = capability
    shared = plain(replicas=replicas, strategy="mps", memory=81920, compute_major=major, compute_minor=minor)
    assert bool(plugin(shared).gpus()) is offered


def test_two_percent_of_a_v100_cannot_be_had_by_mps() -> None:
    volta = plain(replicas=16, strategy="mps", compute_major="7", compute_minor="0")
    with pytest.raises(NeverFits, match=r"one of 16 MPS replicas of a GPU \(6%, 2GiB\)"):
        plugin(volta).translate(parse_request("2%"))


@pytest.mark.parametrize("strategy", ["mps", "time-slicing"])
def test_more_than_one_replica_is_refused(strategy: str) -> None:
    with pytest.raises(NeverFits, match="can be of the same GPU"):
        plugin(plain(gpus=2, replicas=10, strategy=strategy)).translate(parse_request("2x10%"))


def test_the_smallest_mig_instance_that_is_enough() -> None:
    dialect = plugin(mig(g1g_5gb=2, g2g_10gb=2, g3g_20gb=1))
    for text, resource in (("10%", "1g.5gb"), ("20%", "2g.10gb"), ("40%", "3g.20gb"), ("9GiB", "2g.10gb")):
        translation = dialect.translate(parse_request(text))
        assert translation.pod.limits == {f"nvidia.com/mig-{resource}": "1"}
        assert translation.statement.enforcement.compute.strength is Strength.HARD


def test_mig_does_not_reach_down_to_two_percent() -> None:
    with pytest.raises(NeverFits, match=r"a MIG instance 1g.5gb \(14.2%, 4.75GiB\)"):
        plugin(mig(g1g_5gb=7)).translate(parse_request("2%"))


def test_mig_single_asks_for_the_plain_resource() -> None:
    cluster, options = everything()["mig-single"]
    translation = DevicePlugin(cluster, options).translate(parse_request("14%"))
    assert translation.pod.limits == {"nvidia.com/gpu": "1"}
    assert translation.statement.memory_mib == 4864
    assert translation.statement.enforcement.memory.by == "a MIG instance"


def test_an_a30_has_four_parts() -> None:
    labels = {**discovered("NVIDIA-A30-MIG-1g.6gb", 5952), "nvidia.com/mig.strategy": "single"}
    a30 = node(labels=labels, allocatable={"nvidia.com/gpu": 4})
    assert plugin(a30).translate(parse_request("25%")).statement.milli == 250


def test_a_limit_that_holds_comes_before_one_that_does_not() -> None:
    dialect = plugin(
        plain("ts", replicas=8, strategy="time-slicing", product=A100, memory=40960), mig(g1g_5gb=7)
    )
    translation = dialect.translate(parse_request("12%"))
    assert translation.pod.limits == {"nvidia.com/mig-1g.5gb": "1"}


def test_the_smaller_of_two_sizes_comes_first() -> None:
    dialect = plugin(*(plain(str(n), replicas=n, strategy="time-slicing") for n in (8, 10)))
    assert dialect.translate(parse_request("9%")).statement.milli == 100


def test_nodes_where_the_same_resource_is_something_else_are_kept_out() -> None:
    dialect = plugin(plain("a"), plain("b", replicas=10, strategy="time-slicing"), plain("c"))
    assert dialect.translate(parse_request("1")).pod.node_affinity == (
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["Tesla-V100-SXM2-32GB"]},
    )
    assert dialect.translate(parse_request("10%")).pod.node_affinity == (
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["Tesla-V100-SXM2-32GB-SHARED"]},
    )


def test_nodes_that_no_label_tells_apart_are_named() -> None:
    other = plain("b")
    other["metadata"]["labels"]["nvidia.com/cuda.driver-version.full"] = "470.1"
    requirement = plugin(plain("a"), other).translate(parse_request("1 driver>=550")).pod.node_affinity
    assert requirement == ({"key": "kubernetes.io/hostname", "operator": "In", "values": ["a"]},)


def test_a_gpu_cannot_be_asked_for_by_number() -> None:
    with pytest.raises(BadRequest, match="chooses the GPU itself"):
        plugin(plain()).translate(parse_request("1 index=0"))


def test_nodes_of_hami_are_left_to_hami() -> None:
    assert plugin(hami()).evidence() == ""


def test_memory_in_bytes_is_understood() -> None:
    odd = plain(memory=32768 * 2**20)
    assert plugin(odd).gpus()[0].device.memory_mib == 32768


def test_without_discovery_whole_gpus_can_still_be_had() -> None:
    bare = node(allocatable={"nvidia.com/gpu": 2})
    statement = plugin(bare).translate(parse_request("2")).statement
    assert statement.memory_mib is None
    assert statement.nominal == ("memory", "compute")
    assert "no label of the node says whether its GPUs are shared" in str(statement)
    assert "an amount unknown here" in str(statement)


def test_gpus_that_are_known_to_be_whole_are_taken_before_those_that_may_be_shared() -> None:
    dialect = plugin(node("a", allocatable={"nvidia.com/gpu": 8}), plain("b"))
    translation = dialect.translate(parse_request("1"))
    assert translation.statement.enforcement.memory.strength is Strength.HARD
    assert translation.pod.node_affinity[0]["values"] == ["Tesla-V100-SXM2-32GB"]
    more = dialect.translate(parse_request("8"))
    assert more.statement.enforcement.memory.strength is Strength.NONE
    assert more.pod.node_affinity[0]["values"] == ["a"]


def test_what_is_held_is_counted_and_said_to_be_laid_out() -> None:
    dialect = plugin(plain(gpus=2, replicas=10, strategy="time-slicing"))
    pods = [pod(f"p{index}", limits={"nvidia.com/gpu": 1}) for index in range(12)]
    (use,) = usage(dialect, pods)
    assert not use.exact
    assert use.milli == (1200, 2000)
    assert [each.held_milli for each in use.gpus] == [1000, 200]
    assert [each.free_contexts for each in use.gpus] == [0, 8]


def test_mig_instances_are_counted() -> None:
    (use,) = usage(plugin(mig(g1g_5gb=2, g2g_10gb=1)), [pod(on="mig", limits={"nvidia.com/mig-2g.10gb": 1})])
    assert sorted((each.device.mig_profile, each.held_memory_mib) for each in use.gpus) == [
        ("1g.5gb", 0),
        ("1g.5gb", 0),
        ("2g.10gb", 9856),
    ]


def test_a_mig_instance_is_not_laid_onto_a_whole_gpu_beside_it() -> None:
    both = mig(g1g_5gb=1)
    both["status"]["allocatable"]["nvidia.com/gpu"] = "1"
    (use,) = usage(plugin(both), [pod(on="mig", limits={"nvidia.com/mig-1g.5gb": 1})])
    assert [(each.device.mig_profile, each.leases) for each in use.gpus] == [(None, 0), ("1g.5gb", 1)]


# -- Shared MIG instances --------------------------------------------------


def shared_mig(
    resource: str, *, amount: int = 28, single: bool = False, replicas: str = "4", **labels: str
) -> dict[str, Any]:
    """Return a node with seven MIG instances of one GPU, each of which is offered as four replicas.

    Its labels are below the resource's own name, whether or not it was renamed, as those of plugin 0.20.
    """
    own = "nvidia.com/gpu" if single else "nvidia.com/mig-1g.10gb"
    about = {"memory": "9984", "sharing-strategy": "time-slicing", "replicas": replicas, **labels}
    found = {**discovered("NVIDIA-H100-80GB-HBM3", 81559), "nvidia.com/mig.strategy": "mixed"}
    if single:
        found |= {"nvidia.com/mig.strategy": "single"}
        found["nvidia.com/gpu.product"] = "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"
    found |= {f"{own}.{key}": value for key, value in about.items() if value}
    return node(labels=found, allocatable={resource: amount})


@pytest.mark.parametrize(
    ("resource", "single"),
    [
        ("nvidia.com/mig-1g.10gb", False),
        ("nvidia.com/mig-1g.10gb.shared", False),
        ("nvidia.com/gpu", True),
        ("nvidia.com/gpu.shared", True),
    ],
)
def test_replicas_of_mig_instances_are_no_instances_and_hard_nowhere(resource: str, single: bool) -> None:
    dialect = plugin(shared_mig(resource, single=single))
    assert [(each.device.memory_mib, each.device.contexts) for each in dialect.gpus()] == [(9984, 4)] * 7
    translation = dialect.translate(parse_request("3%"))
    assert translation.pod.limits == {resource: "1"}
    statement = translation.statement
    assert (statement.milli, statement.memory_mib) == (35, 2496)
    assert statement.nominal == ("memory", "compute")
    (use,) = usage(dialect, [pod(f"p{n}", limits={resource: 1}) for n in range(5)])
    assert [each.held_memory_mib for each in use.gpus] == [9984, 2496, 0, 0, 0, 0, 0]
    counted = counted_as(parse_request("3%"), dialect)
    assert dialect.translate(counted).pod == translation.pod
    statuses, granted = list(use.gpus), 0
    while (parts := placement.place(counted, statuses, Rules(lease_contexts=1))) is not None:
        assert [(part.milli, part.memory_mib) for part in parts] == [(35, 2496)]
        statuses, granted = placement.deduct(statuses, parts), granted + 1
    assert granted == 28 - 5
    assert free_now(counted, use.gpus) == 28 - 5


@pytest.mark.parametrize("name", ["nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.shared"])
def test_more_replicas_than_instances_are_seen_without_their_label(name: str) -> None:
    dialect = plugin(shared_mig(name, replicas="", count="7"))
    assert len(dialect.gpus()) == 7
    assert dialect.translate(parse_request("3%")).statement.nominal == ("memory", "compute")


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb.shared", "nvidia.com/gpu.shared"])
def test_what_is_shared_by_nobody_knows_how_many_is_not_offered(resource: str) -> None:
    assert plugin(node(labels=discovered(), allocatable={resource: 28})).gpus() == ()


def test_an_instance_of_which_no_label_says_whether_it_is_shared_is_not_called_hard() -> None:
    bare = node(labels=discovered(A100, 40960), allocatable={"nvidia.com/mig-1g.5gb": 7})
    statement = plugin(bare).translate(parse_request("14%")).statement
    assert statement.nominal == ("memory", "compute")
    assert "no label of the node says whether its MIG instances are shared" in str(statement)


def test_as_many_gpus_as_there_are_have_many_replicas() -> None:
    many = plain(gpus=8, replicas=500, strategy="time-slicing")
    assert len(plugin(many).gpus()) == 8


def test_mig_node_pools_of_gke_offer_instances() -> None:
    labels = {
        "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
        "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
        "nvidia.com/gpu.memory": "4864",
    }
    shared = {
        **labels,
        "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "2",
    }
    alone = Gke(Cluster.read([node(labels=labels, allocatable={"nvidia.com/gpu": 7})]))
    assert len(alone.gpus()) == 7
    assert alone.translate(parse_request("14%")).statement.enforcement.memory.strength is Strength.HARD
    with pytest.raises(NeverFits, match="no GPU here can be granted whole"):
        alone.translate(parse_request("1"))
    parts = Gke(Cluster.read([node(labels=shared, allocatable={"nvidia.com/gpu": 14})]))
    assert [each.device.contexts for each in parts.gpus()] == [2] * 7
    statement = parts.translate(parse_request("7%")).statement
    assert (statement.milli, statement.memory_mib) == (71, 2432)
    assert statement.nominal == ("memory", "compute")
