"""Which nodes with GPUs have an agent that reports, and why others have not: for ``doctor --cluster``.

An agent's pod is ready as long as the pool takes its reports.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, connect, path_of
from gpu_pool.cluster.dialects.objects import listing, mapping

#: By which agents' pods are found, of whichever pool they are.
_LABELS: Final = "app.kubernetes.io/name=gpu-pool,app.kubernetes.io/component=node-agent"
#: Characters at most of what the cluster says.
_LONG: Final = 400
#: Nodes at most that are named, each with its reason.
_MOST_NAMED: Final = 20
_GUIDE: Final = "see docs/administrator/node-agent"
#: Bytes of an agent's log: it says first what it can.
_LOG_BYTES: Final = 65_536
#: What an agent says of its GPUs, see ``cluster.node_agent.suspending``.
_ABLE: Final = re.compile(r"What kernels keep on (\d+) of (\d+) GPUs can be moved", re.ASCII)
_KEPT: Final = re.compile(r"Nothing is moved off (\S+), since (.*)")


async def check_agents(gpu_nodes: Collection[str]) -> list[Check]:
    """Return what is found of the agents of these nodes. Raises ``PoolUnreachable``."""
    api = await connect()
    try:
        found = listing((await api.ask("GET", "/api/v1/pods", query={"labelSelector": _LABELS})).get("items"))
        logs = {_node_of(pod): await _log_of(api, pod) for pod in found if _suspends(pod) and _is_ready(pod)}
    except (ApiRefused, ApiAway) as error:
        return [Check("node agents", "note", f"their pods cannot be read: {safe(str(error), _LONG)}")]
    finally:
        await api.close()
    return [*checks_of_agents(gpu_nodes, found), *checks_of_suspension(logs)]


async def _log_of(api: Api, pod: Mapping[str, Any]) -> str:
    """Return how the log of an agent begins."""
    metadata = mapping(pod.get("metadata"))
    return await api.log(f"{path_of(metadata['namespace'], 'pods')}/{metadata['name']}", _LOG_BYTES)


def checks_of_suspension(logs: Mapping[str, str]) -> Iterator[Check]:
    """Say on how many GPUs kernels are suspended, by what agents say in their logs, by node. Pure."""
    if not logs:
        return
    told = {node: _ABLE.findall(log)[-1:] for node, log in logs.items()}
    able, every = (sum(int(each[at]) for found in told.values() for each in found) for at in (0, 1))
    words = f"{len(logs)} of them suspend kernels: what these keep can be moved off {able} of {every} GPUs"
    yield Check("node agents", "ok" if able == every else "note", words, "" if able == every else _GUIDE)
    whys = [(node, *each) for node, log in sorted(logs.items()) for each in dict(_KEPT.findall(log)).items()]
    for node, device, why in whys[:_MOST_NAMED]:
        words = safe(f"{node}: nothing is moved off {device}, since {why}", _LONG)
        yield Check("node agents", "note", words, "docs/explanation/checkpoint says what it needs")
    silent = sorted(node for node, found in told.items() if not found)
    if silent:
        yield Check("node agents", "note", safe(f"{', '.join(silent)}: not known yet", _LONG), "ask again")


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


def _suspends(pod: Mapping[str, Any]) -> bool:
    """Whether an agent was told to suspend kernels."""
    containers = listing(mapping(pod.get("spec")).get("containers"))
    return any("--suspend-in" in str(word) for each in containers for word in each.get("args") or ())


def _is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's agent reports, and what it says is taken."""
    conditions = listing(mapping(pod.get("status")).get("conditions"))
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
