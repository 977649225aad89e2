"""Kernels in pods: what is to run there, how far it is, and what node agents say of them and do with them.

All are immutable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

#: Tells a kernel that a pool has started it in a pod: ``%gpu use`` then sends a message.
POD_VARIABLE: Final = "GPU_POOL_POD"
#: Shell: makes room in a supervisor's environment, in whose place kernels that are forked from it show the
#: variables that are not its own.
ROOM: Final = 'export GPU_POOL_TEMPLATE="`printf %16384s`"; '

#: The most characters of what a cluster or a kernel says that are shown.
_MOST_SHOWN: Final = 200
_COLOURS: Final = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
#: What ipykernel prints at its start where it thinks that a terminal is there: the reason of nothing.
_BANNER: Final = re.compile(
    r"NOTE: When using the `ipython kernel` entry|To exit, you will have to explicitly quit this process"
    r"|\"quit\" from a client, or using Ctrl-|To read more about this, see https://github.com/ipython/ipython"
    r"|To connect another client to this kernel, use:|\s*--existing \S+$"
)
#: What Python says of a fatal signal: first which one, then where it was, and last where it had begun.
_FATAL: Final = re.compile(
    r"^(Fatal Python error: .*)\n(?:.*\n){,9}?.*\(most recent call first\):\n\s*(File .*)", re.MULTILINE
)


class PodPhase(str, Enum):
    """How far a kernel's pod is."""

    QUEUED = "queued"
    """It waits in the cluster's own queue, for as long as that takes; its lease is parked meanwhile."""
    STARTING = "starting"
    """It waits for its node, its volumes or its image, or is just beginning."""
    RUNNING = "running"
    """Its process runs, and can be reached."""
    ENDED = "ended"
    """Its process has ended, or the pod is gone."""


@dataclass(frozen=True, slots=True)
class KernelCommand:
    """What is to run in a kernel's pod. What the pool adds is not here: the slice, the image, the home."""

    #: The kernelspec's command. ``{connection_file}`` stands for where the pod finds :attr:`connection`.
    argv: tuple[str, ...]
    #: What the connection file says: ports, key and Curve keys. Its ``ip`` is the pod's affair. Secret.
    connection: Mapping[str, Any] = field(repr=False)
    #: The kernelspec's own variables, and those that the user names to be passed on. None of the pool's.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The folder to start in, below the home; None for the home itself.
    folder: str | None = None
    #: The modules that a Python kernel has imported when it starts, from the second one in its pod on.
    preload: tuple[str, ...] = ()
    #: Whether who launches it can begin it in a pod that runs already; see :attr:`KernelPod.beginning`.
    can_begin: bool = False
    #: The command and the folder as they are where it is launched, for machines that have the same files.
    argv_here: tuple[str, ...] = ()
    folder_here: str | None = None


@dataclass(frozen=True, slots=True)
class Beginning:
    """What starts the kernel of a prepared pod: who has launched it tells it to the supervisor there."""

    #: By which the supervisor knows who may ask it anything, for as long as the pod lives. Secret.
    key: str = field(repr=False)
    #: What it is told: the kernel's connection, command, variables and folder, as JSON. Secret.
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KernelPod:
    """A kernel's pod, as it was when the pool answered."""

    #: Differs for every pod of a lease, and with everything below.
    version: str
    phase: PodPhase
    #: The IP address at which the kernel listens; None unless it runs.
    address: str | None = None
    #: What is going on, in a student's words: ``Its software is being fetched.``
    message: str = ""
    #: The exit status of the process once it has ended; None where the cluster took it.
    exit_code: int | None = None
    #: What its kernel waits for, in the answer to its launch alone; None where it starts by itself.
    beginning: Beginning | None = None
    #: Where it listens, by the names of its connection file, and its supervisor as ``supervisor``; empty for
    #: the ports of its command, which are free in a pod of its own.
    ports: Mapping[str, int] = field(default_factory=dict)


def one_line(text: object) -> str:
    """Return somebody else's words in one line of what is printable."""
    plain = _COLOURS.sub("", str(text or ""))
    return " ".join("".join(each if each.isprintable() else " " for each in plain).split())


def shown(text: object) -> str:
    """Return somebody else's words as they can be shown: one line, no more than is read."""
    line = one_line(text)
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 3] + "..."


def last_output(text: object) -> str:
    """Return the last lines of what a kernel has written, which say most, as far as they can be shown."""
    said = ""
    if found := _FATAL.search(str(text or "")):
        return shown(f"{found[1]}: {found[2]}")
    for line in reversed(str(text or "").splitlines()):
        if _BANNER.match(line):
            continue
        more = f"{shown(line)} {said}".strip()
        if len(more) > _MOST_SHOWN:
            break
        said = more
    return said


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
