"""What nodes showed of their GPUs lately, and do not show at the moment. Pure: the time is given.

While the pod of a device plugin or of a DRA driver is replaced, its node shows no
GPU for some seconds. That is no fact about the cluster: nothing new is granted
there, and whoever asks or waits is not refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from gpu_pool.cluster.dialects.base import DialectOptions
from gpu_pool.cluster.dialects.choosing import DialectChoice, choose
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, Node, mapping


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


def look(
    known: Memory, shown: Cluster, options: DialectOptions, dialect: str, now: float, patience: float
) -> RememberedCluster:
    """Choose the dialect of a cluster as it is ``shown`` now, and as it counts by what is known of it."""
    choice = choose(shown, options, dialect)
    gpus = () if choice.dialect is None else choice.dialect.gpus()
    # One whose size is not known is none to the pool.
    with_gpus = {gpu.node for gpu in gpus if gpu.device.memory_mib}
    known = remembered(known, shown, with_gpus, now, patience)
    cluster = completed(shown, known)
    return RememberedCluster(
        choice if cluster is shown else choose(cluster, options, dialect), cluster, known
    )


def remembered(
    known: Memory, cluster: Cluster, with_gpus: Collection[str], now: float, patience: float
) -> dict[str, LastShown]:
    """Return what is known of a cluster's nodes by now; those in ``with_gpus`` show some.

    One that shows none any more is known for ``patience`` seconds, one that is gone no longer at all.
    """
    found: dict[str, LastShown] = {}
    for node in cluster.nodes:
        before = known.get(node.name)
        if node.name in with_gpus:
            slices = tuple(each for each in cluster.resource_slices if _node_of(each) == node.name)
            found[node.name] = LastShown(node, slices)
        elif before is not None:
            since = now if before.away_since is None else before.away_since
            if now < since + patience:
                found[node.name] = replace(before, away_since=since)
    return found


def completed(cluster: Cluster, known: Memory) -> Cluster:
    """Return the cluster as if its nodes that show no GPUs at the moment showed what they did."""
    away = {name: shown for name, shown in known.items() if shown.away_since is not None}
    if not away:
        return cluster
    slices = [each for each in cluster.resource_slices if _node_of(each) not in away]
    slices += [each for shown in away.values() for each in shown.slices]
    nodes = tuple(_as_it_was(node, away.get(node.name)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, resource_slices=tuple(slices))


def away(known: Memory) -> frozenset[str]:
    """Return the names of the nodes that show no GPUs at the moment."""
    return frozenset(name for name, shown in known.items() if shown.away_since is not None)


def next_end(known: Memory, patience: float) -> float | None:
    """Return when the next of them will be known no longer; None where none is away."""
    since = [shown.away_since for shown in known.values() if shown.away_since is not None]
    return min(since) + patience if since else None


def _as_it_was(node: Node, shown: LastShown | None) -> Node:
    """Return the node with the GPUs that it showed; whether it takes pods is as it is now."""
    if shown is None:
        return node
    return replace(shown.node, taints=node.taints, conditions=node.conditions, cordoned=node.cordoned)


def _node_of(resource_slice: Manifest) -> str:
    return str(mapping(resource_slice.get("spec")).get("nodeName") or "")
