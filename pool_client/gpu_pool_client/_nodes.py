"""What a node agent says of its node, and what it is asked to do there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PodDeviceUse:
    """What the processes of one pod, or one container of it, use of one device, as its node sees it."""

    #: The uid of its pod; empty where the name of its cgroup does not say it.
    pod: str
    #: The id that the container runtime gave it, without the runtime's name, where the pod is not known; or
    #: which of the pod's containers it is.
    container: str
    #: The device's uuid, as the driver says it.
    device: str
    #: MiB in use by all of these processes together; None where the driver does not say.
    memory_mib: int | None = None
    #: How many they are.
    processes: int = 1
    #: The largest part of the device's multiprocessors that any of them has used in the last seconds, 0 to 1;
    #: None where the driver does not say. That is no share of the device: one small kernel can read 1.
    utilisation: float | None = None


class MoveVerb(str, Enum):
    """What is to be done with what the processes of a pod keep on their devices."""

    SUSPEND = "suspend"
    """It is moved to the host's memory; the processes live on."""
    RESTORE = "restore"
    """It is moved back to the same devices. Nothing, where nothing of it was moved away."""


class MoveOutcome(str, Enum):
    """What came of it."""

    DONE = "done"
    """It was done."""
    KEPT = "kept"
    """Nothing was suspended, and nothing has changed."""
    NOT_YET = "not-yet"
    """It was not done, or not whole; restoring can be tried again."""
    LOST = "lost"
    """Processes of the pod cannot go on: the pod has to end."""


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """What an agent is to do with the memory that a pod of its node has on its devices."""

    #: What this one is told by.
    id: str
    verb: MoveVerb
    #: The uid of the pod.
    pod: str
    #: The ids of its containers, as their runtime says them.
    containers: tuple[str, ...]
    #: The uuid of one of its devices.
    device: str
    #: MiB of the host's memory that the pod may have in all; None where it has no limit.
    limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What came of a :class:`MemoryMove`."""

    #: That of the move.
    id: str
    outcome: MoveOutcome
    #: Why it was not done, a clause that can follow "since"; empty where it was.
    why: str = ""
