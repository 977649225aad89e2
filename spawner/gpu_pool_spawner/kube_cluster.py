"""The cluster as the Hub sees it: nodes, pods and how GPUs are shared, asked once for all who choose.

What the Hub's service account needs for this stands in the documentation with
its reasons. Without the right to list nodes nothing is known of any GPU;
everything else that may not be read counts as not there, and the log says so.

How many servers with a slice there is room for is for people to read, and to refuse what would only wait:
which pod goes where, the cluster's scheduler decides.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from kubernetes_asyncio.client import ApiClient

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import (
    AUTO,
    Cluster,
    Dialect,
    DialectOptions,
    Manifest,
    Node,
    Pod,
    PodParts,
    usage,
)
from gpu_pool.cluster.dialects.choosing import Memory, away, choose_with_memory
from gpu_pool.cluster.dialects.objects import quantity
from gpu_pool.cluster.snapshot import NODES, list_all, list_pods, list_sources
from gpu_pool_client import DeviceStatus
from gpu_pool_client._free import accepting, free_slices, whole_requests
from gpu_pool_spawner.kube_profiles import Profile
from gpu_pool_spawner.pool_view import log_once

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


#: Seconds for which nodes and pods, and for which definitions and classes, are believed.
_FRESH: Final = 2.0
_FRESH_CLASSES: Final = 300.0
#: Seconds within which the API server answers.
_WITHIN: Final = 10.0
#: Seconds for which a node that shows no GPUs any more has them and gives none out: a server with a slice
#: is told that there is no room now, and not that there never is.
_AWAY_FOR: Final = 180.0
_CLASSES: Final = ("crds", "runtime_classes", "device_classes")
_CLAIMS: Final = ("resource_slices", "resource_claims", "device_taint_rules")


class ClusterReader:
    """One cluster, in one dialect."""

    def __init__(self, api: Api, dialect: str = AUTO, options: DialectOptions | None = None) -> None:
        self._api, self._dialect, self._options = api, dialect, options or DialectOptions()
        self._answer: asyncio.Task[ClusterSupply | None] | None = None
        self._asked_at = 0.0
        self._classes: dict[str, list[Manifest]] = {}
        self._classes_at = -_FRESH_CLASSES
        self._known: Memory = {}

    async def supply(self, *, fresh: bool = False) -> ClusterSupply | None:
        """Return what the cluster has; None if that cannot be seen. ``fresh``: not what was seen before."""
        believed = 0.0 if fresh else _FRESH
        if self._answer is None or (self._answer.done() and time.monotonic() - self._asked_at > believed):
            self._asked_at = time.monotonic()
            self._answer = asyncio.create_task(self._ask())
        # Whoever closes the page does not end it for the others.
        return await asyncio.shield(self._answer)

    async def _ask(self) -> ClusterSupply | None:
        try:
            return await asyncio.wait_for(self._read(), _WITHIN)
        except asyncio.TimeoutError:
            _warn(f"The cluster does not answer within {_WITHIN:.0f} s.")
        except (ApiAway, ApiRefused) as error:
            _warn(f"The cluster's nodes cannot be read, so no GPU can be granted: {error}")
        except Exception as error:  # noqa: BLE001 - servers without a GPU start all the same
            kind = type(error).__name__
            _warn(f"The cluster's nodes cannot be understood, so no GPU can be granted: {kind}: {error}")
        return None

    async def _read(self) -> ClusterSupply | None:
        nodes = await list_all(self._api, NODES, cached=True)
        classes, classes_at = self._classes, self._classes_at
        if time.monotonic() - classes_at > _FRESH_CLASSES:
            classes = await list_sources(self._api, _CLASSES, _warn_unreadable, cached=True)
            classes_at = time.monotonic()
        asked = _CLAIMS if classes["device_classes"] else ()
        claims = await list_sources(self._api, asked, _warn_unreadable, cached=True)
        pods = await list_pods(self._api, _warn_unreadable, cached=True)
        # Not before pods were read, which every cluster has: until then a gateway may have answered.
        self._classes, self._classes_at = classes, classes_at
        shown, now = Cluster.read(nodes, **classes, **claims), time.monotonic()
        choice, _, self._known = choose_with_memory(
            self._known, shown, self._options, self._dialect, now, _AWAY_FOR
        )
        _warn(str(choice))
        if choice.dialect is None:
            return None
        return ClusterSupply(choice.dialect, pods, away(self._known))


def _warn_unreadable(problem: str) -> None:
    _warn(f"No permission to read this part of the cluster; it is treated as empty: {problem}")


def _warn(text: str) -> None:
    log_once(f"GPUs of the cluster: {text}", logging.WARNING)


@functools.cache
def cluster_reader_of(client: ApiClient, dialect: str, options: DialectOptions) -> ClusterReader:
    """Return the reader of a cluster that all spawners with this client share."""
    return ClusterReader(Api.of(client), dialect, options)
