"""Which process is meant, even after its pid has been used again.

A pid alone names different processes over time. A :class:`Process` also
carries the start time, the boot, and the pid namespace it was seen from, so
that it can be recognised exactly, and only by a looker who can see it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One run of one process.

    ``start`` is in clock ticks since boot on Linux (field 22 of
    ``/proc/PID/stat``, proc(5)) and in milliseconds since the epoch elsewhere:
    only equality means anything. ``boot`` and ``namespace`` name the boot of
    the machine and the pid namespace in which ``pid`` is valid. ``boot`` is empty
    for what stands for a process wherever it is, and outlives this machine.
    """

    pid: int
    start: int
    boot: str
    namespace: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Identify the running process ``pid``, or None if there is none that the caller may see."""
        start = _start_of(pid)
        return None if start is None else cls(pid, start, boot_id(), pid_namespace())

    @classmethod
    def current(cls) -> Process:
        """Identify the calling process."""
        return _current()

    def is_alive(self) -> bool | None:
        """Whether it still runs; None when this looker cannot tell.

        A zombie counts as dead: it runs no code and holds no device. It is none
        while any thread of it goes on, though its first one has ended. A process of
        an earlier boot is dead; one of no boot in particular, or of another pid
        namespace, is unknown. One that the system hides from this looker is dead too:
        one's own processes are never hidden, so its pid now belongs to somebody else's.
        """
        if self.boot and self.boot != boot_id():
            return False
        if self.namespace != pid_namespace():
            return None
        return _start_of(self.pid) == self.start


@functools.cache
def _current() -> Process:
    found = Process.of(os.getpid())
    assert found is not None, "a running process sees itself"
    return found


# A forked child is another process.
os.register_at_fork(after_in_child=_current.cache_clear)


@functools.cache
def boot_id() -> str:
    """Name the current boot of this machine."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{int(psutil.boot_time())}"


def pid_namespace() -> str:
    """Name the pid namespace of the calling process."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return sys.platform


def _start_of(pid: int) -> int | None:
    """Return the start time of a live process, or None for a dead one, a zombie, or a hidden one.

    Where ``/proc`` is mounted with ``hidepid`` (proc(5)), other users' processes
    are missing from it, or may not be read.
    """
    if pid <= 0:
        return None
    if not sys.platform.startswith("linux"):
        return _start_by_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if has_ended(fields) else int(fields[19])


def has_ended(fields: Sequence[bytes]) -> bool:
    """Whether a process runs no more, by its ``/proc/PID/stat`` from the third field on.

    The state is that of the first thread alone: it is Z while others go on,
    which the 20th field counts.
    """
    return fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)


def owner_of(pid: int) -> int | None:
    """Return the real user id of a process of Linux, or None if it cannot be seen.

    The owner of ``/proc/PID`` is the effective user, which a set-user-ID program changes.
    """
    try:
        lines = (_PROC / f"{pid}/status").read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Uid:")), None)


def _start_by_psutil(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 1000)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
