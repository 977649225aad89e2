"""Kueue, where it has the queue: in which queue a pod waits, and what Kueue says of it. Pure.

Facts, from Kueue's own source (``pkg/controller/jobs/pod``) and its API, of which ``v1beta2`` came with
Kueue 0.15, and what is used here is the same in ``v1beta1``:

- a pod with the label ``kueue.x-k8s.io/queue-name`` is given the scheduling gate
  ``kueue.x-k8s.io/admission`` by Kueue's webhook, and loses it when it is admitted;
- what Kueue decides about it is in the conditions of a Workload that the pod owns;
- a pod that is evicted gets the condition ``TerminationTarget``, with Kueue's words,
  and is deleted;
- places are answered by ``visibility.kueue.x-k8s.io``, counted from 0.

Kueue counts what is free, so the pool does not: all GPUs of one kind are one device
to it, which never is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool_client import BadRequest, Device, Lease, NotAllowed, Place, SliceRequest

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_GROUP: Final = "kueue.x-k8s.io"
#: Where the API server says which versions of Kueue's objects it serves, among those of all others. (Asked
#: for one group that is not there, it answers what is no object.)
DISCOVERY: Final = "/apis"
#: Those in which they can be read here, the first that is served being used.
VERSIONS: Final = ("v1beta2", "v1beta1")
WORKLOADS: Final = tuple(f"/apis/{_GROUP}/{version}/workloads" for version in VERSIONS)
_VISIBILITY: Final = "/apis/visibility.kueue.x-k8s.io"
#: Names of queues, as ``gpu-pool courses export --kubernetes`` writes them.
_QUEUES: Final = "gpu-pool-{}"
#: What a kind of GPUs is called where a machine's name would be.
_ANY: Final = "any"
#: Characters of Kueue's own words that are passed on.
_MOST_WORDS: Final = 200


def served(answer: Manifest) -> tuple[str, ...]:
    """Return the versions of Kueue's objects that a cluster serves, by what :data:`DISCOVERY` answered."""
    groups = (each for each in listing(answer.get("groups")) if each.get("name") == _GROUP)
    return tuple(str(each.get("version")) for group in groups for each in listing(group.get("versions")))


def version_of(versions: Collection[str]) -> str:
    """Return in which of the versions that are served Kueue's objects are read.

    Raises ``BadRequest`` that says what is served, what is needed and what to do where that is none.
    """
    for version in VERSIONS:
        if version in versions:
            return version
    there_is = f"serves Kueue's objects ({_GROUP}) as {', '.join(versions)}" if versions else "has no Kueue"
    raise BadRequest(
        f"This cluster {there_is}. Kernels can wait in Kueue's queues (c.KubernetesSettings.kueue) where it "
        f"serves {' or '.join(VERSIONS)}.",
        "Install Kueue 0.9 or newer, with its integration for pods, or leave out c.KubernetesSettings.kueue.",
    )


def queue_of(course: str | None) -> str:
    """Return the name of a course's LocalQueue. Raises ``NotAllowed`` where there is no course."""
    if not course:
        raise NotAllowed(
            "This cluster queues kernels by course (Kueue), and you have named none.",
            "Choose a kernel of your course, or ask the administrator.",
        )
    return _QUEUES.format(course)


def is_queued(pod: Manifest) -> bool:
    """Whether a pod of ours waits until Kueue admits it."""
    labels = mapping(mapping(pod.get("metadata")).get("labels"))
    return QUEUE_LABEL in labels and bool(mapping(pod.get("spec")).get("schedulingGates"))


def queue_in(pod: Manifest) -> tuple[str, str]:
    """Return the namespace and the name of the queue in which a pod waits."""
    metadata = mapping(pod.get("metadata"))
    return str(metadata.get("namespace")), str(mapping(metadata.get("labels")).get(QUEUE_LABEL))


def lean_workload(found: Manifest) -> Manifest:
    """Keep of a Workload whose it is and what was decided."""
    metadata, status = mapping(found.get("metadata")), mapping(found.get("status"))
    kept = {
        key: metadata.get(key) for key in ("name", "namespace", "uid", "resourceVersion", "ownerReferences")
    }
    return {"metadata": kept, "status": {"conditions": listing(status.get("conditions"))}}


def owners(found: Manifest) -> set[str]:
    """Return the uids of what a Workload, or one that is pending, stands for."""
    return {str(each.get("uid")) for each in listing(mapping(found.get("metadata")).get("ownerReferences"))}


def place(workload: Manifest | None, position: int | None) -> Place:
    """Return where a pod is in its queue, as far as that is known, and what Kueue says of it.

    Nobody there says when it starts.
    """
    return Place(position, "its course", " ".join(said(workload).split())[:_MOST_WORDS])


def said(workload: Manifest | None) -> str:
    """Return what Kueue says of one that waits, in its own words; empty if it says nothing."""
    conditions = listing(mapping(mapping(workload or {}).get("status")).get("conditions"))
    by_kind = {str(each.get("type")): each for each in conditions}
    reserved, admitted = (mapping(by_kind.get(kind)) for kind in ("QuotaReserved", "Admitted"))
    if reserved.get("status") == "True" and admitted.get("status") != "True":
        return "There is capacity for it, and its admission is being checked."
    return str(reserved.get("message") or "") if reserved.get("status") == "False" else ""


def pending_path(version: str, namespace: str, queue: str) -> str:
    """Return where the places in a queue are answered, in one of :data:`VERSIONS`."""
    return f"{_VISIBILITY}/{version}/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"


def positions(answer: Manifest) -> Iterator[tuple[str, int]]:
    """Yield the uid of each pod that waits in a queue, and its place there, the first being 1."""
    for each in listing(answer.get("items")):
        position = each.get("positionInLocalQueue")
        if isinstance(position, int):
            yield from ((uid, position + 1) for uid in owners(each))


def kinds(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return as many devices of each kind as the machine with most of them has: so many go together."""
    first: dict[str, Device] = {}
    on_node: Counter[tuple[str, str]] = Counter()
    for device in devices:
        kind = _kind(device)
        first.setdefault(kind, device)
        on_node[device.node, kind] += 1
    most = {kind: max(n for (_, each), n in on_node.items() if each == kind) for kind in first}
    return tuple(_any(first[kind], index) for kind in sorted(first) for index in range(most[kind]))


def _kind(device: Device) -> str:
    return f"{device.label.replace(' ', '-')}-{device.memory_mib}"


def _any(device: Device, index: int) -> Device:
    name = f"{_ANY} {_kind(device)}"
    blank = replace(device, numa_node=None, nvlink=(), contexts=None, one_size=False)
    return replace(blank, uuid=f"{name} {index}".replace(" ", "-"), index=index, node=name, unbounded=True)


def of_its_kind(lease: Lease, every: Iterable[Device]) -> SliceRequest:
    """Return what a lease asks for, of the kind of GPU that it was granted, if there are others."""
    granted, request = lease.slices[0].device, lease.request
    if {device.node for device in every} == {granted.node}:
        return request
    model = granted.model.replace(" ", "-")
    memory = max(granted.memory_mib, request.filters.memory_mib or 0)
    return replace(request, filters=replace(request.filters, model=model, memory_mib=memory))


def check_counted(limits: Mapping[str, str], title: str) -> None:
    """Refuse, with ``NotAllowed``, slices that Kueue would admit without counting them."""
    if not limits:
        raise NotAllowed(
            f"Kueue, which has this cluster's queue, cannot count slices of {title}: "
            "their pods ask for no resource.",
            "Ask the administrator to leave out c.KubernetesSettings.kueue.",
        )
