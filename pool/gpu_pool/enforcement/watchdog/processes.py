"""One process: what ``/proc`` says of it, and signals that reach no later process of its pid.

Whoever signals may be root, and what it signals descends from a user's
process: so it is made sure each time that it is that user's still.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpu_pool.devices.activity import environment_of
from gpu_pool_client import Process
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import account_of, family, owner_of

_MARK: Final = b"GPU_POOL_LEASE="


def own_namespace() -> str:
    """Name the pid namespace of this process, without asking the system each time."""
    return Process.current().namespace


def lease_in_environment(pid: int) -> str:
    """Return the lease that a process was started on, by its environment; empty if none can be seen.

    A user can write there what they like: it is to be believed only of a
    process that belongs to the lease's own user.
    """
    marks = (each for each in environment_of(pid) if each.startswith(_MARK))
    return next(marks, b"")[len(_MARK) :].decode(errors="replace")


# Of the process: one that is watched has one first owner, whoever asks.
@functools.lru_cache(maxsize=4096)
def first_owner(process: Process) -> int | None:
    """Return the real user id that a process had when it was first asked for.

    It is asked for soon after the process was attached. What a user has
    attached is theirs, even if it becomes another's later, as with sudo.
    """
    owner = owner_of(process.pid)
    return owner if process.is_alive() else None


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs, if root has put it there; else an empty text.

    Unlike the name of the process, it is not its user's to choose. The program
    must be where it seems to be: a mount of the user's own could rename any.
    """
    link = f"/proc/{pid}/exe"
    try:
        path, found = Path(os.readlink(link)), os.stat(link)  # noqa: PTH116 - no path of this view
        is_there = os.path.samestat(path.stat(), found)
    except OSError:  # it has ended, or is another user's, or runs in a container
        return ""
    return path.name if is_there and found.st_uid == 0 else ""


def describe(pid: int) -> tuple[str, str]:
    """Return the user and the name of a process, as far as they can be seen; its name is a user's choice."""
    owner, found = owner_of(pid), procfs.stat(pid)
    if owner is None or found is None:
        return "?", "?"
    return account_of(owner), found.name


#: Seconds between asking processes to end and ending them.
_TO_TIDY_UP: Final = 5.0


def may_signal(process: Process) -> bool:
    """Whether this process may send signals to that one."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:  # nothing to be refused
        return True
    except PermissionError:
        return False
    return True


def send(process: Process, signum: signal.Signals, owner: int | None) -> None:
    """Send a signal, if that process still runs, and as that real user.

    Raises ``PermissionError`` where that is not for us.
    """
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if runs_as(process, owner):
                os.kill(process.pid, signum)
            return
        handle = os.pidfd_open(process.pid)
        try:
            # Asked after the handle was taken: it stays with that process, whatever becomes of the pid.
            if runs_as(process, owner):
                signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)


def runs_as(process: Process, owner: int | None) -> bool:
    """Whether it still runs, and as that real user; None is nobody."""
    # In this order: a pid that was used again meanwhile is not alive.
    return owner is not None and owner_of(process.pid) == owner and bool(process.is_alive())


def descendants(process: Process) -> list[Process]:
    """Identify a living process and all that descends from it, of whatever user."""
    if not process.is_alive():
        return []
    found = (Process.of(pid) for pid in family(process.pid))
    return [each for each in found if each is not None]


@dataclass(slots=True)
class ProcessEnding:
    """Processes of one user that were asked to end, and are ended if they do not; no other's are touched."""

    began_at: float
    #: The user's real user id, None for nobody's.
    owner: int | None
    processes: set[Process] = field(default_factory=set)
    #: Seconds between asking and ending.
    to_tidy_up: float = _TO_TIDY_UP

    def begin(self, processes: Iterable[Process]) -> None:
        """Ask these to end."""
        for process in processes:
            self.processes.add(process)
            self._try(process, signal.SIGTERM)

    def go_on(self, now: float, others: Iterable[Process] = ()) -> bool:
        """End what is still there after a while, ``others`` included; return whether all have ended."""
        self.processes.update(others)
        self.processes = {process for process in self.processes if runs_as(process, self.owner)}
        if now - self.began_at >= self.to_tidy_up:
            for process in self.processes:
                self._try(process, signal.SIGKILL)
        return not self.processes

    def _try(self, process: Process, signum: signal.Signals) -> None:
        # One that has changed its user meanwhile cannot be ended by us, the others can.
        with contextlib.suppress(PermissionError):
            send(process, signum, self.owner)
