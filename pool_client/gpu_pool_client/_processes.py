"""Which process is meant, even after its pid has been used again.

A pid alone names different processes over time. A :class:`Process` also
carries the start time, the boot, and the pid namespace it was seen from, so
that it can be recognised exactly, and only by a process that can see it.
"""

from __future__ import annotations

import functools
import os
import pwd
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import _procfs as procfs

_IS_LINUX: Final = sys.platform.startswith("linux")
#: A tree of processes deeper than this is a circle: a pid was used again while we looked.
_DEEPEST: Final = 256


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
        """Identify a running process.

        Parameters
        ----------
        pid
            Its process id, in this process's own pid namespace.

        Returns
        -------
        Process or None
            The process; None if there is none, or none that the caller may see.
        """
        found = _start_and_parent(pid)
        return None if found is None else cls(pid, found[0], boot_id(), pid_namespace())

    @classmethod
    def current(cls) -> Process:
        """Identify the calling process."""
        return _current()

    def is_alive(self) -> bool | None:
        """Whether the process still runs, as far as the caller can see.

        A zombie counts as dead: it runs no code and holds no device. It is not a zombie while
        another of its threads runs. A process that the system hides from the caller is dead, too:
        one's own processes are never hidden, so its pid now belongs to somebody else's.

        Returns
        -------
        bool or None
            False for a process of an earlier boot; None for one of no boot in particular, or of
            another pid namespace, about which the caller cannot tell.
        """
        if self.boot and self.boot != boot_id():
            return False
        if self.namespace != pid_namespace():
            return None
        found = _start_and_parent(self.pid)
        return found is not None and found[0] == self.start


@functools.cache
def _current() -> Process:
    found = Process.of(os.getpid())
    assert found is not None, "a running process sees itself"
    return found


@functools.cache
def boot_id() -> str:
    """Name the current boot of this machine."""
    try:
        return (procfs.PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Imported here, as below, because only systems other than Linux need it.
        import psutil

        return f"{int(psutil.boot_time())}"


@functools.cache
def pid_namespace() -> str:
    """Name the pid namespace of the calling process, which is in one for as long as it lives."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return sys.platform


# A forked child is another process, and may be in another namespace.
os.register_at_fork(after_in_child=_current.cache_clear)
os.register_at_fork(after_in_child=pid_namespace.cache_clear)


def _start_and_parent(pid: int) -> tuple[int, int] | None:
    """Return the start time of a live process and the pid of its parent; None for a dead one or a zombie.

    Where ``/proc`` is mounted with ``hidepid`` (proc(5)), other users' processes
    are missing from it, or may not be read.
    """
    if pid <= 0:
        return None
    if not _IS_LINUX:
        return _by_psutil(pid)
    found = procfs.stat(pid)
    return None if found is None or found.has_ended else (found.start, found.parent)


def lineage(pid: int) -> Iterator[Process]:
    """Yield a living process and those it descends from, nearest first, as far as they can be seen."""
    namespace = Process.current().namespace
    for _ in range(_DEEPEST):
        found = _start_and_parent(pid)
        if found is None:
            return
        start, parent = found
        yield Process(pid, start, boot_id(), namespace)
        pid = parent


def family(pid: int) -> set[int]:
    """Return the pids of a process of Linux and of its descendants."""
    seen = {each: found for each in procfs.pids() if (found := procfs.stat(each)) is not None}
    children: dict[int, list[int]] = {}
    for child, found in seen.items():
        # A child that is older than its parent is another's, whose pid was used again.
        if found.parent in seen and found.start >= seen[found.parent].start:
            children.setdefault(found.parent, []).append(child)
    family, ahead = {pid}, [pid]
    while ahead:
        new = [child for child in children.get(ahead.pop(), ()) if child not in family]
        family.update(new)
        ahead += new
    return family


def is_child_of_ours(pid: int) -> bool:
    """Whether it is a child of the calling process, one that has ended included."""
    if _IS_LINUX:
        found = procfs.stat(pid)
        return found is not None and found.parent == os.getpid()
    alive = _by_psutil(pid)
    return alive is not None and alive[1] == os.getpid()


def owner_of(pid: int) -> int | None:
    """Return the real user id of a process of Linux, or None if it cannot be seen.

    The owner of ``/proc/PID`` is the effective user, which a set-user-ID program changes.
    """
    words = procfs.status(pid, b"Uid")
    return int(words[0]) if words else None


def account_of(uid: int) -> str:
    """Return the name of a user of this machine; the number itself, where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}"


def _by_psutil(pid: int) -> tuple[int, int] | None:
    """Return what ``_start_and_parent`` does, on systems other than Linux."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 1000), process.ppid()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
