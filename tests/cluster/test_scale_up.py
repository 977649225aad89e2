"""Which nodes those who wait need, the pod that asks for one, and what is said meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import PodBans, PodParts
from gpu_pool.cluster.nodes import NodeGroup
from gpu_pool.cluster.scale_up import (
    AutoscalerAnswer,
    Growable,
    NodeStart,
    PlaceholderShape,
    answer,
    demand,
    empty,
    group_for,
    placeholder,
    told,
    usual,
)
from gpu_pool.policy.queue import Waiter
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import WHOLE, Device, parse_request
from support.clusters import hami

RULES = Rules()


def growable(name: str = "v100", *, gpus: int = 1, left: int = 4, memory: int = 32768) -> Growable:
    devices = [Device(f"{name}-{n}", n, name.upper(), memory, node=f"{name}/new") for n in range(gpus)]
    return Growable(name, empty(devices, WHOLE), left)


def line(*sizes: str) -> list[Waiter]:
    return [Waiter(number, parse_request(size)) for number, size in enumerate(sizes, 1)]


@pytest.mark.parametrize(
    ("sizes", "groups", "nodes"),
    [
        ([], [growable()], []),
        (["2%"] * 50, [growable()], ["v100"]),
        (["2%"] * 51, [growable()], ["v100", "v100"]),
        (["60%", "60%", "40%"], [growable()], ["v100", "v100"]),
        (["1"] * 9, [growable()], ["v100"] * 4),
        (["1"] * 9, [growable(gpus=8)], ["v100", "v100"]),
        (["2"], [growable(), growable("a100", gpus=2)], ["a100"]),
        (["2"], [growable()], []),
        (["2% model=a100"], [growable(), growable("a100")], ["a100"]),
        (["1", "1", "1"], [growable(left=1), growable("a100", left=1)], ["v100", "a100"]),
        (["2%"], [growable(left=0)], []),
        (["2%"], [growable(left=-1)], []),
    ],
)
def test_as_many_nodes_as_those_who_wait_need(
    sizes: list[str], groups: list[Growable], nodes: list[str]
) -> None:
    found = demand(line(*sizes), groups, RULES)
    assert [name for name, _ in found.nodes] == nodes
    assert set(found.groups.values()) == set(nodes)


def test_who_needs_the_gpus_that_there_are_needs_no_other_node() -> None:
    beside_home = Waiter(1, parse_request("2%"), devices=frozenset({"GPU-n1-0"}))
    found = demand([beside_home, Waiter(2, parse_request("1"))], [growable()], RULES)
    assert found.nodes == (("v100", parse_request("1")),)
    assert found.groups == {2: "v100"}


def test_whoever_finds_no_group_does_not_keep_the_next_from_one() -> None:
    found = demand(line("2", "2%"), [growable()], RULES)
    assert found.groups == {2: "v100"}


def test_a_group_for_somebody_new_is_the_first_that_could_hold_it() -> None:
    groups = [growable(left=0), growable("a100", gpus=2)]
    assert group_for(parse_request("2%"), groups, RULES) == "a100"
    assert group_for(parse_request("4"), groups, RULES) is None


def group(taints: tuple[dict[str, str], ...] = ()) -> NodeGroup:
    node = hami("v100/new")
    node["spec"]["taints"] += taints
    return NodeGroup("v100", {"pool": "gpu"}, 4, node)


def pod(*there: str, **more: Any) -> dict[str, Any]:
    place = PlaceholderShape("gpu-pool", "hub", "pause:1", cpu=0.5, memory_mib=512, tolerations=("team",))
    parts = PodParts(limits={"nvidia.com/gpu": "1"}, scheduler_name="hami-scheduler")
    return placeholder(more.get("group", group()), "gpu-pool-node-1", place, parts, PodBans(), there)


def test_a_placeholder_asks_for_what_a_kernel_does_on_a_node_that_is_not_there() -> None:
    made = pod("n2", "n1")
    spec = made["spec"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["schedulerName"] == "hami-scheduler"
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    ]
    resources = spec["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "500m", "memory": "512Mi", "nvidia.com/gpu": "1"}
    assert "jupyter-gpu-pool/lease" not in made["metadata"]["labels"]


def test_no_two_placeholders_are_on_one_node() -> None:
    made = pod()
    assert "nodeAffinity" not in made["spec"]["affinity"]
    (term,) = made["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = made["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_placeholder_bears_with_the_taints_of_its_group() -> None:
    made = pod(group=group(({"key": "dedicated", "effect": "NoSchedule"},)))
    users = ["hub.jupyter.org/dedicated", "hub.jupyter.org_dedicated"]
    assert [each["key"] for each in made["spec"]["tolerations"]] == [
        "nvidia.com/gpu",
        "dedicated",
        *users,
        "team",
    ]


def event(reason: str, message: str, at: str, component: str = "cluster-autoscaler") -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "source": {"component": component},
    }


def test_the_last_word_of_an_autoscaler_counts_and_the_schedulers_do_not() -> None:
    starts = event(
        "TriggeredScaleUp", "pod triggered scale-up: [{v100 0->1 (max: 4)}]", "2026-11-22T10:00:01Z"
    )
    cannot = event("NotTriggerScaleUp", "1 max node group size\nreached", "2026-11-22T10:00:09Z")
    pending = event("FailedScheduling", "0/3 nodes", "2026-11-22T10:00:20Z", "default-scheduler")
    hami_says = event("FailedScheduling", "0/3 nodes", "2026-11-22T10:00:21Z", "hami-scheduler")
    assert answer([]) == (AutoscalerAnswer.NOTHING, "")
    assert answer([pending, hami_says]) == (AutoscalerAnswer.NOTHING, "")
    assert answer([starts, pending]) == (
        AutoscalerAnswer.STARTS,
        "pod triggered scale-up: [{v100 0->1 (max: 4)}]",
    )
    assert answer([cannot, starts, pending]) == (AutoscalerAnswer.CANNOT, "1 max node group size reached")


def test_karpenters_words_count_too() -> None:
    late = {"reason": "FailedScheduling", "message": "no nodepool", "eventTime": "2026-11-22T10:00:09.1Z"}
    cannot = {**late, "reportingComponent": "karpenter", "source": {}, "lastTimestamp": None}
    nominated = event("Nominated", "Pod should schedule on: nodeclaim/a", "2026-11-22T10:00:10Z", "karpenter")
    assert answer([cannot]) == (AutoscalerAnswer.CANNOT, "no nodepool")
    assert answer([nominated, cannot])[0] is AutoscalerAnswer.STARTS


@pytest.mark.parametrize(
    ("start", "usually", "words"),
    [
        (None, 180, "A machine has to be started for it, about 3 min."),
        (None, 0, "A machine has to be started for it, which takes some minutes."),
        (NodeStart(0), 180, "A machine is being started, about 3 min more."),
        (NodeStart(60), 180, "A machine is being started, about 2 min more."),
        (NodeStart(170), 180, "A machine is being started, about 1 min more."),
        (NodeStart(200), 180, "A machine is being started, which takes longer than usual."),
        (NodeStart(200), 0, "A machine is being started, which takes some minutes."),
        (
            NodeStart(901),
            180,
            "A machine was requested 15min1s ago and has not started. Tell your instructor.",
        ),
        (
            NodeStart(5, AutoscalerAnswer.CANNOT, "max size reached"),
            180,
            "No machine is free, and none can be started for it at the moment; it is tried again. "
            "If that goes on, tell your instructor.",
        ),
    ],
)
def test_what_a_student_reads_meanwhile(start: NodeStart | None, usually: float, words: str) -> None:
    assert told(start, usually, 900) == words


def test_how_long_a_start_takes_is_what_the_latest_took() -> None:
    assert usual([], 180.0) == 180.0
    assert usual([100.0, 1000.0, 120.0], 180.0) == 120.0
