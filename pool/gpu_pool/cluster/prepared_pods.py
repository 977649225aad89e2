"""Pods that are started before their kernels are asked for, and hold no slice (dialect ``shared``). Pure.

A prepared pod is one server's and one course's: it has mounted what a kernel of that server mounts, its
supervisor has imported what the course preloads, and it waits. The first kernel of the server whose slice is
on the same device begins in it. A pod's claims are fixed when it is created, so it names the claim of one
device, and is made only where a lease has that device already; with the last lease there it ends.

The pods are the record. A pod that was taken has its lease's label, and is from then on a kernel's pod as
any other::

    label …/prepared    what it was made of: a pod of another shape is ended
    label …/lease       only once it was taken
    annotations         its device, its node
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from gpu_pool.cluster import manifests
from gpu_pool.cluster.dialects import Manifest, PodBans, PodParts, identity_labels, label_value, merged
from gpu_pool.cluster.dialects.objects import POOL_LABEL, PREFIX, listing, mapping
from gpu_pool.cluster.dialects.shared import DEVICE, MOST_PODS, NODE
from gpu_pool.cluster.manifests import (
    COMPONENT,
    CONNECTION_FILE,
    KERNELS_PYTHON,
    LAUNCH,
    LEASE_LABEL,
    START,
    STAYS,
    SUPERVISOR,
    KernelPodRequest,
    runs_for,
)
from gpu_pool.cluster.notebooks import Notebook
from gpu_pool.cluster.pod_choices import ContainerSettings
from gpu_pool.cluster.settings import CONTAINER
from gpu_pool_client import PreparedStatus
from gpu_pool_client._pods import POD_VARIABLE, ROOM

#: What a prepared pod was made of, in digits; it stays on a pod that was taken.
PREPARED_LABEL: Final = f"{PREFIX}/prepared"
#: Seconds after which a pod ends by itself that the service should have ended.
_ENDS_BY_ITSELF: Final = 120
#: Runs the supervisor, and nothing where there is none: a kernel could not begin.
_WAIT: Final = (
    f"if [ -r {SUPERVISOR} ] && command -v python3 >/dev/null 2>&1; then {ROOM}"
    f"exec {' '.join(KERNELS_PYTHON)} {SUPERVISOR} supervisor --prepared {{seconds}} "
    f'--connection {CONNECTION_FILE} --preload={{preload}} -- "$@"; '
    "else echo 'gpu-pool: this image has no python3, or the supervisor is missing' >&2; exit 3; fi"
)
#: The command for whose kernels the template is made: as that of every kernelspec of ipykernel.
_USUAL: Final = (*KERNELS_PYTHON, "-m", "ipykernel_launcher", "-f", CONNECTION_FILE)


@dataclass(frozen=True, slots=True)
class PreparedPodRequest:
    """One pod to be prepared."""

    pool: str
    course: str
    notebook: Notebook
    #: The device whose claim it names, and its node.
    device: str
    node: str
    parts: PodParts
    bans: PodBans
    body: ContainerSettings
    supervisor: Manifest
    #: The modules that its kernel has imported when it begins.
    preload: tuple[str, ...]
    #: Seconds for which it waits.
    seconds: int

    @property
    def shape(self) -> str:
        """What it is made of, in digits: another server, volume, image, course or device is another shape."""
        text = json.dumps(self._manifest("", ""), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fits(self, order: KernelPodRequest) -> bool:
        """Whether what is imported in it was imported with the variables that a kernel has of its slice."""
        return not self.preload or dict(self.parts.environment) == dict(order.parts.environment)

    def pod(self, name: str) -> dict[str, Any]:
        """Return the Pod object."""
        return self._manifest(name, self.shape)

    def _manifest(self, name: str, shape: str) -> dict[str, Any]:
        notebook = self.notebook
        seconds = self.seconds + _ENDS_BY_ITSELF
        start = START + _WAIT.format(seconds=seconds, preload=",".join(self.preload))  # which need no quotes
        variables = {"HOME": self.body.home_path, POD_VARIABLE: "1"}
        container = manifests.container_of(self, start, _USUAL, self.body.home_path, variables)
        metadata = {
            "name": name,
            "namespace": notebook.namespace,
            "labels": {
                **identity_labels(notebook.user, self.course),
                "app.kubernetes.io/component": COMPONENT,
                POOL_LABEL: label_value(self.pool),
                PREPARED_LABEL: shape,
            },
            "annotations": {
                DEVICE: self.device,
                NODE: self.node,
                # Nothing of anybody's is in it yet.
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
            },
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": notebook.name, "uid": notebook.uid}
            ],
        }
        base = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": manifests.spec_of(self, name, container),
        }
        return merged(base, CONTAINER, self.parts, self.bans)


def taken_by(order: KernelPodRequest, pod: Manifest, now: float) -> dict[str, Any]:
    """Return what changes of a prepared pod whose kernel is to be this one."""
    changes: dict[str, Any] = {
        "metadata": {
            "labels": {LEASE_LABEL: order.lease.id},
            "annotations": {LAUNCH: order.launch, **order.parts.annotations, **STAYS},
        }
    }
    started_at = _time(mapping(pod.get("status")).get("startTime")) or now
    if (seconds := runs_for(order.lease, min(now, started_at))) is not None:
        changes["spec"] = {"activeDeadlineSeconds": seconds}
    return changes


def is_prepared(pod: Manifest) -> bool:
    """Whether a pod was made before its kernel was asked for, taken since or not."""
    return PREPARED_LABEL in mapping(mapping(pod.get("metadata")).get("labels"))


@dataclass(frozen=True, slots=True)
class PreparedPod:
    """What is asked of a prepared pod that no lease has taken."""

    uid: str
    #: The uid of its server's pod.
    server: str
    shape: str
    device: str
    node: str
    #: When it was created, in Unix seconds; infinite where it does not say.
    made_at: float
    #: Whether its supervisor can be asked now; and whether it has ended, or is about to.
    is_running: bool = False
    is_over: bool = False

    @classmethod
    def read(cls, pod: Manifest) -> PreparedPod:
        """Read a Pod."""
        metadata, status = mapping(pod.get("metadata")), mapping(pod.get("status"))
        labels, annotations = mapping(metadata.get("labels")), mapping(metadata.get("annotations"))
        owners = listing(metadata.get("ownerReferences"))
        states = [mapping(each.get("state")) for each in listing(status.get("containerStatuses"))]
        is_over = bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed")
        runs = bool(status.get("podIP")) and any("running" in each for each in states)
        return cls(
            uid=str(metadata.get("uid", "")),
            server=next((str(each.get("uid", "")) for each in owners), ""),
            shape=str(labels.get(PREPARED_LABEL, "")),
            device=str(annotations.get(DEVICE, "")),
            node=str(annotations.get(NODE, "")),
            made_at=_time(metadata.get("creationTimestamp")) or math.inf,
            is_running=runs and not is_over,
            is_over=is_over,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """A notebook server whose course has prepared pods."""

    uid: str
    course: str
    #: How many the course may have.
    most: int
    #: The device on which its slice would be now, and the node of that; empty where no lease has that device.
    device: str = ""
    node: str = ""
    #: Whether it has, or is about to have, a kernel; and why one was made in vain since its last one, if so.
    has_kernel: bool = False
    in_vain: str = ""


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """What is seen at one moment."""

    pods: Sequence[PreparedPod]
    servers: Sequence[Server]
    #: What each of the pods would be made of now, by uid; none for one that would not be made.
    shapes: Mapping[str, str]
    #: The pods of which this service has the key, by uid.
    known: Collection[str]
    #: How many leases have each device that takes pods, by uuid.
    leases: Mapping[str, int]
    #: The nodes on which a kernel's pod finds no room.
    crowded: Collection[str]
    #: Seconds for which they wait, and how many a node may have.
    prepared_for: float
    per_node: int


def ends(facts: PreparedFacts, now: float) -> dict[str, str]:
    """Return which pods are to end, by uid, and why, in words that follow *since*."""
    seen = set[str]()
    on_device = Counter(each.device for each in facts.pods)
    found: dict[str, str] = {}
    for pod in sorted(facts.pods, key=lambda each: (each.made_at, each.uid)):
        why = _why_over(pod, facts, now)
        if not why and pod.server in seen:
            why = "its server has another one"
        if not why and facts.leases.get(pod.device, 0) + on_device[pod.device] > MOST_PODS:
            why = "its GPU has as many kernels as can use its claim"
        if why:
            found[pod.uid] = why
            on_device[pod.device] -= 1
        else:
            seen.add(pod.server)
    return found


def _why_over(pod: PreparedPod, facts: PreparedFacts, now: float) -> str:
    if pod.is_over:
        return "it has ended"
    if pod.uid not in facts.known:
        return "its key is not known: it is an earlier service's, or could not be taken"
    if facts.shapes.get(pod.uid) != pod.shape:
        return "its server, its volumes or its course have changed"
    if not facts.leases.get(pod.device):
        return "no slice of its GPU is held any more, or its machine takes no pods"
    if pod.node in facts.crowded:
        return "a kernel finds no room on its machine"
    if now >= pod.made_at + facts.prepared_for:
        return "no kernel has begun in it"
    return ""


def makes(facts: PreparedFacts) -> list[Server]:
    """Return for which servers a pod is to be prepared, once those that are to end have ended."""
    return [server for server, why in _judged(facts) if not why]


def statuses(facts: PreparedFacts, most: Mapping[str, int]) -> tuple[PreparedStatus, ...]:
    """Return what there is of each course: ``most`` it may have, by its name."""
    courses = {each.uid: each.course for each in facts.servers}
    ready: dict[str, Counter[str]] = {name: Counter() for name in most}
    starting = Counter[str]()
    for pod in facts.pods:
        name = courses.get(pod.server, "")
        if name in ready and pod.is_running:
            ready[name][pod.node] += 1
        elif name in ready and not pod.is_over:
            starting[name] += 1
    why = dict.fromkeys(most, "No notebook server of the course runs.")
    why.update({server.course: "" for server in facts.servers})
    # The first of its servers that could use one says it for the course.
    for server, reason in reversed(_judged(facts)):
        if reason:
            why[server.course] = reason
    return tuple(
        PreparedStatus(name, most[name], dict(sorted(ready[name].items())), starting[name], why[name])
        for name in sorted(most)
    )


def _judged(facts: PreparedFacts) -> list[tuple[Server, str]]:
    """Return the servers that could use a pod and have none, and why none is made now, if so."""
    have = {each.server for each in facts.pods}
    by_uid = {each.uid: each for each in facts.servers}
    of_course = Counter(by_uid[uid].course for uid in have if uid in by_uid)
    on_node, on_device = (
        Counter(each.node for each in facts.pods),
        Counter(each.device for each in facts.pods),
    )
    found = []
    for server in facts.servers:
        if server.has_kernel or server.uid in have:
            continue
        why = ""
        if server.in_vain:
            why = server.in_vain
        elif not server.device:
            why = (
                "No slice is held of the GPU on which the course's slices would be, so it is not the pool's: "
                "the first kernel there starts in an ordinary pod."
            )
        elif facts.leases.get(server.device, 0) + on_device[server.device] + 1 >= MOST_PODS:
            why = "Its GPU has as many kernels as can use its claim."
        elif server.node in facts.crowded:
            why = f"A kernel finds no room on the machine {server.node}."
        elif of_course[server.course] >= server.most:
            why = "The course has as many as its file allows (prepared_pods)."
        elif on_node[server.node] >= facts.per_node:
            why = (
                f"The machine {server.node} has as many as one may have "
                f"(c.KubernetesSettings.prepared_per_node = {facts.per_node})."
            )
        found.append((server, why))
        if not why:
            of_course[server.course] += 1
            on_node[server.node] += 1
            on_device[server.device] += 1
    return found


def waits_for_room(pod: Manifest) -> bool:
    """Whether the scheduler has found no place for a pod."""
    conditions = listing(mapping(pod.get("status")).get("conditions"))
    return any(each.get("type") == "PodScheduled" and each.get("status") == "False" for each in conditions)


def _time(text: object) -> float | None:
    """Return a time of Kubernetes' in Unix seconds."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
