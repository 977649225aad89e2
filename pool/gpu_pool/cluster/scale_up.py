"""What makes a group of nodes grow, and what can be said of it meanwhile. Pure.

An autoscaler starts a node for a pod that no node can take: Cluster Autoscaler and Karpenter both
do, and know nothing of a queue outside the cluster. So for each node that those who wait need there is
a *placeholder*: a pod that asks for what the first of them does, on a new node of the group.
When it has its node, the pool grants what is free there by its own rules, and the placeholder goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any, Final

from gpu_pool.cluster.dialects import Manifest, PodBans, PodParts, label_value, merged
from gpu_pool.cluster.dialects.amounts import HOSTNAME
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping
from gpu_pool.cluster.nodes import REPELLING, NodeGroup, tolerations_of
from gpu_pool.cluster.settings import CONTAINER
from gpu_pool.policy import placement
from gpu_pool.policy.queue import Waiter
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import Device, DeviceStatus, SliceRequest
from gpu_pool_client._durations import format_duration

#: The pool of which a pod is a placeholder, and its group.
PLACEHOLDER_LABEL: Final = f"{PREFIX}/placeholder"
GROUP_LABEL: Final = f"{PREFIX}/node-group"
COMPONENT: Final = "gpu-node-placeholder"
#: Words of autoscalers about one pod: Cluster Autoscaler's, then Karpenter's.
_STARTS: Final = frozenset({"TriggeredScaleUp", "Nominated"})
_CANNOT: Final = frozenset({"NotTriggerScaleUp", "FailedScheduling", "FailedScaleUp"})
#: Who also says that a pod cannot be scheduled, which is no news.
_SCHEDULER: Final = "scheduler"
_MOST_WORDS: Final = 200


@dataclass(frozen=True, slots=True)
class Growable:
    """A group of nodes as it is now."""

    name: str
    #: The devices of one more node of it, empty.
    fresh: tuple[DeviceStatus, ...]
    #: How many nodes it can still have, those that start included.
    left: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What those who wait need."""

    #: For each node that is to be started, its group and the first request that needs it.
    nodes: tuple[tuple[str, SliceRequest], ...] = ()
    #: In which group each of them will be, by waiter's number.
    groups: Mapping[int, str] = field(default_factory=dict)


def demand(line: Iterable[Waiter], groups: Sequence[Growable], rules: Rules) -> Demand:
    """Return which nodes those in the queue need, who have the right to what is free and found none.

    ``line`` is in the order of their turns. Who can only be on devices that there are, such as
    those beside a home, needs no other node.
    """
    nodes: list[tuple[str, SliceRequest]] = []
    free: list[list[DeviceStatus]] = []
    found: dict[int, str] = {}
    left = {group.name: group.left for group in groups}
    for waiter in line:
        if waiter.devices:
            continue
        number = _place(waiter.request, free, rules)
        if number is None:
            group = next((g for g in groups if left[g.name] > 0 and _fits(waiter.request, g, rules)), None)
            if group is None:
                continue
            left[group.name] -= 1
            nodes.append((group.name, waiter.request))
            free.append(list(group.fresh))
            number = _place(waiter.request, free, rules)
        if number is not None:
            found[waiter.number] = nodes[number][0]
    return Demand(tuple(nodes), found)


def group_for(request: SliceRequest, groups: Sequence[Growable], rules: Rules) -> str | None:
    """Return the group in which a node would be started for somebody new; None if in none."""
    return next((each.name for each in groups if each.left > 0 and _fits(request, each, rules)), None)


def _fits(request: SliceRequest, group: Growable, rules: Rules) -> bool:
    return placement.place(request, group.fresh, rules) is not None


def _place(request: SliceRequest, free: list[list[DeviceStatus]], rules: Rules) -> int | None:
    """Put a request onto the first node with capacity for it, and return which one that is."""
    for number, devices in enumerate(free):
        parts = placement.place(request, devices, rules)
        if parts is not None:
            free[number] = placement.deduct(devices, parts)
            return number
    return None


def empty(devices: Iterable[Device], milli: int) -> tuple[DeviceStatus, ...]:
    """Return devices of which nobody has anything; of each, MIG instances apart, ``milli`` may be granted."""
    return tuple(
        DeviceStatus(each, 0, 0, 0, 0, milli if each.mig_profile is None else each.milli) for each in devices
    )


# -- The placeholder ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlaceholderShape:
    """What a placeholder is besides its slice."""

    pool: str
    namespace: str
    image: str
    #: What a kernel without a course's word gets, so that the node that comes has capacity for one.
    cpu: float
    memory_mib: int
    tolerations: tuple[str, ...] = ()


def placeholder(
    group: NodeGroup,
    name: str,
    place: PlaceholderShape,
    parts: PodParts,
    bans: PodBans,
    there: Collection[str],
) -> dict[str, Any]:
    """Return the pod for which one more node of the group has to be started.

    ``there`` are the host names of the nodes that the group has: the pool has found no capacity on them,
    whatever the scheduler would think. No two placeholders are on one node.
    """
    label = {PLACEHOLDER_LABEL: label_value(place.pool)}
    metadata = {
        "name": name,
        "namespace": place.namespace,
        "labels": {**label, GROUP_LABEL: label_value(group.name), "app.kubernetes.io/component": COMPONENT},
    }
    requests = {"cpu": f"{round(place.cpu * 1000)}m"} if place.cpu else {}
    if place.memory_mib:
        requests["memory"] = f"{place.memory_mib}Mi"
    container = {
        "name": CONTAINER,
        "image": place.image,
        "resources": {"requests": requests},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65_535,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(group.select),
        "affinity": {"podAntiAffinity": _apart(label), **_not_on(there)},
        "tolerations": [*_tolerations(group), *tolerations_of(place.tolerations)],
        "containers": [container],
    }
    return merged(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, CONTAINER, parts, bans
    )


def _apart(label: Mapping[str, str]) -> dict[str, Any]:
    term = {"labelSelector": {"matchLabels": dict(label)}, "topologyKey": HOSTNAME}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _not_on(there: Collection[str]) -> dict[str, Any]:
    if not there:
        return {}
    expression = {"key": HOSTNAME, "operator": "NotIn", "values": sorted(there)}
    terms = [{"matchExpressions": [expression]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _tolerations(group: NodeGroup) -> list[dict[str, Any]]:
    """Return what bears with all taints of the group's nodes: whether a kernel does is its own affair."""
    taints = listing(mapping(group.stand_in.get("spec")).get("taints"))
    return [
        {"key": each.get("key"), "operator": "Exists", "effect": each.get("effect")}
        for each in taints
        if each.get("effect") in REPELLING
    ]


# -- What is said of it ------------------------------------------------------


class AutoscalerAnswer(Enum):
    """What the autoscaler has said of a placeholder."""

    NOTHING = "nothing"
    STARTS = "starts"
    CANNOT = "cannot"


def answer(events: Iterable[Manifest]) -> tuple[AutoscalerAnswer, str]:
    """Return the last that an autoscaler said of a pod, and what it said."""
    told = [each for each in events if each.get("reason") in _STARTS | _CANNOT and not _is_scheduler(each)]
    if not told:
        return AutoscalerAnswer.NOTHING, ""
    last = max(told, key=_when)
    message = " ".join(str(last.get("message") or "").split())[:_MOST_WORDS]
    return (AutoscalerAnswer.STARTS if last["reason"] in _STARTS else AutoscalerAnswer.CANNOT), message


def _is_scheduler(event: Manifest) -> bool:
    """Whether a scheduler said it, which cannot start a node."""
    source = str(mapping(event.get("source")).get("component") or event.get("reportingComponent") or "")
    return source.endswith(_SCHEDULER)


def _when(event: Manifest) -> str:
    """Return when an event was last seen; times of the API are ordered as texts."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return str(next(filter(None, times), ""))


@dataclass(frozen=True, slots=True)
class NodeStart:
    """A node of a group that is to be started."""

    #: Seconds since it was asked for.
    age: float
    answer: AutoscalerAnswer = AutoscalerAnswer.NOTHING
    #: The autoscaler's words.
    message: str = ""


def usual(seconds: Sequence[float], otherwise: float) -> float:
    """Return how long a start takes, by those before; 0 where that is not known."""
    return median(seconds) if seconds else otherwise


def told(start: NodeStart | None, usually: float, late: float) -> str:
    """Say to somebody who waits for a machine how that goes."""
    if start is None:
        return f"A machine has to be started for it{_about(usually)}."
    if start.answer is AutoscalerAnswer.CANNOT:
        return (
            "No machine is free, and none can be started for it at the moment; it is tried again. "
            "If that goes on, tell your instructor."
        )
    if start.age > late:
        return (
            f"A machine was requested {format_duration(start.age)} ago and has not started. "
            "Tell your instructor."
        )
    return f"A machine is being started{_about(usually - start.age if usually else 0.0, 'more ')}."


def _about(seconds: float, more: str = "") -> str:
    """Say how long that takes, in whole minutes, as far as it is known."""
    if not seconds:
        return ", which takes some minutes"
    if seconds < 0:
        return ", which takes longer than usual"
    return f", about {max(1, round(seconds / 60))} min{' ' + more.strip() if more else ''}"
