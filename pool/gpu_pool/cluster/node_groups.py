"""Groups of nodes that an autoscaler makes grow, as the administrator describes them.

A group without a node shows nothing, so nobody could say what would fit there. What one of
its nodes showed when it was there is therefore kept in a file, as ``kubectl get -o json`` prints it,
and stands in for the nodes that could be started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.closed_nodes import OF_THE_MOMENT, REMOVED_BY
from gpu_pool.cluster.dialects import Manifest, Node
from gpu_pool.cluster.dialects.amounts import HOSTNAME
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool_client import BadRequest
from gpu_pool_client._home import expanded

_SETTING: Final = "c.KubernetesSettings.node_groups"
_KNOWN: Final = ("example", "select", "most", "usual_minutes", "late_minutes")
#: Taints that say how one node is at the moment, not what its group is like.
_PASSING: Final = (*OF_THE_MOMENT, *REMOVED_BY)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one kind, of which an autoscaler starts as many as pods need."""

    name: str
    #: The labels by which its nodes are known, and no others.
    select: Mapping[str, str]
    #: How many nodes it has at most.
    most: int
    #: A node that could be started, and the ResourceSlices that it would have.
    stand_in: Manifest
    slices: tuple[Manifest, ...] = ()
    #: Seconds that a start takes until it is known how long one does; 0 where nobody says.
    usual: float = 0.0
    #: Seconds after which a start is late.
    late: float = 900.0

    @property
    def stand_in_name(self) -> str:
        """What the node that could be started is called; no node of a cluster can be called so."""
        return stand_in_name(self.name)

    def has(self, node: Node) -> bool:
        """Whether a node is one of this group."""
        return all(node.labels.get(key) == value for key, value in self.select.items())


def stand_in_name(group: str) -> str:
    """Return what the node that could be started in a group is called."""
    return f"{group}/new"


def read_groups(said: Mapping[str, Any]) -> tuple[NodeGroup, ...]:
    """Read the setting, and the files that it names. Raises ``BadRequest`` that says what to write."""
    return tuple(_group(name, mapping(given)) for name, given in said.items())


def _group(name: str, given: Mapping[str, Any]) -> NodeGroup:
    where = f"{_SETTING}[{name!a}]"
    unknown = sorted(given.keys() - set(_KNOWN))
    if unknown or not given:
        problem = f"has {unknown[0]!a}" if unknown else "says nothing"
        raise BadRequest(f"{where} {problem}.", f"Accepted: {', '.join(_KNOWN)}.")
    select, most = given.get("select"), given.get("most")
    if not isinstance(select, Mapping) or not select or not _are_texts(select):
        raise BadRequest(
            f"{where} does not say which nodes are of the group.",
            'Write select: {"cloud.google.com/gke-nodepool": "gpu"}, with labels that only its nodes have.',
        )
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadRequest(
            f"{where} does not say how many nodes the group may have.",
            "Write most: 4, the largest size that the autoscaler gives it.",
        )
    usual, late = (_minutes(given, key, where) for key in ("usual_minutes", "late_minutes"))
    node, slices = _example(where, given.get("example"), name)
    stand_in = Node.read(node)
    group = NodeGroup(name, dict(select), most, node, slices, usual, late or 900.0)
    if not group.has(stand_in):
        raise BadRequest(
            f"{where}: the node in its example lacks a label of select.",
            "Name labels that it has, or save another node of the group as the example.",
        )
    return group


def _minutes(given: Mapping[str, Any], key: str, where: str) -> float:
    minutes = given.get(key, 0)
    if not isinstance(minutes, int | float) or isinstance(minutes, bool) or not 0 <= minutes <= 1440:
        raise BadRequest(f"{where}: {key} is {minutes!a}.", "Accepted: 0 to 1440 minutes.")
    return 60.0 * minutes


def _example(where: str, paths: Any, group: str) -> tuple[Manifest, tuple[Manifest, ...]]:
    """Return the node of the example as one that could be started, and its ResourceSlices."""
    names = [paths] if isinstance(paths, str) else paths
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) for each in names):
        raise BadRequest(f"{where} has no example of the group's nodes.", _HOW)
    found = [each for path in names for each in _objects(where, path)]
    nodes = [each for each in found if each.get("kind") == "Node"]
    if len(nodes) != 1:
        raise BadRequest(f"{where}: its example has {len(nodes)} nodes.", _HOW)
    slices = [each for each in found if each.get("kind") == "ResourceSlice"]
    return _renamed_node(nodes[0], stand_in_name(group)), _renamed_slices(slices, stand_in_name(group))


_HOW: Final = (
    "While one of its nodes is there, save it: kubectl get node NAME -o json > FILE, and write "
    "example: FILE. With dynamic resource allocation, a second file has its ResourceSlices."
)


def _objects(where: str, path: str) -> Sequence[Manifest]:
    try:
        found = json.loads(expanded(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{where}: the example {path!a} cannot be read: {error}.", _HOW) from error
    one = mapping(found)
    return listing(one.get("items")) if "items" in one else (one,)


def _renamed_node(node: Manifest, name: str) -> Manifest:
    """Return a node as the next of its group will be: ready, open, and with another name."""
    metadata, spec = mapping(node.get("metadata")), mapping(node.get("spec"))
    taints = [each for each in listing(spec.get("taints")) if not str(each.get("key")).startswith(_PASSING)]
    return {
        "metadata": {
            "name": name,
            "labels": {**mapping(metadata.get("labels")), HOSTNAME: name},
            "annotations": mapping(metadata.get("annotations")),
        },
        "spec": {"taints": taints},
        "status": {
            "allocatable": mapping(mapping(node.get("status")).get("allocatable")),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _renamed_slices(slices: Sequence[Manifest], name: str) -> tuple[Manifest, ...]:
    return tuple(
        {**each, "spec": {**spec, "nodeName": name, "pool": {**mapping(spec.get("pool")), "name": name}}}
        for each in slices
        for spec in (mapping(each.get("spec")),)
    )


def _are_texts(labels: Mapping[Any, Any]) -> bool:
    return all(isinstance(each, str) and each for pair in labels.items() for each in pair)
