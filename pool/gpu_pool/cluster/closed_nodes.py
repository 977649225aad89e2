"""Which nodes take no kernels, and why: taints, cordons, silence. Pure, but for the log that is written.

Zero to JupyterHub keeps nodes for users with a taint, which its user pods tolerate, and so do kernels. Any
other taint than NVIDIA's is tolerated where the administrator names its key; until then nothing is granted
behind it, and both the administrator and whoever waits for it are told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.dialects import Dialect, Manifest, Node

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
_SETTING: Final = "c.KubernetesSettings.tolerations"


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
        why, f"if kernels belong there: {_SETTING} = {sorted(set(lasting))}" if lasting else ""
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
    borne = tuple(tolerations)
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
