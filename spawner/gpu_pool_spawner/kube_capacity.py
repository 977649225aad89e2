"""How many servers with a slice there is room for in a cluster now, and when there will be. Pure.

For people to read, and to refuse what would only wait: which pod goes where,
the cluster's scheduler decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from gpu_pool.cluster.dialects import Dialect, Manifest, Node, Pod, PodParts, usage
from gpu_pool.cluster.dialects.objects import quantity
from gpu_pool_client import DeviceStatus
from gpu_pool_client._free import accepting, free_slices, whole_requests
from gpu_pool_spawner.kube_profiles import Profile

#: The room where nothing bounds it that the cluster shows.
UNBOUNDED: Final = 2**31


@dataclass(frozen=True, slots=True)
class ClusterSupply:
    """What a cluster has, and who holds it."""

    dialect: Dialect
    #: Those that are on a node.
    pods: tuple[Pod, ...] = ()
    #: Names of nodes that show no GPUs at the moment, though they have some.
    away: frozenset[str] = field(default_factory=frozenset)


def capacity(profile: Profile, supply: ClusterSupply) -> int:
    """Return how many servers of a profile with a slice there is room for now; ``UNBOUNDED`` at most."""
    return _capacity(profile, supply, supply.pods)


def next_capacity(profile: Profile, supply: ClusterSupply) -> datetime | None:
    """Return when there is room for one at the latest; None where that is not known."""
    ending = sorted((pod for pod in supply.pods if pod.ends), key=lambda pod: pod.ends or datetime.max)
    if not ending or not _without(profile, supply, ending):
        return None
    fewest, enough = 0, len(ending)
    while enough - fewest > 1:
        middle = (fewest + enough) // 2
        if _without(profile, supply, ending[:middle]):
            enough = middle
        else:
            fewest = middle
    return ending[enough - 1].ends


def _without(profile: Profile, supply: ClusterSupply, gone: Sequence[Pod]) -> int:
    names = {(pod.namespace, pod.name) for pod in gone}
    left = [pod for pod in supply.pods if (pod.namespace, pod.name) not in names]
    return _capacity(profile, supply, left)


def _capacity(profile: Profile, supply: ClusterSupply, pods: Sequence[Pod]) -> int:
    if profile.translation is None:
        return 0
    parts = profile.translation.pod
    amounts = _amounts(pods)
    devices = {node.name: node.gpus for node in usage(supply.dialect, pods)}
    nodes = supply.dialect.cluster.nodes
    # Bitfusion's are on servers of its own: what of them is free, no node shows, and it may not be none.
    shown = bool(supply.dialect.gpus())
    counted = {key for key in parts.limits if any(node.amount(key) for node in nodes)}
    found = sum(
        min(
            _of_resources(node, parts.limits, counted, amounts[node.name]),
            _of_devices(profile, devices.get(node.name, ())) if shown else UNBOUNDED,
        )
        for node in nodes
        if node.is_open and node.name not in supply.away and _may_be_on(node, parts)
    )
    return min(found, UNBOUNDED)


def _amounts(pods: Iterable[Pod]) -> Mapping[str, Mapping[str, int]]:
    """Return what is held of each extended resource on each node."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pod in pods:
        for key, amount in pod.limits.items():
            found[pod.node][key] += amount
    return found


def _of_resources(node: Node, limits: Mapping[str, str], counted: set[str], held: Mapping[str, int]) -> int:
    """Return for how many a node has the resources; those that no node shows are a scheduler's own affair."""
    bounds = [(node.amount(key) - held.get(key, 0)) // max(1, quantity(limits[key])) for key in counted]
    return max(0, min(bounds)) if bounds else UNBOUNDED


def _of_devices(profile: Profile, devices: Sequence[DeviceStatus]) -> int:
    """Return for how many a node's GPUs have room; each GPU of a server is another one."""
    if profile.translation is None or profile.request is None:
        return 0
    statement = profile.translation.statement
    usable = accepting(profile.request, devices)
    slices = [free_slices(status, statement.milli or 0, statement.memory_mib or 0) for status in usable]
    return whole_requests(slices, statement.count)


def _may_be_on(node: Node, parts: PodParts) -> bool:
    return all(node.label(key) == value for key, value in parts.node_selector.items()) and all(
        _meets(node, requirement) for requirement in parts.node_affinity
    )


def _meets(node: Node, requirement: Manifest) -> bool:
    """Whether a node meets a requirement on its labels, of the one kind that dialects write."""
    return node.label(requirement["key"]) in requirement["values"]
