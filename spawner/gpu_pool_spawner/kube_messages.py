"""What happens to a pod that is to become a server, in its user's words. Pure.

Kubernetes says it in events, in conditions and in errors of its API, to
administrators; none of that text reaches a student.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gpu_pool.cluster.dialects.pod_troubles import trouble_of, violation

NO_SLICE: Final = "No GPU slice is free at the moment; the cluster is looking for one."
NO_MACHINE: Final = "No machine has enough CPU or memory free at the moment; the cluster is looking for one."
NO_PLACE: Final = (
    "No machine has a GPU slice, CPU and memory free together at the moment; the cluster is looking for one."
)
NOT_READY: Final = "No machine that your course may use is ready at the moment."
FETCHING: Final = "The course's software is being fetched. The first time this takes some minutes."
NOT_YET: Final = "Your course is waiting in the cluster's queue at the moment."
HOME: Final = "Your home folder is being prepared."
NO_HOME: Final = "This course has no home folder: your work is lost when the server ends."
NO_ANSWER: Final = "The cluster did not take your server in time."
ENDING: Final = "A server of yours is still being ended."
STARTING: Final = "Your server is starting."

_GPU: Final = re.compile(
    r"nvidia\.com/|volcano\.sh/|koordinator\.sh/|aliyun\.com/|bitfusion\.io/|[Gg][Pp][Uu]|resourceclaim|Card"
)
_BY_REASON: Final[Mapping[str, str]] = {
    "Scheduled": "A machine for your server was found.",
    "Pulling": FETCHING,
    "Pulled": "The course's software has been fetched.",
    "Created": STARTING,
    "Started": STARTING,
    "BackOff": "Your server could not start; it is tried again.",
    "Failed": "Your server could not start; it is tried again.",
    "SuccessfulAttachVolume": "Your home folder is ready.",
    "TriggeredScaleUp": "The cluster adds a machine for your server. This takes some minutes.",
    "Killing": "A server of yours is being ended.",
    "Evicted": "The machine ran short of a resource; your server was ended.",
    "Preempted": "Your server has to make room for something more urgent.",
}
_QUOTA: Final = re.compile(r"exceed\w* .{0,40}quota|quota .{0,40}exceed", re.IGNORECASE)


def of_event(reason: str, message: str) -> str | None:
    """Say what an event means for whoever waits; None if it means nothing to them."""
    if reason in ("FailedScheduling", "FilteringFailed"):
        return of_unschedulable(message)
    trouble = trouble_of(reason, message)
    return _BY_REASON.get(reason) if trouble is None else trouble.waiting


def of_unschedulable(message: str) -> str:
    """Say why a pod has no node, by what the scheduler says."""
    if "scheduling gates" in message:  # Kueue's
        return NOT_YET
    if "PersistentVolumeClaim" in message or "volume" in message:
        return HOME
    lacking = re.findall(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)", message)
    if not lacking:
        return NO_SLICE if _GPU.search(message) else NOT_READY
    # The scheduler adds up the reasons of all nodes, also of those that never had a GPU.
    without_gpu = [name for name in lacking if not _GPU.search(name)]
    if not without_gpu:
        return NO_SLICE
    return NO_MACHINE if without_gpu == lacking else NO_PLACE


def of_pod(pod: Mapping[str, Any] | None) -> str:
    """Say what a pod has waited for in vain, by its status; empty if nothing says."""
    pod = pod or {}
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return ENDING
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return of_unschedulable(str(condition.get("message", "")))
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        trouble = trouble_of(str(waiting.get("reason")), str(waiting.get("message", "")))
        if trouble is not None:
            return trouble.final
        if waiting.get("reason") == "CrashLoopBackOff":
            return "Your server ends as soon as it has started."
    return ""


def message_of(body: str | bytes | None) -> str:
    """Return the API server's own words from what it answered."""
    try:
        return str(json.loads(body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return str(body)


def of_violation(message: str, namespace: str) -> str:
    """Say to an administrator what Pod Security has against servers; empty if it is something else."""
    found = violation(message)
    if found is None:
        return ""
    settings = [f"{where}_security_context: {text}" for where, text in found.settings().items()]
    advice = f" Under KubeSpawner set {', '.join(settings)}" if settings else " Change what KubeSpawner adds"
    return (
        f"Pod Security of the namespace {namespace} ({found.level}) refuses servers: {found.rules}."
        f"{advice}, as in examples/kubernetes/values.yaml; containers that you add yourself need the same."
    )


def of_refusal(status: int, message: str) -> tuple[str, str]:
    """Say why the cluster took no pod, and what to do."""
    if violation(message):
        return (
            "The security rules of the cluster do not allow servers as this JupyterHub creates them.",
            "Tell its administrator: the log of JupyterHub has what to set.",
        )
    if _QUOTA.search(message):
        return (
            "The quota that the cluster sets for your course is used up.",
            "Wait until somebody in it stops a server, or ask the instructor.",
        )
    if "admission webhook" in message:
        return (
            "The cluster refused the server with this slice.",
            "Ask the administrator: the log of JupyterHub has the reason.",
        )
    return (
        f"The cluster could not take the server (status {status}).",
        "Try again; if that does not help, ask the administrator.",
    )
