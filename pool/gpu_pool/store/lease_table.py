"""Leases as rows of the store: read as values, living and ended ones, and what is written of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from gpu_pool.clock import Clock
from gpu_pool.policy.sharing import Course, Sharing
from gpu_pool.store.database import Database, Row
from gpu_pool.store.device_table import DeviceTable
from gpu_pool_client import (
    WHOLE,
    EndReason,
    Failure,
    Hibernation,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    Place,
    Process,
    Slice,
    Terms,
    WhenIdle,
    parse_request,
)

#: What a row says, to compare it by.
_Values: TypeAlias = tuple[object, ...]

_ID: Final = re.compile(r"([0-9]{1,18})-[0-9a-f]{8}", re.ASCII)
#: Seconds by which a moment differs that is worked out anew, where the clock of the wall has been set.
_CLOCK_SET: Final = 0.5
#: Characters that are kept of a text that came from outside.
MOST_TEXT: Final = 200


class LeaseTable:
    """Reads leases, inside the transactions and snapshots of its caller, and says what is written of them."""

    def __init__(
        self, database: Database, devices: DeviceTable, sharing: Sharing, clock: Clock, attach_within: float
    ) -> None:
        self._db = database
        self._devices = devices
        self._sharing = sharing
        self._clock = clock
        self._attach_within = attach_within
        #: What was last told of all, by row: of thousands few change from one look to the next.
        self._not_waiting: dict[_Values, Lease] = {}
        self._waiting: dict[_Values, Lease] = {}
        #: The state of the store in which that was, and when the boot was by the wall's clock; None where
        #: that may have been undone.
        self._told_in: tuple[tuple[int, int], float] | None = None

    def follow(self, sharing: Sharing) -> None:
        """State these terms from now on."""
        self._sharing = sharing
        self._not_waiting, self._waiting, self._told_in = {}, {}, None

    def read_all(self) -> tuple[tuple[Lease, ...], tuple[Lease, ...]]:
        """Return the leases that do not wait and those that do, see :meth:`not_waiting` and :meth:`waiting`.

        They are not even read where nothing was written since the last time.
        """
        state, boot = self._db.state(), self._clock.wall_at(0.0)
        known = self._told_in
        if known is None or known[0] != state or abs(boot - known[1]) >= _CLOCK_SET:
            found = self.not_waiting(), self.waiting()
            self._told_in = None if state is None else (state, boot)
            return found
        return tuple(self._not_waiting.values()), tuple(self._waiting.values())

    def lease(self, lease_id: str) -> Lease:
        """Return a lease, ended ones included. Raises ``LeaseGone`` for one that never was."""
        row = self.live(lease_id)
        if row is not None:
            return self._read(row)
        number = lease_number(lease_id)
        ended = None if number is None else self._db.one("ended_by_number", number=number)
        if ended is None or ended["id"] != lease_id:
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")
        return _of_history(ended)

    def by_key(self, key: str) -> Lease:
        """Return the lease of a key that is known."""
        row = self._db.one("lease_by_key", key=key)
        if row is not None:
            return self._read(row)
        return _of_history(self._db.one("ended_by_key", key=key))

    def not_waiting(self) -> tuple[Lease, ...]:
        """Return held and parked leases, oldest first."""
        known, self._not_waiting = self._not_waiting, {}
        for row in self._db.run("leases").fetchall():
            values, parts = tuple(row), self._devices.read(row["slices"])
            lease = known.get(values)
            if lease is None or lease.slices != parts:  # what is known of a device may have changed
                lease = self.value(row, parts)
            if row["ends_by"] is not None:
                lease = _ending_at(lease, self._clock.wall_at(row["ends_by"]))
            self._not_waiting[values] = lease
        return tuple(self._not_waiting.values())

    def waiting(self) -> tuple[Lease, ...]:
        """Return waiting leases in the order of the queue."""
        known, self._waiting = self._waiting, {}
        for place, row in enumerate(self._db.run("waiting").fetchall(), 1):
            values = tuple(row)
            lease = known.get(values) or self.value(row, (), place)
            self._waiting[values] = lease if lease.position == place else replace(lease, position=place)
        return tuple(self._waiting.values())

    def live(self, lease_id: str) -> sqlite3.Row | None:
        """Return the row of a lease that has not ended, or None."""
        number = lease_number(lease_id)
        row: sqlite3.Row | None = None if number is None else self._db.one("lease_by_number", number=number)
        return row if row is not None and row["id"] == lease_id else None

    def row(self, lease_id: str) -> sqlite3.Row:
        """Return the row of a lease, or say how it ended."""
        row = self.live(lease_id)
        if row is None:
            raise gone(self.lease(lease_id))
        return row

    def position(self, row: sqlite3.Row) -> int | None:
        """Return a lease's position in the queue, or None if it does not wait."""
        turn = row["turn"]
        return None if turn is None else int(self._db.one("position", turn=turn)[0])

    def value(self, row: Row, parts: tuple[Slice, ...], position: int | None = None) -> Lease:
        """Return the lease of a row, as read or as about to be written."""
        course = self._sharing.course_or_default(row["course"])
        ends_at = None if row["ends_by"] is None else self._clock.wall_at(row["ends_by"])
        request = read_request(row["request"])
        # Those with which it was granted; where none are kept, those of its course as it is.
        kept = course.terms(None) if row["terms"] is None else read_terms(row["terms"])
        terms = replace(
            self._sharing.where_kernels_run(kept, parts),
            ends_at=ends_at,
            # Not as its course says: that allows for longer.
            ends_as_asked=request.length is not None
            and request.length == request.at_most(course.longest_lease),
        )
        return Lease(
            id=row["id"],
            key=row["key"],
            request=request,
            holder=replace(
                _holder(row, read_process(row["keeper"]), batch=course.batch), yields=bool(row["yields"])
            ),
            state=LeaseState(row["state"]),
            requested_at=row["requested_at"],
            held_at=row["held_at"],
            first_held_at=row["first_held_at"],
            slices=parts,
            notice=row["notice"],
            process=read_process(row["process"]) if row["process"] else None,
            position=position,
            place=Place() if row["outside"] else None,
            terms=terms,
            asked_back=EndReason(row["asked_back"]) if row["asked_back"] else None,
            failure=read_failure(row["failure"]) if row["failure"] else None,
            held_before=row["held_before"],
            used_before=row["used_before"] / WHOLE,
            parked_at=row["parked_at"],
            lent_before=row["lent"] / WHOLE,
            burst_since=row["burst_since"],
            burst_before=row["burst_before"],
            burst_peak_mib=row["burst_peak_mib"],
            hibernates=bool(row["hibernates"]),
            hibernation=read_hibernation(row["hibernation"]) if row["hibernation"] else None,
        )

    def granted(self, row: Row, parts: Sequence[Slice]) -> dict[str, Any]:
        """Return what changes in a lease's row when it is granted these slices."""
        uptime = self._clock.uptime()
        course = self._sharing.course_or_default(row["course"])
        longest = read_request(row["request"]).at_most(course.longest_lease)
        return {
            "slices": self._devices.write(parts),
            "milli": sum(part.milli for part in parts),
            "memory_mib": sum(part.memory_mib for part in parts),
            "now": self._clock.wall(),
            "ends_by": None if longest is None else uptime + max(0.0, longest - row["held_before"]),
            # The terms with which a course grants a slice now, but for the end, which has a column.
            "terms": _write_terms(course),
            "uptime": uptime,
            "deadline": uptime + self._attach_within,
            "deadline_reason": EndReason.NEVER_ATTACHED.value,
        }

    def as_ended(self, row: Row, reason: EndReason) -> Lease:
        """Return the lease of a row as the history will have it, which ends for this reason."""
        reason = EndReason(row["ending"] or reason)
        return _ended(row, reason, self._clock.wall(), row["first_held_at"], row["notice"])

    def _read(self, row: sqlite3.Row) -> Lease:
        return self.value(row, self._devices.read(row["slices"]), self.position(row))


def _ending_at(lease: Lease, at: float) -> Lease:
    """Return a lease with its end by the wall's clock: the very same unless that has been set meanwhile."""
    before = lease.terms.ends_at
    if before is not None and abs(at - before) < _CLOCK_SET:
        return lease
    return replace(lease, terms=replace(lease.terms, ends_at=at))


def gone(lease: Lease) -> LeaseGone:
    """Return the error for a lease that has ended."""
    reason = lease.end_reason.value if lease.end_reason else "unknown"
    ended = time.strftime("%H:%M:%S", time.localtime(lease.ended_at))
    words = f"{reason}. {lease.notice}".rstrip() if lease.notice else f"{reason}."
    return LeaseGone(
        f"The lease on {lease.request.named} ended at {ended}: {words}", "Ask for a new slice.", reason=reason
    )


def lease_number(lease_id: str) -> int | None:
    """Return the number in a lease's id, None if it is no id of a lease."""
    match = _ID.fullmatch(lease_id)
    return int(match[1]) if match else None


#: The same few requests are read over and over.
read_request = functools.lru_cache(maxsize=1024)(parse_request)


def write_process(process: Process) -> str:
    """Write a process in one word; equal processes give equal words."""
    return f"{process.pid}/{process.start}/{process.boot}/{process.namespace}"


@functools.lru_cache(maxsize=4096)
def read_process(text: str) -> Process:
    """Read what :func:`write_process` wrote."""
    pid, start, boot, namespace = text.split("/", 3)
    return Process(int(pid), int(start), boot, namespace)


def _write_terms(course: Course) -> str:
    limits = course.idle_limit, course.when_idle.value, course.warn_before, course.keep_at_most
    return json.dumps([*limits, course.yield_after, course.hibernate_after])


@functools.lru_cache(maxsize=1024)
def read_terms(text: str) -> Terms:
    """Read the terms with which a lease was granted, but for its end."""
    # What was granted by a version without yielding, or without hibernation, does not say when: never.
    idle_limit, when_idle, *limits = (*json.loads(text), None, None)[:6]
    warn_before, keep_at_most, yield_after, hibernate_after = limits
    return Terms(
        *(None, idle_limit, WhenIdle(when_idle), warn_before, keep_at_most),
        yield_after=yield_after,
        hibernate_after=hibernate_after,
    )


def write_hibernation(hibernation: Hibernation) -> str:
    """Write how a kernel stands that can go to disk, as JSON."""
    return json.dumps(dataclasses.asdict(hibernation), sort_keys=True)


def read_hibernation(text: str) -> Hibernation:
    """Read what :func:`write_hibernation` wrote."""
    return Hibernation(**json.loads(text))


def write_failure(failure: Failure) -> str:
    """Write a failure as JSON."""
    return json.dumps(dataclasses.asdict(failure), sort_keys=True)


def read_failure(text: str) -> Failure:
    """Read what :func:`write_failure` wrote."""
    return Failure(**json.loads(text))


def _holder(row: Row, process: Process | None, *, batch: bool = False) -> Holder:
    return Holder(row["user"], row["course"] or None, row["kernel"], process, bool(row["batch"]) or batch)


def _of_history(row: sqlite3.Row) -> Lease:
    """Return the lease of a row of ``history``."""
    return _ended(row, EndReason(row["reason"]), row["ended_at"], row["held_at"], row["note"])


def _ended(row: Row, reason: EndReason, at: float, held_at: float | None, notice: str) -> Lease:
    return Lease(
        id=row["id"],
        key=row["key"],
        request=read_request(row["request"]),
        holder=_holder(row, None),
        state=LeaseState.ENDED,
        requested_at=row["requested_at"],
        held_at=held_at,
        first_held_at=held_at,
        ended_at=at,
        end_reason=reason,
        notice=notice,
        failure=read_failure(row["failure"]) if row["failure"] else None,
    )


def plain(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text that came from outside, and leave out what a file or a terminal could choke on."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text[:most])
