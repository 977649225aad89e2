"""What modules may have changed of their process as they were imported, and a fork drops or shares.

A process that imports them itself has changed it; of a kernel that is forked, that cannot be said.
All of it, with what else a fork copies, is listed in docs/explanation/templates.md.
"""

import contextlib
import ctypes
import os
import signal
import tempfile
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: A process is as its parent in these, or it is not what a new child of that parent would be.
STATUS = ("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
# prctl(2)
_PR_GET_PDEATHSIG = 2
_PR_GET_CHILD_SUBREAPER = 37
#: Of a mapping in /proc/PID/smaps: no child has it (proc_pid_smaps(5)).
_NOT_COPIED = b"dc"


class ProcessState:
    """What a process was before something was imported, and the temporary files that were made since."""

    def __init__(self) -> None:
        self._before = dict(_state())
        self._names = []  # type: list[str]

    @contextlib.contextmanager
    def noting_files(self) -> "Iterator[None]":
        """Note the names of temporary files and folders that are made in this block."""
        tempfile._name_sequence = _noting(self._names)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            tempfile._name_sequence = None  # type: ignore[attr-defined]

    def doubt(self) -> "str | None":
        """Return what is not as before, or is not in a forked process; None if there is nothing."""
        for what, now in _state():
            if self._before.get(what) != now:
                return f"the preloaded modules have {what}"
        if any(signal.getitimer(which) != (0.0, 0.0) for which in _TIMERS) or _read("/proc/self/timers"):
            return "the preloaded modules have set a timer"
        if any(
            _NOT_COPIED in line.split() for line in _read("/proc/self/smaps").split(b"\n") if _are_flags(line)
        ):
            return "the preloaded modules have memory that no forked process has"
        return self._left_file()

    def _left_file(self) -> "str | None":
        """Return that a temporary file is there: the first kernel that ends may remove it for all."""
        if not self._names:
            return None
        folder = tempfile.gettempdir()
        for entry in os.listdir(folder):  # noqa: PTH208 - as everywhere here
            if any(name in entry for name in self._names):
                return f"the preloaded modules have made {folder}/{entry:.200}"
        return None


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def statuses(process: str) -> "dict[str, str]":
    """Return what belongs to a process' user, group and rights; ``process`` is its folder in ``/proc``."""
    pairs = (
        line.decode("ascii", "replace").partition(":") for line in _read(process + "status").split(b"\n")
    )
    return {name: value.strip() for name, _, value in pairs if name in STATUS}


def _state() -> "Iterator[tuple[str, Any]]":
    """Yield what modules may have done, and what shows it."""
    yield "changed the folder of their process", _folder()
    yield "changed the umask, user, groups or rights of their process", statuses("/proc/self/")
    yield "changed the limits of their process", _read("/proc/self/limits")
    yield "changed the priority of their process", _priorities()
    yield "changed the processors of their process", os.sched_getaffinity(0)
    yield "changed the cgroup of their process", _read("/proc/self/cgroup")
    yield "changed the name of their process", (_read("/proc/self/comm"), _read("/proc/self/cmdline"))
    yield "chosen what happens as other processes end", [_asked(what) for what in _ASKED]
    yield "locked memory", [line for line in _read("/proc/self/status").split(b"\n") if b"VmLck" in line]


_ASKED = (_PR_GET_PDEATHSIG, _PR_GET_CHILD_SUBREAPER)


def _asked(what: int) -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(what, ctypes.byref(found), 0, 0, 0)
    return found.value


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as Path.cwd, without its object
    except OSError:
        return ""


def _priorities() -> "tuple[Any, ...]":
    return (
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        _read("/proc/self/oom_score_adj"),
    )


def _noting(names: "list[str]") -> "Iterator[str]":
    for name in tempfile._RandomNameSequence():  # type: ignore[attr-defined]
        names.append(name)
        yield name


def _are_flags(line: bytes) -> bool:
    return line.startswith(b"VmFlags:")


def _read(file: str) -> bytes:
    """Return what is in a file; nothing where this system does not have it."""
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError:
        return b""
