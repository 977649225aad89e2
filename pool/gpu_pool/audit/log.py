"""What stands in a line of the audit log."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gpu_pool.audit.actors import Actor, asks
from gpu_pool.audit.file import LineFile
from gpu_pool_client import BadRequest, GpuPoolError, PoolUnreachable

#: Characters kept of a text.
_MOST_TEXT: Final = 500
#: Entries kept of a list: a lease has one for each of its devices.
_MOST_ENTRIES: Final = 64
#: Refusals of one user that are written down in a minute, and users who are remembered for that.
_MOST_REFUSALS, _MOST_KNOWN = 60, 1000


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
                "Make its folder, writable for the user who runs the pool, or name another file: "
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
            told = {**fields, "reason": error.code, "words": str(error)}
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
    return AuditLog(Path(path).expanduser().absolute()) if path else None


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
