"""How a kernel's pod is, in a student's words, and whether the cluster has taken it away. Pure.

A kernel that ended by itself leaves its lease, and may be started again. What
the cluster took ends the lease: whoever reads of it learns why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool.cluster.dialects.pod_troubles import trouble_of
from gpu_pool.cluster.kueue import is_queued
from gpu_pool_client import EndReason, KernelPod, PodPhase
from gpu_pool_client._pods import last_output, one_line, shown

_SCHEDULED: Final = "PodScheduled"
_DISRUPTED: Final = "DisruptionTarget"
#: What Kueue says of a pod before it deletes it.
_EVICTED_BY_KUEUE: Final = "TerminationTarget"

#: Why a container waits, by Kubernetes' word for it.
_WAITING: Final[Mapping[str, str]] = {
    "ContainerCreating": "Its software is being fetched and its files are being connected.",
    "PodInitializing": "It is being prepared.",
}
#: How a pod is taken from the cluster, by the reason of its condition DisruptionTarget.
_TAKEN: Final[Mapping[str, str]] = {
    "PreemptionByScheduler": "The cluster gave its place to something more urgent.",
    "DeletionByTaintManager": "Its machine no longer answered, or was closed.",
    "EvictionByEvictionAPI": "Its machine is being drained for maintenance.",
    "TerminationByKubelet": "Its machine was short of memory or disk, or was shut down.",
    "DeletionByPodGC": "Its machine is gone.",
}
#: The same by the pod's own reason.
_FAILED: Final[Mapping[str, str]] = {
    "Evicted": "Its machine was short of memory or disk: {message}",
    "NodeLost": "Its machine no longer answered.",
    "NodeShutdown": "Its machine was shut down.",
    "Shutdown": "Its machine was shut down.",
    "Terminated": "Its machine was shut down.",
    "UnexpectedAdmissionError": "Its machine could not provide the GPU: {message}",
}
_SILENT_NODE: Final = "Its machine does not answer at the moment. If that continues, the kernel is given up."
#: A pod that is gone, and whose end the pool has asked for.
ENDED: Final = KernelPod("ended", PodPhase.ENDED, message="It was ended.")
_BY_NOTEBOOK: Final = "Your notebook server was stopped, and its kernels with it."
#: Also what is seen of a pod whose end an earlier run of the service has asked for.
BY_SOMEBODY: Final = "Somebody who manages the cluster deleted it."


@dataclass(frozen=True, slots=True)
class PodTaken:
    """The pod was taken away, and so its lease ends: how, and what its user reads."""

    reason: EndReason
    message: str


#: A pod that was seen, and is not there any more when it is looked for again.
VANISHED: Final = PodTaken(EndReason.TAKEN, "It was deleted while the pool's service was down.")
#: What becomes of a lease whose machine has gone, whether or not a kernel was there.
NODE_GONE: Final = PodTaken(EndReason.DEVICE_LOST, "Its machine is gone.")


@dataclass(frozen=True, slots=True)
class PodFailureCause:
    """What keeps a pod from starting, in Kubernetes' words: for administrators."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class PodSurroundings:
    """What is known of a pod besides what it shows itself."""

    #: Whether its machine answers; None where the machine is not there any more.
    node_ready: bool | None = True
    #: Whether its notebook server is still there.
    notebook_there: bool = True
    #: Whether the pool itself has asked for its end.
    ended_by_us: bool = False
    #: Whether it is gone already.
    is_gone: bool = False
    #: What is known of its wait in the cluster's own queue.
    queue: str = ""
    #: The last event that tells of trouble with its start; None if none has lately.
    event: PodFailureCause | None = None
    #: Whether another one is made in its place if its machine refuses it for the moment.
    is_made_again: bool = False
    #: For how long it has been waited for, in words, once that is too long.
    waited: str = ""
    #: Why the device that it claims is not there for it yet, in a sentence: Kubernetes itself says nothing.
    device: str = ""


def read_pod(pod: Manifest, around: PodSurroundings) -> tuple[KernelPod, PodTaken | None]:
    """Return how a kernel's pod is, and how it was taken away if it was."""
    taken = None if around.ended_by_us else _taken(pod, around)
    if taken is not None:
        return _value(pod, PodPhase.ENDED, message=taken.message), taken
    if around.is_gone or around.ended_by_us or _is_ending(pod):
        return _value(pod, PodPhase.ENDED, message="It was ended."), None
    return _living(pod, around), None


def _taken(pod: Manifest, around: PodSurroundings) -> PodTaken | None:
    status = mapping(pod.get("status"))
    reason, message = str(status.get("reason") or ""), shown(status.get("message"))
    if reason == "DeadlineExceeded":
        return PodTaken(EndReason.TOO_LONG, "It ran for as long as its course allows.")
    ended = _terminated(pod)
    if around.waited and is_starting(pod, around):
        return PodTaken(EndReason.NOT_READY, _why_too_late(pod, around))
    if _is_ending(pod) or around.is_gone:
        if ended is not None and status.get("phase") in ("Succeeded", "Failed") and not reason:
            return None  # it had ended by itself before
        if around.notebook_there and around.node_ready is None:
            return NODE_GONE
        return PodTaken(EndReason.TAKEN, _why_deleted(pod, around))
    if is_refused(pod) and around.is_made_again:
        return None
    if status.get("phase") == "Failed" and (ended is None or reason):
        words = _FAILED.get(reason, f"Its machine refused it ({reason or 'no reason given'}): {{message}}")
        return PodTaken(EndReason.TAKEN, _filled(words, message))
    return None


def is_refused(pod: Manifest) -> bool:
    """Whether its machine refused it, which it may do no more a moment later.

    So it is while a device plugin is being replaced: the scheduler has heard of it later than the kubelet.
    """
    status = mapping(pod.get("status"))
    reason = str(status.get("reason") or "")
    is_momentary = reason == "UnexpectedAdmissionError" or reason.startswith("OutOf")
    return status.get("phase") == "Failed" and is_momentary and _terminated(pod) is None


def is_starting(pod: Manifest, around: PodSurroundings) -> bool:
    """Whether a pod is on its way to run, and not in the cluster's own queue."""
    if _is_ending(pod) or around.is_gone or around.ended_by_us:
        return False
    pending = mapping(pod.get("status")).get("phase") in (None, "", "Pending") and not is_queued(pod)
    return pending or (is_refused(pod) and around.is_made_again)


def cause_of(pod: Manifest, around: PodSurroundings) -> PodFailureCause | None:
    """Return what keeps a pod from starting, for administrators; None where nothing is known to."""
    if not is_starting(pod, around):
        return None
    status = mapping(pod.get("status"))
    if is_refused(pod):
        return PodFailureCause(str(status.get("reason")), one_line(status.get("message")))
    waiting = _waiting(pod)
    said = PodFailureCause(str(waiting.get("reason") or ""), one_line(waiting.get("message")))
    if trouble_of(said.reason, said.message):
        return said
    if around.event is not None:
        return around.event
    scheduled = _condition(pod, _SCHEDULED)
    if scheduled is not None and scheduled.get("status") == "False":
        return PodFailureCause(str(scheduled.get("reason") or ""), one_line(scheduled.get("message")))
    return None


def _why_too_late(pod: Manifest, around: PodSurroundings) -> str:
    cause = cause_of(pod, around)
    trouble = trouble_of(cause.reason, cause.message) if cause else None
    last = trouble.final if trouble else _why_not_yet(pod, around)
    return f"It did not start within {around.waited}. {last}"


def _why_deleted(pod: Manifest, around: PodSurroundings) -> str:
    status = mapping(pod.get("status"))
    if not around.notebook_there:
        return _BY_NOTEBOOK
    condition = _condition(pod, _EVICTED_BY_KUEUE)
    if condition is not None and condition.get("status") == "True":
        return _filled("The cluster's queue took its place back: {message}", shown(condition.get("message")))
    condition = _condition(pod, _DISRUPTED)
    if condition is not None and condition.get("status") == "True":
        known = _TAKEN.get(str(condition.get("reason")))
        return known or _filled("The cluster took it away: {message}", shown(condition.get("message")))
    if str(status.get("reason") or "") in _FAILED:
        return _filled(_FAILED[str(status["reason"])], shown(status.get("message")))
    return BY_SOMEBODY if around.node_ready else _TAKEN["DeletionByTaintManager"]


def _living(pod: Manifest, around: PodSurroundings) -> KernelPod:
    status = mapping(pod.get("status"))
    ended = _terminated(pod)
    if ended is not None:
        return _ended(pod, ended)
    address = str(status.get("podIP") or "")
    container = mapping(_container_status(pod).get("state"))
    if "running" in container and address:
        message = "" if around.node_ready else _SILENT_NODE
        return _value(pod, PodPhase.RUNNING, address=address, message=message)
    if is_queued(pod):
        message = _filled("It waits in the cluster's own queue. {message}", shown(around.queue))
        return _value(pod, PodPhase.QUEUED, message=message)
    return _value(pod, PodPhase.STARTING, message=_why_not_yet(pod, around))


def _ended(pod: Manifest, terminated: Manifest) -> KernelPod:
    found = terminated.get("exitCode")
    code = found if isinstance(found, int) else None
    reason = str(terminated.get("reason") or "")
    message = f"It ended with status {code}."
    if reason == "OOMKilled":
        message = f"It used more than its {_memory(pod)} of memory (not of the GPU), and was ended."
    elif reason in ("StartError", "ContainerCannotRun"):
        message = _filled("It could not be started: {message}", shown(terminated.get("message")))
    elif last := last_output(terminated.get("message")):
        message = f"It ended with status {code}. Its last output: {last}"
    return _value(pod, PodPhase.ENDED, message=message, exit_code=code)


def _why_not_yet(pod: Manifest, around: PodSurroundings) -> str:
    if around.device:
        return around.device
    cause = cause_of(pod, around)
    trouble = trouble_of(cause.reason, cause.message) if cause else None
    if trouble is not None:
        return trouble.waiting
    reason = str(_waiting(pod).get("reason") or "")
    if reason in _WAITING:
        return _WAITING[reason]
    scheduled = _condition(pod, _SCHEDULED)
    if mapping(pod.get("spec")).get("schedulingGates"):
        return "Something in the cluster holds it back before a machine is chosen."
    if scheduled is None or scheduled.get("reason") == "SchedulingGated":
        return "A machine is being chosen for it."
    if scheduled.get("reason") == "SchedulerError":
        return _filled(
            "Placing it has failed, and is tried again: {message}", shown(scheduled.get("message"))
        )
    if scheduled.get("status") != "True":
        return _filled("Its machine has no capacity for it yet: {message}", shown(scheduled.get("message")))
    return _WAITING["ContainerCreating"]


def _waiting(pod: Manifest) -> Manifest:
    return mapping(mapping(_container_status(pod).get("state")).get("waiting"))


def _terminated(pod: Manifest) -> Manifest | None:
    state = mapping(_container_status(pod).get("state"))
    return mapping(state["terminated"]) if "terminated" in state else None


def _container_status(pod: Manifest) -> Manifest:
    return next(iter(listing(mapping(pod.get("status")).get("containerStatuses"))), {})


def _condition(pod: Manifest, kind: str) -> Manifest | None:
    conditions = listing(mapping(pod.get("status")).get("conditions"))
    return next((each for each in conditions if each.get("type") == kind), None)


def _is_ending(pod: Manifest) -> bool:
    return bool(mapping(pod.get("metadata")).get("deletionTimestamp"))


def _memory(pod: Manifest) -> str:
    containers = listing(mapping(pod.get("spec")).get("containers"))
    limits = mapping(mapping(next(iter(containers), {}).get("resources")).get("limits"))
    return str(limits.get("memory", "limit"))


def _filled(template: str, message: str) -> str:
    return (
        template.replace("{message}", message).rstrip(": ")
        if not message
        else template.replace("{message}", message)
    )


def _value(
    pod: Manifest,
    phase: PodPhase,
    *,
    address: str | None = None,
    message: str = "",
    exit_code: int | None = None,
) -> KernelPod:
    uid = mapping(pod.get("metadata")).get("uid")
    seen = "\0".join(map(str, (uid, phase.value, address, message, exit_code)))
    version = hashlib.blake2s(seen.encode(errors="replace"), digest_size=12).hexdigest()
    return KernelPod(version, phase, address, message, exit_code)
