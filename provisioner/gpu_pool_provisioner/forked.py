"""Children of this process that :class:`subprocess.Popen` did not start: a template has forked them.

They lose their parent as they are made, and are adopted. Until somebody has waited for the end of one, its
pid is nobody else's. What else loses its parent below this process in that moment is adopted as well, such
as what a cell has started in the background; nobody knows of it, so its end is waited for here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from gpu_pool_client import _procfs

# prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37


class ForkedProcess:
    """A child that :class:`subprocess.Popen` did not start: of its methods those that jupyter_client uses."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._lock = threading.RLock()

    def __del__(self) -> None:
        # Nobody else would wait for its end.
        if self.poll() is None:
            _dropped.append(self)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal's number; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it
                    self.returncode = 0
                else:
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended. Raises ``subprocess.TimeoutExpired``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        # Until it has been waited for, its pid is nobody else's.
        with self._lock:
            if self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


#: Processes that run, and whose managers are gone: of this process, whose children they are.
_dropped: Final[list[ForkedProcess]] = []

#: Seconds in which whoever has started a process has waited for its end.
_WAITED_FOR_WITHIN: Final = 60.0

#: The process groups of templates that did not answer: a kernel that nobody wants may end in them, as a child
#: of this process.
unwanted_groups: Final[set[int]] = set()


def wait_for_unwanted(now: float | None = None) -> None:
    """Wait for the end of processes that nobody asks for, as ``subprocess`` does for its own.

    ``now`` is of ``time.monotonic()``. Called before every start; what has not ended is left alone.
    """
    for process in _dropped[:]:
        if process.poll() is not None:
            _dropped.remove(process)
    with _adoption.lock:
        for pid, stranger in tuple(_adoption.strangers.items()):
            if stranger.is_done(pid, time.monotonic() if now is None else now):
                del _adoption.strangers[pid]
    for group in tuple(unwanted_groups):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
            continue
        unwanted_groups.discard(group)


@dataclass
class _Stranger:
    """A child that came while this process adopted, and that no template was asked for."""

    #: Of :class:`_procfs.Stat`: another process that has its pid is not it.
    start: int
    #: Whether it was surely adopted. Else another thread may have started it, and wait for it.
    is_adopted: bool
    #: When it was first seen to have ended, of ``time.monotonic()``.
    ended_at: float | None = None

    def is_done(self, pid: int, now: float) -> bool:
        """Whether nothing is left of it; wait for it if it has ended, and nobody else does."""
        found = _procfs.stat(pid)
        if found is None or found.start != self.start:
            return True
        if not found.has_ended:
            return False
        if self.ended_at is None:
            self.ended_at = now
        if not self.is_adopted and now < self.ended_at + _WAITED_FOR_WITHIN:
            return False
        with contextlib.suppress(ChildProcessError):  # somebody has just waited for it
            os.waitpid(pid, os.WNOHANG)
        return True


@dataclass
class _Adoption:
    """Whether what loses its parent below this process becomes its child, and what has."""

    lock: threading.Lock
    #: Who needs it at the moment.
    count: int = 0
    #: When it began, in clock ticks since the boot of the machine, and the children that there were.
    began: int = 0
    before: frozenset[int] = frozenset()
    #: Those that it is for.
    wanted: set[int] = field(default_factory=set)
    strangers: dict[int, _Stranger] = field(default_factory=dict)

    def begin(self) -> None:
        """Adopt from now on."""
        self.began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        self.before = frozenset(_children())
        _set_subreaper(1)

    def end(self) -> None:
        """Adopt no more, and note what came meanwhile."""
        _set_subreaper(0)
        for pid in set(_children()) - self.before - self.wanted:
            found = _procfs.stat(pid)
            if found is not None:
                # A child of ours is in our session, or leads one; what a kernel starts is in the kernel's.
                may_be_ours = found.start >= self.began and _session(pid) in (_session(0), pid)
                self.strangers[pid] = _Stranger(found.start, is_adopted=not may_be_ours)
        self.wanted.clear()


#: Of the process, as what prctl(2) sets is.
_adoption: Final = _Adoption(threading.Lock())


@contextlib.contextmanager
def adopting() -> Iterator[set[int]]:
    """Let what loses its parent below this process become its child, for as long as the block lasts.

    Yields the set to which the block adds the pids of those that it wants. The ends of all others are waited
    for by :func:`wait_for_unwanted`.
    """
    if _adopts_anyway():
        yield set()
        return
    with _adoption.lock:
        _adoption.count += 1
        if _adoption.count == 1:
            _adoption.begin()
    try:
        yield _adoption.wanted
    finally:
        with _adoption.lock:
            _adoption.count -= 1
            if _adoption.count == 0:
                _adoption.end()


def _children() -> Iterator[int]:
    """Yield the pids of this process' children; none where the system does not list them."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            yield from map(int, (task / "children").read_bytes().split())


def _session(pid: int) -> int:
    """Return the session of a process, of this one for 0; -1 if there is none any more."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _set_subreaper(value: int) -> None:
    if _libc().prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@functools.cache
def _adopts_anyway() -> bool:
    """Whether somebody else has made this process adopt; first asked before we ever do."""
    found = ctypes.c_int()
    _libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


class Streams:
    """A kernel's standard streams, as ``Popen`` would make them."""

    def __init__(self, kwargs: Mapping[str, Any], opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._until_kept = opened.enter_context(contextlib.ExitStack())
        self._ours: list[IO[bytes] | None] = []
        # jupyter_client gives a kernel without input one that has ended.
        self.theirs = [self._input(kwargs.get("stdin"))]
        for standard, name in ((1, "stdout"), (2, "stderr")):
            self.theirs.append(self._output(standard, kwargs.get(name)))

    def keep(self) -> list[IO[bytes] | None]:
        """Return this process' ends of the pipes of standard output and error, which are closed otherwise."""
        self._until_kept.pop_all()
        return self._ours

    def _input(self, given: Any) -> int:
        if given is None:
            reading, writing = os.pipe()
            os.close(writing)
            self._opened.callback(os.close, reading)
            return reading
        return self._descriptor(given)

    def _output(self, standard: int, given: Any) -> int:
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            self._opened.callback(os.close, writing)
            self._ours.append(self._until_kept.enter_context(os.fdopen(reading, "rb")))
            return writing
        self._ours.append(None)
        if given is None:
            return standard
        return self.theirs[1] if given == subprocess.STDOUT else self._descriptor(given)

    def _descriptor(self, given: Any) -> int:
        if given == subprocess.DEVNULL:
            descriptor = os.open(os.devnull, os.O_RDWR)
            self._opened.callback(os.close, descriptor)
            return descriptor
        return given if isinstance(given, int) else int(given.fileno())


def _forget() -> None:
    """Forget what a process that was forked from this one has not: the threads, and its own children."""
    _adoption.__init__(threading.Lock())  # type: ignore[misc]
    _adopts_anyway.cache_clear()
    _dropped.clear()
    unwanted_groups.clear()


os.register_at_fork(after_in_child=_forget)
