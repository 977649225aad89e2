"""The claims by which the pool has whole devices (dialect ``shared``), and what keeps them. Pure.

A claim keeps its device only while a pod names it: when the last one goes, the object stays and its device is
given to whoever asks next. So each claim has a *device holder*, a pod that does nothing and has no device in
its container, from before the first kernel until the device has been empty for a while. Then both go, and the
device is the cluster's again.

::

    device      claim            holder
    ----------  ---------------  ------------------------------------------------------
    leases      made             made, and made again if something takes it away
    empty       kept for a time  kept for a time, then deleted; after it the claim
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpu_pool.cluster.dialects import Manifest, label_value
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping
from gpu_pool.cluster.dialects.shared import DEVICE, NODE, claim_name
from gpu_pool.cluster.nodes import tolerations_of
from gpu_pool.cluster.pod_states import PodTaken
from gpu_pool_client import EndReason

#: The pool whose device a pod holds.
HOLDER_LABEL: Final = f"{PREFIX}/device-holder"
#: What a holder is to NetworkPolicies and to the admission policy.
COMPONENT: Final = "gpu-device-holder"
_FINISHED: Final = ("Succeeded", "Failed")
#: What Kubernetes taints a node with that does not answer.
_LOST: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")

DELETED: Final = PodTaken(
    EndReason.TAKEN, "Somebody who manages the cluster deleted the claim by which this pool had the GPU."
)
DRAINED: Final = PodTaken(
    EndReason.TAKEN,
    "Its GPU was taken out of use by whoever runs the pool, and a parked kernel in a pod cannot move to "
    "another one.",
)
UNLISTED: Final = PodTaken(
    EndReason.DEVICE_LOST, "The cluster does not list its GPU any more: it has failed, or was taken out."
)
TAKEN: Final = PodTaken(EndReason.TAKEN, "Somebody else in the cluster has claimed its GPU in the meantime.")
NOT_ASSIGNED: Final = PodTaken(
    EndReason.NOT_READY, "The cluster did not assign its GPU to the pool. Try again; another GPU may be free."
)


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The service's account: what it owns goes with it, when the service is uninstalled."""

    name: str
    uid: str

    @property
    def reference(self) -> dict[str, str]:
        """How an object says whose it is."""
        return {"apiVersion": "v1", "kind": "ServiceAccount", "name": self.name, "uid": self.uid}


@dataclass(frozen=True, slots=True)
class HolderShape:
    """What the holders of one pool's devices are like."""

    pool: str
    namespace: str
    image: str
    #: Keys of taints that they tolerate, and for how many seconds their machine may not answer.
    tolerations: tuple[str, ...] = ()
    lost_after: int = 60
    owner: ServiceAccount | None = None


def holder(
    shape: HolderShape, uuid: str, node: str, taints: Iterable[Manifest], names: Iterable[str]
) -> dict[str, Any]:
    """Return the pod that keeps a device's claim, with another name than these.

    It complies with Pod Security's ``restricted``. The taints that dialects tolerate come from them.
    """
    claim = claim_name(shape.pool, uuid)
    begin = f"{claim.replace('device', 'holder', 1)}-"
    numbers = [int(tail) for each in names if (tail := each.removeprefix(begin)).isdecimal()]
    metadata = {
        "name": f"{begin}{1 + max(numbers, default=0)}",
        "namespace": shape.namespace,
        "labels": {
            "app.kubernetes.io/managed-by": PREFIX,
            "app.kubernetes.io/component": COMPONENT,
            HOLDER_LABEL: label_value(shape.pool),
        },
        "annotations": {
            DEVICE: uuid,
            NODE: node,
            # A node with nothing else may go; kernels keep theirs by themselves.
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
        },
    }
    spec = _holder_spec(shape, claim, node, taints)
    return owned({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, shape.owner)


def _holder_spec(shape: HolderShape, claim: str, node: str, taints: Iterable[Manifest]) -> dict[str, Any]:
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": shape.lost_after}
    on_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    term = {"nodeSelectorTerms": [{"matchFields": [on_node]}]}
    return {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # With 0, a driver is told of the next claim before it is told that this one is over.
        "terminationGracePeriodSeconds": 2,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65_535,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}},
        "tolerations": [
            *tolerations_of(shape.tolerations),
            *map(dict, taints),
            *({"key": key, **lost} for key in _LOST),
        ],
        # Its container does not name it, and so has no device.
        "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        "containers": [_holder_container(shape.image)],
    }


def _holder_container(image: str) -> dict[str, Any]:
    return {
        "name": "holder",
        "image": image,
        "resources": {
            "requests": {"cpu": "1m", "memory": "8Mi"},
            "limits": {"cpu": "10m", "memory": "16Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def owned(made: dict[str, Any], owner: ServiceAccount | None) -> dict[str, Any]:
    """Return an object that goes with its owner, if there is one."""
    if owner is not None:
        made["metadata"]["ownerReferences"] = [owner.reference]
    return made


@dataclass(frozen=True, slots=True)
class Claim:
    """What is asked of a claim of the pool's."""

    uid: str
    is_allocated: bool
    is_ending: bool

    @classmethod
    def read(cls, claim: Manifest) -> Claim:
        """Read a ResourceClaim."""
        metadata = mapping(claim.get("metadata"))
        allocated = bool(mapping(claim.get("status")).get("allocation"))
        return cls(str(metadata.get("uid", "")), allocated, bool(metadata.get("deletionTimestamp")))


def device_of(found: Manifest) -> tuple[str, str]:
    """Return the uuid and the node of the device that a claim or a holder is for."""
    annotations = mapping(mapping(found.get("metadata")).get("annotations"))
    return str(annotations.get(DEVICE, "")), str(annotations.get(NODE, ""))


def holds(pod: Manifest) -> bool:
    """Whether a holder keeps its claim: it counts from when it is placed, and until it ends."""
    status, metadata = mapping(pod.get("status")), mapping(pod.get("metadata"))
    return status.get("phase") not in _FINISHED and not metadata.get("deletionTimestamp")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is seen of one device at one moment."""

    #: Whether leases are held on it, or pods of kernels are still there.
    in_use: bool = False
    claim: Claim | None = None
    #: The holders of it, those included that end; and whether one of them does not.
    holders: tuple[Manifest, ...] = ()
    is_held: bool = False
    #: Whether the cluster lists it, another claim has it, and its node takes pods.
    is_listed: bool = True
    is_taken: bool = False
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What was seen of it before. Times are those of a clock that nobody sets."""

    #: The claim's uid while the device is in use, empty where it has none yet.
    claim: str = ""
    #: The uid of the claim of it that the pool itself has deleted last.
    given_back: str = ""
    #: Since when it is empty, waits for its claim to be assigned, or is not listed; None where it is not so.
    empty_since: float | None = None
    waits_since: float | None = None
    unlisted_since: float | None = None


@dataclass(frozen=True, slots=True)
class Todo:
    """What there is to do about one device."""

    make_claim: bool = False
    make_holder: bool = False
    end_holders: bool = False
    end_claim: bool = False
    #: Why all leases on it end; None where they live on.
    end_leases: PodTaken | None = None
    #: The uid of the claim by whose absence they end, which is to be made sure of; empty for another reason.
    vanished: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """For how long a device is kept and waited for, in seconds."""

    empty_for: float
    assigned_within: float
    unlisted_for: float


@dataclass(frozen=True, slots=True)
class DeviceDecision:
    """What there is to do, and what is known from now on; None where nothing has to be."""

    todo: Todo = field(default_factory=Todo)
    memory: DeviceMemory | None = None


def decide(memory: DeviceMemory, facts: DeviceFacts, now: float, limits: Limits) -> DeviceDecision:
    """Return what there is to do about one device."""
    return (_in_use if facts.in_use else _empty)(memory, facts, now, limits)


def _in_use(memory: DeviceMemory, facts: DeviceFacts, now: float, limits: Limits) -> DeviceDecision:
    claim = facts.claim
    known = replace(
        memory,
        empty_since=None,
        unlisted_since=None if facts.is_listed else _since(memory.unlisted_since, now),
        waits_since=None if claim and claim.is_allocated else _since(memory.waits_since, now),
    )
    if claim is not None and claim.is_ending and claim.uid != memory.given_back:
        return DeviceDecision(Todo(end_leases=DELETED), known)
    if memory.claim and (claim is None or claim.uid != memory.claim):
        return DeviceDecision(Todo(end_leases=DELETED, vanished=memory.claim), known)
    if _is_past(known.unlisted_since, limits.unlisted_for, now):
        return DeviceDecision(Todo(end_leases=UNLISTED), known)
    if _is_past(known.waits_since, limits.assigned_within, now):
        return DeviceDecision(Todo(end_leases=TAKEN if facts.is_taken else NOT_ASSIGNED), known)
    if claim is None:
        return DeviceDecision(Todo(make_claim=True), replace(known, claim=""))
    if claim.is_ending:  # given back a moment ago: it is made anew when it is gone
        return DeviceDecision(Todo(end_holders=facts.is_held), replace(known, claim=""))
    return DeviceDecision(
        Todo(make_holder=facts.is_open and not facts.is_held), replace(known, claim=claim.uid)
    )


def _empty(memory: DeviceMemory, facts: DeviceFacts, now: float, limits: Limits) -> DeviceDecision:
    claim = facts.claim
    if claim is None and not facts.holders:
        return DeviceDecision()
    since = _since(memory.empty_since, now)
    known = DeviceMemory(given_back=memory.given_back, empty_since=since)
    is_ending = claim is None or claim.is_ending
    if not is_ending and not _is_past(since, limits.empty_for, now):
        return DeviceDecision(memory=known)
    if facts.is_held:
        return DeviceDecision(Todo(end_holders=True), known)
    if is_ending or facts.holders or claim is None:
        return DeviceDecision(memory=known)
    return DeviceDecision(Todo(end_claim=True), replace(known, given_back=claim.uid))


def _since(before: float | None, now: float) -> float:
    return now if before is None else before


def _is_past(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now >= since + seconds


def why_not_yet(name: str, claim: Manifest | None, *, is_taken: bool) -> str:
    """Say why a pod that names a claim of the pool's cannot start yet; empty where it is not for that."""
    if claim is None:
        return f"The claim of its GPU ({name}) is not there: the pool makes it anew."
    found = Claim.read(claim)
    if found.is_ending:
        return "The pool's claim of its GPU is being deleted."
    if found.is_allocated:
        return ""
    if is_taken:
        return "Somebody else in the cluster has claimed its GPU; it is waited for."
    return "The cluster has not assigned its GPU to the pool yet."


def claims_of(pod: Manifest) -> tuple[str, ...]:
    """Return the names of the claims that a pod names, those apart that are made for it."""
    found = listing(mapping(pod.get("spec")).get("resourceClaims"))
    return tuple(str(each["resourceClaimName"]) for each in found if each.get("resourceClaimName"))


def by_device(found: Iterable[Manifest]) -> Mapping[str, list[Manifest]]:
    """Return claims or holders by the uuid of their device."""
    sorted_by: dict[str, list[Manifest]] = {}
    for each in found:
        sorted_by.setdefault(device_of(each)[0], []).append(each)
    return sorted_by
