"""A fair lock between processes.

SQLite's own busy handler starves some clients when many write at once: of
fifty processes one was served more than a thousand times as often as another.
Here each process takes a numbered ticket and waits for the one before it, so
all are served in the order in which they came. It is built on the kernel's
locks on byte ranges of a file, which vanish with the process that held them.

The lock gives fairness, not correctness: that is SQLite's transaction.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import secrets
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from gpu_pool.store.errors import StoreUnusable, as_unusable
from gpu_pool_client._forks import OwnFile

# struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
_TICKET: Final = struct.Struct("<qq")
#: The byte of the first sign of life.
_PULSES: Final = 1 << 62
#: The byte that all share who use the pool with simulated devices: the last there is, behind all pulses.
_SIMULATED: Final = (1 << 63) - 1
#: The byte that the one process has which reconciles the pool.
_RECONCILES: Final = _SIMULATED - 1
_HAS_TICKETS: Final = sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLKW")


class FairLock:
    """First come, first served, across processes. One instance per thread.

    Byte ``n`` of the lock file is held by the owner of ticket ``n`` from the
    moment it queues. The last ticket given out stands in the file itself.
    """

    def __init__(self, path: Path) -> None:
        self.file = _open_private(path)
        # A second open file description: its flock guards the giving out of tickets.
        self._counter = _open_private(path)
        self._ticket = 0

    def close(self) -> None:
        """Close the files, and so give up the lock and the position in the queue. May be repeated."""
        self.file.close()
        self._counter.close()

    def holder(self) -> int | None:
        """Return the pid that took the lock last, as far as is known."""
        content = os.pread(self._counter.fileno(), _TICKET.size, 0)
        return _TICKET.unpack(content)[1] if len(content) == _TICKET.size else None

    def __enter__(self) -> FairLock:
        if not _HAS_TICKETS:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            return self
        try:
            self._take_ticket()
            # Waiting for the one before me wakes one process at a time. The whole range
            # matters only when that one died in the queue, behind others who still wait.
            self._set(fcntl.F_RDLCK, self._ticket - 1, 1)
            self._set(fcntl.F_RDLCK, 0, self._ticket)
            os.pwrite(self._counter.fileno(), struct.pack("<q", os.getpid()), 8)
        except BaseException:
            # Whoever comes next must not wait for somebody who has left.
            self._set(fcntl.F_UNLCK, 0, self._ticket + 1)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _HAS_TICKETS:
            self._set(fcntl.F_UNLCK, 0, self._ticket + 1)
        else:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def _take_ticket(self) -> None:
        fcntl.flock(self._counter, fcntl.LOCK_EX)
        try:
            content = os.pread(self._counter.fileno(), 8, 0)
            last = struct.unpack("<q", content)[0] if len(content) == 8 else 0
            # Tickets start at 1, so that there is always a byte before mine. A damaged
            # number only costs order, never the exclusion that SQLite gives.
            self._ticket = last + 1 if 0 <= last < _PULSES - 1 else 1
            self._set(fcntl.F_WRLCK, self._ticket, 1)
            os.pwrite(self._counter.fileno(), struct.pack("<q", self._ticket), 0)
        finally:
            fcntl.flock(self._counter, fcntl.LOCK_UN)

    def _set(self, kind: int, start: int, length: int) -> None:
        fcntl.fcntl(self.file, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))


class LivenessLocks:
    """Signs of life of processes that cannot see each other, such as those of two containers.

    Each is a byte, far behind all tickets, that a process has locked for as
    long as it lives. Its lock vanishes with the process, whoever may look.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_private(path)
        self._simulates = False

    def close(self) -> None:
        """Stop looking. This process's own sign of life stays. May be repeated."""
        self._file.close()

    def own(self) -> int | None:
        """Return the number of this process's sign of life; None where there is no such thing."""
        return _beat(self._path, os.getpid())[0] if _HAS_TICKETS else None

    def beats(self, number: int) -> bool:
        """Whether the process with that sign of life lives."""
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, number))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def reconciles(self) -> bool:
        """Whether this process is the one that reconciles the pool, until :meth:`close` or its end.

        It is from now on if no other one is. Where there is no such lock, each of them is.
        """
        if not _HAS_TICKETS:
            return True
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, _RECONCILES))
        except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES where another has it
            return False
        return True

    def use_simulated(self) -> None:
        """Tell others that simulated devices are used here, until :meth:`close` or the process's end."""
        if _HAS_TICKETS:
            # Waits for somebody who is forgetting them at this moment.
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _byte(fcntl.F_RDLCK, _SIMULATED))
        self._simulates = True

    @contextlib.contextmanager
    def nobody_simulates(self) -> Iterator[bool]:
        """Whether nobody else uses simulated devices; if so, nobody begins to inside the block."""
        try:
            if _HAS_TICKETS:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, _SIMULATED))
        except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES where others have it
            yield False
            return
        try:
            # Where it cannot be told, they may be in use.
            yield _HAS_TICKETS
        finally:
            if _HAS_TICKETS:
                # The lock for one alone has taken the place of the shared one, if there was one.
                before = fcntl.F_RDLCK if self._simulates else fcntl.F_UNLCK
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _byte(before, _SIMULATED))


def _byte(kind: int, place: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0)


@functools.cache
def _beat(path: Path, pid: int) -> tuple[int, OwnFile]:  # noqa: ARG001 - a forked child needs its own
    # Never closed, and kept with the number: it must last until the process ends.
    file = _open_private(path)
    number = _PULSES + secrets.randbelow(_PULSES - 2)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, number))
    return number, file


def _open_private(path: Path) -> OwnFile:
    """Open a lock file that only this user can have made. Raises ``PermissionError`` for any other."""
    file = _open(path)
    found = os.fstat(file.fileno())
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        file.close()
        raise PermissionError(errno.EPERM, f"{path.name} is not a file of yours", str(path))
    return file


def _open(path: Path) -> OwnFile:
    """Open a lock file, whose locks end with this process also where a child forked from it lives on."""
    return OwnFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


#: Seconds that an owner waits for those who have the store open just now, such as a command.
_PATIENCE: Final = 3.0
_TRY_EVERY: Final = 0.05


class Ownership:
    """A lock beside the store at ``path``, kept until :meth:`close` or the process's end.

    Raises ``StoreUnusable``: for an owner while anybody else has the store
    open, for all others while it has an owner.
    """

    def __init__(self, path: Path, *, owner: bool) -> None:
        self.path = path.with_name(path.name + ".owner")
        try:
            self._file = _open(self.path)
        except OSError as error:
            raise as_unusable(error, path) from error
        try:
            self._lock(path, fcntl.LOCK_EX if owner else fcntl.LOCK_SH)
            if owner:
                os.truncate(self._file.fileno(), 0)
                os.pwrite(self._file.fileno(), str(os.getpid()).encode(), 0)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let others have it. May be repeated."""
        self._file.close()

    def _lock(self, path: Path, how: int) -> None:
        give_up_at = time.monotonic() + (_PATIENCE if how == fcntl.LOCK_EX else 0)
        while True:
            try:
                return fcntl.flock(self._file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise self._refusal(path, how) from None
            time.sleep(_TRY_EVERY)

    def _refusal(self, path: Path, how: int) -> StoreUnusable:
        owner = os.pread(self._file.fileno(), 20, 0).decode("ascii", "replace")
        if how == fcntl.LOCK_SH:
            return StoreUnusable(
                f"The pool's store, {path}, belongs to gpu-pool serve (process {owner}).",
                "Ask that service: set GPU_POOL_URL=unix: or write --pool unix:",
            )
        return StoreUnusable(
            f"The pool's store, {path}, is open in another process: another gpu-pool serve, "
            "or Jupyter servers and commands that use it directly.",
            "End them, or let them use the service: GPU_POOL_URL=unix:",
        )
