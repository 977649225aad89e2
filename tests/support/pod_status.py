"""What a node of the tests says of a pod, by the rules of a kubelet. Pure. See node_agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

Manifest = Mapping[str, Any]


def now() -> str:
    """Return the time as the API has it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Record:
    """One container so far."""

    container: Manifest
    state: dict[str, Any]
    last_state: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0

    def waits(self, reason: str, message: str = "") -> None:
        """It does not run yet, or not yet again."""
        if "terminated" in self.state:
            self.last_state = self.state
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def runs(self) -> None:
        """It has been started."""
        self.state = {"running": {"startedAt": now()}}

    def ended(self, code: int, reason: str, message: str = "") -> None:
        """It has ended."""
        started = self.state.get("running", {}).get("startedAt", now())
        found = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now()}
        self.state = {"terminated": {**found, **({"message": message} if message else {})}}

    def never_ran(self) -> None:
        """Its pod has ended before it was started."""
        if "waiting" in self.state:
            words = "The container could not be located when the pod was terminated"
            self.state = {
                "terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": words}
            }

    @property
    def code(self) -> int | None:
        """The status with which it has ended, lastly; None if it never has."""
        found = self.state.get("terminated") or self.last_state.get("terminated")
        return None if "running" in self.state or not found else int(found["exitCode"])

    def status(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        is_init = self.container.get("is_init", False)
        runs = "running" in self.state
        return {
            "name": self.container["name"],
            "image": self.container["image"],
            "imageID": self.container["image"] if "waiting" not in self.state else "",
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.code == 0 if is_init else runs,
            "started": runs,
            "restartCount": self.restarts,
        }


def phase_of(inits: Sequence[Record], containers: Sequence[Record], policy: str) -> str:
    """Return the phase of a pod that nobody has ended."""
    if policy == "Never" and any(each.code for each in inits):
        return "Failed"
    if any(each.code != 0 for each in inits):
        return "Pending"
    codes = [each.code for each in containers]
    if any("waiting" in each.state and each.code is None for each in containers):
        return "Pending"
    if any(code is None for code in codes) or policy == "Always":
        return "Running"
    if not any(codes):
        return "Succeeded"
    return "Failed" if policy == "Never" else "Running"


def conditions_of(inits: Sequence[Record], containers: Sequence[Record], phase: str) -> list[dict[str, Any]]:
    """Return the conditions of a pod that a kubelet writes."""
    unready = [each.container["name"] for each in containers if "running" not in each.state]
    waiting = [each.container["name"] for each in inits if each.code != 0]
    ready = _condition("ContainersNotReady", "containers with unready status", unready)
    initialized = _condition("ContainersNotInitialized", "containers with incomplete status", waiting)
    if phase == "Succeeded":
        ready = {"status": "False", "reason": "PodCompleted", "message": None}
        initialized |= {"reason": "PodCompleted"}
    elif phase == "Failed":
        ready = {"status": "False", "reason": "PodFailed", "message": None}
    return [
        {"type": "Initialized", **initialized},
        {"type": "ContainersReady", **ready},
        {"type": "Ready", **ready},
    ]


def _condition(reason: str, words: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what a condition says: not so because of these containers, if there are any."""
    if not names:
        return {"status": "True", "reason": None, "message": None}
    return {"status": "False", "reason": reason, "message": f"{words}: [{' '.join(names)}]"}


def event(metadata: Manifest, node: str, reason: str, message: str, kind: str) -> dict[str, Any]:
    """Return an event of a pod, as a kubelet writes it."""
    about = {"kind": "Pod", "apiVersion": "v1"}
    about |= {key: metadata[key] for key in ("namespace", "name", "uid")}
    return {
        "metadata": {"generateName": f"{metadata['name']}."},
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "type": kind,
        "source": {"component": "kubelet", "host": node},
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 1,
    }
