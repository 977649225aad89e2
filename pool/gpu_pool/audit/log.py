"""What stands in a line of the audit log."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gpu_pool.audit.callers import Actor, asks
from gpu_pool_client import BadRequest, GpuPoolError, PoolUnreachable
from gpu_pool_client._home import expanded
from gpu_pool_client._log import EscapingLogger

#: Characters kept of a text.
_MOST_TEXT: Final = 500
#: Entries kept of a list: a lease has one for each of its devices.
_MOST_ENTRIES: Final = 64
#: Refusals of one user that are logged in a minute.
_MOST_REFUSALS: Final = 60
#: Users whose refusals are counted.
_MOST_KNOWN: Final = 1000


class AuditLog:
    """Writes what was decided. May be used by any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = LineFile(path)
        self._clock = clock
        self._refused: dict[str, _Minute] = {}

    @property
    def written(self) -> int:
        """Lines that this process has written."""
        return self._file.written

    @property
    def lost(self) -> int:
        """Lines that it could not write."""
        return self._file.lost

    def reopen(self) -> None:
        """Open the file anew. Raises ``BadRequest`` where that cannot be."""
        try:
            self._file.reopen()
        except OSError as error:
            raise BadRequest(
                f"The audit log, {self._file.path}, cannot be written: {error.strerror}.",
                "Create its folder, writable for the user who runs the pool, or name another file: "
                "c.PoolSettings.audit_log.",
            ) from error

    def write(
        self,
        event: str,
        fields: Mapping[str, object],
        actor: Actor | None,
        *,
        asked: bool = True,
        at: float | None = None,
    ) -> None:
        """Write a line. ``asked`` says whether the actor asked for it; else it is what followed.

        ``at`` is its time in Unix seconds, by default now.
        """
        at = self._clock() if at is None else at
        missing = self._file.missing
        if missing and not self._file.append(_line("lost", at, {"lines": missing})):
            return
        who = _who(actor, asked=asked) if actor is not None else {}
        self._file.append(_line(event, at, {**fields, **who}))

    def refused(self, error: GpuPoolError, fields: Mapping[str, object]) -> None:
        """Write that something was refused, unless that was told of this request before.

        Somebody who is refused again and again must not fill the disk by it.
        """
        actor = asks()
        if actor is not None:
            if actor.is_refused:
                return
            actor.is_refused = True
        minute = self._minute_of(actor.user if actor is not None else "")
        minute.refused += 1
        if minute.refused <= _MOST_REFUSALS:
            told = {**fields, "reason": error.code, "message": str(error)}
            self.write("refused", {**told, "left_out": minute.left_out or None}, actor)
            minute.left_out = 0
        else:
            minute.left_out += 1

    def _minute_of(self, user: str) -> _Minute:
        """Return how often a user was refused in this minute."""
        number = int(self._clock() // 60)
        if user not in self._refused and len(self._refused) >= _MOST_KNOWN:
            self._refused.clear()
        known = self._refused.setdefault(user, _Minute(number))
        if known.number != number:
            known.number, known.refused = number, 0
        return known


class _Minute:
    """How often somebody was refused in one minute, and how many refusals were never told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.refused = 0
        self.left_out = 0


@functools.cache
def audit_log(path: str) -> AuditLog | None:
    """Return the log at a path, the same one for all of this process; None for no path."""
    return AuditLog(expanded(path).absolute()) if path else None


@contextmanager
def refusals(log: AuditLog | None, fields: Mapping[str, object]) -> Iterator[None]:
    """Write down what the pool refuses inside. That it does not work is no decision."""
    try:
        yield
    except GpuPoolError as error:
        if log is not None and not isinstance(error, PoolUnreachable):
            log.refused(error, fields)
        raise


def _line(event: str, at: float, fields: Mapping[str, object]) -> bytes:
    """Write a line. What is not printable ASCII is escaped: nothing in it ends it, or moves a cursor."""
    moment = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    told = {"time": moment, "event": event, **fields, "writer": os.getpid()}
    kept = {name: _bounded(value) for name, value in told.items() if value is not None}
    return json.dumps(kept, separators=(",", ":")).encode() + b"\n"


def _who(actor: Actor, *, asked: bool) -> Mapping[str, object]:
    if not asked:
        return {"request_id": actor.request_id}
    known = {name: getattr(actor, name) for name in ("via", "uid", "pid", "server", "request_id")}
    return {"by": actor.user, **known}


def _bounded(value: Any) -> object:
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}..."
    return list(value)[:_MOST_ENTRIES] if isinstance(value, (list, tuple)) else value


_log = EscapingLogger(logging.getLogger("gpu_pool.audit"))

#: A pipe that nobody reads, or a terminal, must not stop a pool.
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_MODE: Final = 0o640


class LineFile:
    """Appends lines to the file at ``path``; may be used by any thread.

    A file that was renamed or removed is opened anew before the next line. The
    system appends what is written at once as one piece, whoever else writes.
    What cannot be written is counted, told in the log once, and given up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.lost = 0
        #: Lines lost since the last one that was written.
        self.missing = 0
        self._lock = threading.Lock()
        self._file: int | None = None

    def append(self, line: bytes) -> bool:
        """Write a line, its end included; return whether it is there."""
        with self._lock:
            try:
                self._write(self._current(), line)
            except OSError as error:
                self._lose(error)
                return False
            self.written += 1
            if self.missing:
                _log.warning("%s can be written again: %d lines are missing", self.path, self.missing)
                self.missing = 0
            return True

    def reopen(self) -> None:
        """Open the file anew, and make it if need be. Raises ``OSError``."""
        with self._lock:
            self._close()
            self._current()

    def _current(self) -> int:
        """Return the file that has the path now."""
        if self._file is not None and not self._is_current(self._file):
            self._close()
        if self._file is None:
            self._file = _open(self.path)
        return self._file

    def _is_current(self, file: int) -> bool:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(file)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _write(self, file: int, line: bytes) -> None:
        count = os.write(file, line)
        if count < len(line):  # the disk is full, or a limit is reached
            self._blank(os.lseek(file, 0, os.SEEK_CUR) - count, count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _blank(self, place: int, count: int) -> None:
        """Make an empty line of what was written of one: what is there needs no more room."""
        with suppress(OSError):
            other = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(other, b" " * (count - 1) + b"\n", place)
            finally:
                os.close(other)

    def _lose(self, error: OSError) -> None:
        if not self.missing:
            _log.error("%s cannot be written: %s. Decisions go on without it.", self.path, error.strerror)
        self.lost += 1
        self.missing += 1

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open(path: Path) -> int:
    """Open the file; one that is made has the mode 0640, whatever the umask."""
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, _APPEND)
        with suppress(FileExistsError):
            made = os.open(path, _APPEND | os.O_CREAT | os.O_EXCL, _MODE)
            os.fchmod(made, _MODE)
            return made
