"""Which nodes with GPUs have an agent that reports, and why others have not: for ``doctor --cluster``.

An agent's pod is ready as long as the pool takes its reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.cluster.api import ApiAway, ApiRefused, connect
from gpu_pool.cluster.dialects.objects import listing, mapping

#: By which agents' pods are found, of whichever pool they are.
_LABELS: Final = "app.kubernetes.io/name=gpu-pool,app.kubernetes.io/component=node-agent"
#: Characters of what the cluster says, and nodes of which each is named with its reason.
_LONG, _MOST_NAMED = 400, 20
_GUIDE: Final = "see docs/administrator/node-agent"


async def check_agents(gpu_nodes: Collection[str]) -> list[Check]:
    """Return what is found of the agents of these nodes. Raises ``PoolUnreachable``."""
    api = await connect()
    try:
        found = await api.ask("GET", "/api/v1/pods", query={"labelSelector": _LABELS})
    except (ApiRefused, ApiAway) as error:
        return [Check("node agents", "note", f"their pods cannot be read: {safe(str(error), _LONG)}")]
    finally:
        await api.close()
    return list(checks_of_agents(gpu_nodes, listing(found.get("items"))))


def checks_of_agents(gpu_nodes: Collection[str], pods: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Say how many of these nodes have an agent that reports, and of the others why not. Pure."""
    if not gpu_nodes:
        return
    if not pods:
        words = (
            "there are none: what kernels in pods use of their GPUs is not known, no watchdog watches it, "
            "and with the dialect shared no memory is lent on top of slices"
        )
        yield Check("node agents", "note", words, f"nodeAgent.enabled=true in the chart: {_GUIDE}")
        return
    by_node: dict[str, list[Mapping[str, Any]]] = {}
    for pod in pods:
        by_node.setdefault(_node_of(pod), []).append(pod)
    silent = sorted(node for node in gpu_nodes if not any(map(_is_ready, by_node.get(node, ()))))
    report = len(gpu_nodes) - len(silent)
    words = f"{report} of {len(gpu_nodes)} nodes with GPUs have an agent whose reports are taken"
    yield Check("node agents", "note" if silent else "ok", words, _GUIDE if silent else "")
    for node in silent[:_MOST_NAMED]:
        why, remedy = _why_silent(by_node.get(node, ()))
        yield Check("node agents", "note", safe(f"{node} {why}", _LONG), safe(remedy, _LONG))
    if len(silent) > _MOST_NAMED:
        yield Check("node agents", "note", f"and {len(silent) - _MOST_NAMED} more nodes")


def _why_silent(pods: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Say why a node with these agents' pods reports nothing, and what to do."""
    if not pods:
        return (
            "has no agent's pod",
            "see nodeAgent.nodeSelector and nodeAgent.tolerations: by default nodes with the label "
            "nvidia.com/gpu.present=true have one",
        )
    pod = pods[0]
    name, namespace = (str(mapping(pod.get("metadata")).get(key)) for key in ("name", "namespace"))
    asked = f"kubectl -n {namespace} describe pod {name}"
    status = mapping(pod.get("status"))
    for container in listing(status.get("containerStatuses")):
        state = mapping(container.get("state"))
        for kind in ("waiting", "terminated"):
            told = mapping(state.get(kind))
            if told:
                said = " ".join(filter(None, (str(told.get("reason") or ""), str(told.get("message") or ""))))
                return f"has an agent that does not run: {said or kind}", asked
    if status.get("phase") != "Running":
        return f"has an agent whose pod is {status.get('phase') or 'Pending'}", asked
    return (
        "has an agent whose reports are not taken",
        f"its log says why: kubectl -n {namespace} logs {name} --tail=3",
    )


def _node_of(pod: Mapping[str, Any]) -> str:
    """Return the node of a pod, also of one of a DaemonSet that is not placed yet: it is made for one."""
    spec = mapping(pod.get("spec"))
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = mapping(mapping(mapping(spec.get("affinity")).get("nodeAffinity")))
    needed = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    for term in listing(needed.get("nodeSelectorTerms")):
        for field in listing(term.get("matchFields")):
            values = field.get("values")
            if field.get("key") == "metadata.name" and isinstance(values, list) and len(values) == 1:
                return str(values[0])
    return ""


def _is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's agent reports, and what it says is taken."""
    conditions = listing(mapping(pod.get("status")).get("conditions"))
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
