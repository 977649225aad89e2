"""What ``doctor --cluster`` says of node agents, of images on nodes, and of prepared pods.

An agent's pod is ready as long as the pool takes its reports. The first kernel on a node that lacks its image
waits for it; what a fetch took is what kubelets said of it, which a cluster remembers for about an hour. Why
the service makes no more prepared pods it knows best itself: ``gpu-pool health`` in its container says it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cli.checks import Check
from gpu_pool.cli.formatting import safe
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, connect, path_of
from gpu_pool.cluster.device_claims import HOLDER_LABEL
from gpu_pool.cluster.dialects import label_value
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping
from gpu_pool.cluster.manifests import COMPONENT, LEASE_LABEL
from gpu_pool.cluster.prepared_pods import PreparedPod, is_prepared
from gpu_pool_client import PreparedStatus, format_duration

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


#: By which the events of fetched images are asked for, and what a kubelet says in them. Newer ones tell the
#: wait for other fetches as well.
FETCHED: Final = "reason=Pulled,involvedObject.kind=Pod"
_SAID: Final = re.compile(r'Successfully pulled image "([^"]+)" in (\S+)(?: \((\S+) including waiting\))?')
_GO_PARTS: Final = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|µs|ns)")
_GO_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
#: How many images a node names at most: a kubelet's default.
_MOST_IMAGES: Final = 50
_FETCH_BEFORE: Final = (
    "fetch it beforehand, with gpu-pool courses export --images: see docs/administrator/kubernetes, "
    "Images before class"
)


@dataclass(frozen=True, slots=True)
class Fetch:
    """How long an image took to get to a node."""

    node: str
    seconds: float


def longest_fetches(events: Iterable[Mapping[str, Any]]) -> dict[str, Fetch]:
    """Return for each image the longest fetch of which these events tell."""
    found: dict[str, Fetch] = {}
    for event in events:
        said = _SAID.search(str(event.get("message") or ""))
        if said is None:
            continue
        image, seconds = full_name(said[1]), _go_seconds(said[3] or said[2])
        if image not in found or seconds > found[image].seconds:
            found[image] = Fetch(str(mapping(event.get("source")).get("host") or "a node"), seconds)
    return found


def _go_seconds(written: str) -> float:
    """Return a duration as Go writes it: ``1m23.4s``, ``850ms``."""
    return sum(float(number) * _GO_SECONDS[unit] for number, unit in _GO_PARTS.findall(written))


def full_name(image: str) -> str:
    """Return an image's name as nodes write it: with its registry, and with a tag where it has no digest."""
    first, slash, _ = image.partition("/")
    if not slash:
        image = f"docker.io/library/{image}"
    elif not (first == "localhost" or re.search("[.:]", first)):
        image = f"docker.io/{image}"
    return image if re.search("[@:]", image.rpartition("/")[2]) else f"{image}:latest"


def check_images(
    images: Collection[str],
    nodes: Iterable[Mapping[str, Any]],
    fetches: Mapping[str, Fetch],
) -> Iterator[Check]:
    """Say of each image how many of these nodes have it, and what its longest fetch took."""
    named = [_images_of(node) for node in nodes]
    for image in sorted(images):
        name = full_name(image)
        # What a node with many images does not name, it may have.
        telling = [names for names, is_all in named if is_all or name in names]
        have, fetch = sum(name in names for names in telling), fetches.get(name)
        if not telling:
            continue
        took = f"; it took {format_duration(fetch.seconds)} to get to {fetch.node}" if fetch else ""
        text = f"{image} is on {have} of {len(telling)} nodes with GPUs{took}"
        if have == len(telling):
            yield Check("image", "ok", safe(text, _LONG))
        else:
            text = f"{text}: the first kernel on each other node waits for it"
            yield Check("image", "note", safe(text, _LONG), _FETCH_BEFORE)


def _images_of(node: Mapping[str, Any]) -> tuple[Collection[str], bool]:
    """Return the images that a node names, by all their names, and whether these are all that it has."""
    images = mapping(node.get("status")).get("images") or ()
    return {name for image in images for name in image.get("names") or ()}, len(images) < _MOST_IMAGES


#: By which KubeSpawner says of a pod whose notebook server it is.
_SERVER_OF: Final = "hub.jupyter.org/username"
_NOT_SHARED: Final = (
    "Here a GPU comes with its pod, so none is made: they need c.KubernetesSettings.dialect = 'shared'."
)
_NO_SERVER: Final = "No notebook server of the course runs."
_NO_GPU: Final = (
    "The pool has no GPU now, since no slice is held: the first kernel starts in an ordinary pod, and after "
    "it pods are prepared."
)
_ASK_SERVICE: Final = "The service knows why it makes none: kubectl -n {} exec deploy/{} -- gpu-pool health"


def prepared_of(
    most: Mapping[str, int],
    pods: Sequence[Mapping[str, Any]],
    namespace: str,
    service: str,
    *,
    is_shared: bool,
) -> list[PreparedStatus]:
    """Return what there is of each course that may have ``most``, of all pods of the namespace."""
    return [_status(name, most[name], pods, (namespace, service), is_shared) for name in sorted(most)]


def _status(
    name: str, most: int, pods: Sequence[Mapping[str, Any]], service: tuple[str, str], is_shared: bool
) -> PreparedStatus:
    servers, kernels, ready, starting = set[str](), set[str](), Counter[str](), list[Mapping[str, Any]]()
    has_gpu = False
    for pod in pods:
        metadata = mapping(pod.get("metadata"))
        labels = mapping(metadata.get("labels"))
        has_gpu = has_gpu or HOLDER_LABEL in labels
        if labels.get(f"{PREFIX}/course") != label_value(name):
            continue
        read = PreparedPod.read(pod)
        if labels.get("app.kubernetes.io/component") != COMPONENT:
            if _SERVER_OF in mapping(metadata.get("annotations")) and not read.is_over:
                servers.add(read.uid)
        elif is_prepared(pod) and LEASE_LABEL not in labels:
            kernels.add(read.server)
            if read.is_running:
                ready[read.node] += 1
            elif not read.is_over:
                starting.append(pod)
        else:
            kernels.update(str(each.get("uid")) for each in listing(metadata.get("ownerReferences")))
    why = ""
    if not is_shared:
        why = _NOT_SHARED
    elif not servers:
        why = _NO_SERVER
    elif servers - kernels:
        why = _ASK_SERVICE.format(*service) if has_gpu else _NO_GPU
    return PreparedStatus(name, most, dict(sorted(ready.items())), len(starting), why)
