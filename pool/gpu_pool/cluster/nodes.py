"""Which nodes take no kernels, and why, and the groups of nodes that an autoscaler makes grow.

Zero to JupyterHub keeps nodes for users with a taint, which its user pods tolerate, and so do kernels. Any
other taint than NVIDIA's is tolerated where the administrator names its key; until then nothing is granted
behind it, and both the administrator and whoever waits for it are told.

A group without a node shows nothing, so nobody could say what would fit there. What one of its nodes showed
when it was there is therefore kept in a file, as ``kubectl get -o json`` prints it, and stands in for the
nodes that could be started.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.dialects import Dialect, Manifest, Node
from gpu_pool.cluster.dialects.amounts import HOSTNAME
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool_client import BadRequest
from gpu_pool_client._home import expanded

#: What kernels tolerate in any case, as the user pods of Zero to JupyterHub do (its userTolerations).
OF_USERS: Final = tuple(
    {"key": key, "operator": "Equal", "value": "user", "effect": "NoSchedule"}
    for key in ("hub.jupyter.org/dedicated", "hub.jupyter.org_dedicated")
)
#: Dialects add what tolerates it, where a node has it.
_GPU_TAINT: Final = "nvidia.com/gpu"
#: Effects of taints that keep pods away.
REPELLING: Final = ("NoSchedule", "NoExecute")
_CORDON: Final = "node.kubernetes.io/unschedulable"
#: Taints by which autoscalers say that they take a node away.
REMOVED_BY: Final = (
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination",
)
#: Taints by which Kubernetes and clouds say how a node is at the moment.
OF_THE_MOMENT: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "node.cilium.io/")
_TOLERATIONS: Final = "c.KubernetesSettings.tolerations"


@dataclass(frozen=True, slots=True)
class NodeClosure:
    """Why a node takes no kernels."""

    #: In words that follow its name: ``is cordoned``.
    why: str
    #: What an administrator can do about it; empty where it passes by itself.
    remedy: str = ""


def tolerations_of(keys: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """Return what kernels tolerate, with these keys of the administrator's setting."""
    return (*OF_USERS, *({"key": key, "operator": "Exists"} for key in keys))


def closure_of(node: Node, tolerations: Iterable[Manifest]) -> NodeClosure | None:
    """Return why a node takes no kernel with these tolerations; None if it does."""
    borne = tuple(tolerations)
    in_the_way = [each for each in node.taints if _repels(each) and not any(_bears(t, each) for t in borne)]
    keys = [str(each.get("key")) for each in in_the_way]
    if not node.is_ready:
        return NodeClosure("does not answer")
    if node.cordoned or _CORDON in keys:
        return NodeClosure("is cordoned", f"kubectl uncordon {node.name}, once it may be used again")
    if any(key.startswith(REMOVED_BY) for key in keys):
        return NodeClosure("is being removed by the cluster's autoscaler")
    if not in_the_way:
        return None
    why = f"has a taint that kernels do not tolerate ({', '.join(map(_say, in_the_way))})"
    lasting = [key for key in keys if not key.startswith(OF_THE_MOMENT)]
    return NodeClosure(
        why, f"if kernels belong there: {_TOLERATIONS} = {sorted(set(lasting))}" if lasting else ""
    )


def _repels(taint: Manifest) -> bool:
    return taint.get("effect") in REPELLING and taint.get("key") != _GPU_TAINT


def _bears(toleration: Manifest, taint: Manifest) -> bool:
    """Whether a toleration is for a taint, by Kubernetes' rules."""
    key, effect = toleration.get("key"), toleration.get("effect")
    if (key and key != taint.get("key")) or (effect and effect != taint.get("effect")):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (
        taint.get("value") or ""
    )


def _say(taint: Manifest) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def closures(dialect: Dialect, tolerations: Iterable[Manifest]) -> dict[str, NodeClosure]:
    """Return why each of the nodes with GPUs that take no kernels does not, by name."""
    borne = (*tolerations, *dialect.tolerated)
    names = sorted({gpu.node for gpu in dialect.gpus()})
    found = {name: closure_of(dialect.cluster.node(name), borne) for name in names}
    return {name: closure for name, closure in found.items() if closure is not None}


def notes(dialect: Dialect) -> dict[str, str]:
    """Return what there is to know of single GPUs, in a sentence each, by uuid."""
    noted = [gpu for gpu in dialect.gpus() if gpu.notes]
    return {gpu.device.uuid: f"GPU {gpu.device.index} of {gpu.node}: {'; '.join(gpu.notes)}" for gpu in noted}


class ClosedNodesLog:
    """Writes down, once, which nodes take no kernels any more, and what is to be known of GPUs."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._closed: Mapping[str, NodeClosure] = {}
        self._notes: Mapping[str, str] = {}

    def tell(self, closed: Mapping[str, NodeClosure], noted: Mapping[str, str]) -> None:
        """Write down what is new of this."""
        for name, closure in closed.items():
            if closure != self._closed.get(name):
                remedy = f" ({closure.remedy})" if closure.remedy else ""
                words = ascii(f"{name} {closure.why}{remedy}")
                self._log.warning("Nothing is granted on a node with GPUs: %s", words)
        for name in sorted(self._closed.keys() - closed.keys()):
            self._log.info("The node %s is not closed to kernels any more", ascii(name))
        for uuid, note in noted.items():
            if note != self._notes.get(uuid):
                self._log.warning("The cluster says of a GPU: %s", ascii(note))
        self._closed, self._notes = dict(closed), dict(noted)


_NODE_GROUPS: Final = "c.KubernetesSettings.node_groups"
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
    where = f"{_NODE_GROUPS}[{name!a}]"
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
