"""Which dialect a cluster speaks: read from its nodes, resource definitions and classes, with the reason.

Several can be there at once. Those that limit memory come first, then claims
if GPUs can be shared by them, since the scheduler itself allocates those and nobody
has to choose sizes beforehand; then those that own the scheduler or the node pool, then
other claims, then plain resources. The order is that of their ranks, so the same cluster
always gives the same answer.

Dialects are found through the entry points of installed packages, ours as any other's.

While the pod of a device plugin or of a DRA driver is replaced, its node shows no
GPU for some seconds. That is no fact about the cluster: nothing new is granted
there, and whoever asks or waits is not refused. So what nodes showed lately is
remembered. Pure: the time is given.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from gpu_pool import plugins
from gpu_pool.cluster.dialects.base import DEFAULTS, Dialect, DialectOptions, DialectTable
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, Node, mapping
from gpu_pool.plugins import PluginBroken
from gpu_pool_client import BadRequest

#: What a setting says to have the cluster looked at.
AUTO: Final = "auto"
#: The group of entry points that names dialects: those of this package, and of any other that is installed.
DIALECTS: Final = "gpu_pool.dialects"


@dataclass(frozen=True, slots=True)
class DialectChoice:
    """The dialect of a cluster, and why."""

    #: None if the cluster shows no way to get a GPU.
    dialect: Dialect | None
    #: Names of all that were seen, the preferred one first.
    seen: tuple[str, ...]
    #: Why this one, in words, one line each; what is ambiguous is said here.
    reasons: tuple[str, ...]

    @property
    def ambiguous(self) -> bool:
        """Whether the cluster shows several."""
        return len(self.seen) > 1

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def dialect_names() -> tuple[str, ...]:
    """Return the names of the dialects that installed packages offer, in order."""
    return tuple(sorted(plugins.offers(DIALECTS)))


@functools.cache
def installed_dialects() -> tuple[tuple[type[Dialect], ...], tuple[str, ...]]:
    """Return the dialects that can be used, the preferred one first; and in words, which cannot and why."""
    found: list[type[Dialect]] = []
    problems: list[str] = []
    for name in dialect_names():
        try:
            found.append(_load(name))
        except PluginBroken as broken:  # noqa: PERF203 - once for each process
            problems.append(f"The dialect {broken}. It is left out.")
    return tuple(sorted(found, key=lambda each: each.table.rank)), tuple(problems)


def _load(name: str) -> type[Dialect]:
    """Return the dialect of that name. Raises ``PluginBroken``."""
    found: type[Dialect] = plugins.load(DIALECTS, name, Dialect)
    table = getattr(found, "table", None)
    if not isinstance(table, DialectTable) or table.name != name:
        raise PluginBroken(f"{name} has no table, or one of another name")
    return found


def choose(cluster: Cluster, options: DialectOptions = DEFAULTS, name: str = AUTO) -> DialectChoice:
    """Return the dialect of that name, or with ``auto`` the preferred one of those that the cluster shows.

    One by which the pool divides whole devices takes them from everybody else, so it has to be named.
    Raises BadRequest for a name that is not a dialect's.
    """
    if name != AUTO:
        return _named(cluster, options, name)
    kinds, problems = installed_dialects()
    by_system = [kind for kind in kinds if not kind.table.by_pool]
    seen = [(each, why) for kind in by_system if (why := (each := kind(cluster, options)).evidence())]
    seen.sort(key=lambda pair: pair[0].rank)
    seen = [pair for pair in seen if not seen or pair[0].table.name not in seen[0][0].builds_on]
    if not seen:
        nodes = len(cluster.nodes)
        none = f"None of {nodes} nodes offers GPUs through a supported system."
        return DialectChoice(None, (), (none, *problems))
    chosen, why = seen[0]
    reasons = [f"{chosen.table.name}: {why}."]
    reasons += [f"Also found, but not used: {each.table.name}, since {why}." for each, why in seen[1:]]
    if len(seen) > 1:
        names = " or ".join(each.table.name for each, _ in seen)
        reasons.append(f"To decide yourself, set the dialect to {names}.")
    return DialectChoice(chosen, tuple(each.table.name for each, _ in seen), (*reasons, *problems))


def _named(cluster: Cluster, options: DialectOptions, name: str) -> DialectChoice:
    try:
        chosen: Dialect = _load(name)(cluster, options)
    except PluginBroken as broken:
        raise BadRequest(
            f"{name[:40]!a} is not a dialect that can be used: {broken}.",
            f"Accepted: {AUTO}, {', '.join(dialect_names())}.",
        ) from broken
    why = chosen.evidence() or "although this cluster shows no sign of it"
    return DialectChoice(chosen, (name,), (f"{name}: it is set; {why}.",))


@dataclass(frozen=True, slots=True)
class LastShown:
    """A node as it was when it last showed GPUs."""

    node: Node
    #: The ResourceSlices of its GPUs.
    slices: tuple[Manifest, ...] = ()
    #: Since when it shows none, by a clock that nobody sets; None while it does.
    away_since: float | None = None


#: By the node's name.
Memory: TypeAlias = Mapping[str, LastShown]


class RememberedCluster(NamedTuple):
    """A cluster with what was remembered of it."""

    choice: DialectChoice
    cluster: Cluster
    known: Memory


def choose_with_memory(
    known: Memory, shown: Cluster, options: DialectOptions, dialect: str, now: float, grace: float
) -> RememberedCluster:
    """Choose the dialect of a cluster as it is ``shown`` now, and as it counts by what is known of it."""
    choice = choose(shown, options, dialect)
    gpus = () if choice.dialect is None else choice.dialect.gpus()
    # One whose size is not known is none to the pool.
    partly = {gpu.node for gpu in gpus if not gpu.is_complete}
    with_gpus = {gpu.node for gpu in gpus if gpu.device.memory_mib} - partly
    known = remembered(known, shown, with_gpus, now, grace)
    cluster = completed(shown, known)
    return RememberedCluster(
        choice if cluster is shown else choose(cluster, options, dialect), cluster, known
    )


def remembered(
    known: Memory, cluster: Cluster, with_gpus: Collection[str], now: float, grace: float
) -> dict[str, LastShown]:
    """Return what is known of a cluster's nodes by now; those in ``with_gpus`` show some.

    One that shows none any more is known for ``grace`` seconds, one that is gone no longer at all.
    """
    found: dict[str, LastShown] = {}
    for node in cluster.nodes:
        before = known.get(node.name)
        if node.name in with_gpus:
            slices = tuple(each for each in cluster.resource_slices if node_of(each) == node.name)
            found[node.name] = LastShown(node, slices)
        elif before is not None:
            since = now if before.away_since is None else before.away_since
            if now < since + grace:
                found[node.name] = replace(before, away_since=since)
    return found


def completed(cluster: Cluster, known: Memory) -> Cluster:
    """Return the cluster as if its nodes that show no GPUs at the moment showed what they did."""
    away = {name: shown for name, shown in known.items() if shown.away_since is not None}
    if not away:
        return cluster
    slices = [each for each in cluster.resource_slices if node_of(each) not in away]
    slices += [each for shown in away.values() for each in shown.slices]
    nodes = tuple(_as_it_was(node, away.get(node.name)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, resource_slices=tuple(slices))


def away(known: Memory) -> frozenset[str]:
    """Return the names of the nodes that show no GPUs at the moment."""
    return frozenset(name for name, shown in known.items() if shown.away_since is not None)


def next_end(known: Memory, grace: float) -> float | None:
    """Return when the next of them will be known no longer; None where none is away."""
    since = [shown.away_since for shown in known.values() if shown.away_since is not None]
    return min(since) + grace if since else None


def _as_it_was(node: Node, shown: LastShown | None) -> Node:
    """Return the node with the GPUs that it showed; whether it takes pods is as it is now."""
    if shown is None:
        return node
    return replace(shown.node, taints=node.taints, conditions=node.conditions, cordoned=node.cordoned)


def node_of(resource_slice: Manifest) -> str:
    """Return the name of the node whose devices a ResourceSlice lists."""
    return str(mapping(resource_slice.get("spec")).get("nodeName") or "")
