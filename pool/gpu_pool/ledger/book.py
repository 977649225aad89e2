"""Every decision about leases, each in one transaction of the ledger.

What fits and whose turn it is, pure functions say (``admission``,
``placement``, ``queueing``); this module reads what they need and writes what
they decide.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psutil

from gpu_pool import admission, placement, queueing
from gpu_pool.clock import Clock
from gpu_pool.ledger import reclaim, records
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.devices import DeviceTable
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    BadRequest,
    Device,
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    Outlook,
    PoolStatus,
    Process,
    Slice,
    SliceRequest,
    TimedOut,
)
from gpu_pool_client.processes import pid_namespace

_KEY: Final = re.compile(r"[!-~]{1,128}")
#: No deadline is set further ahead than this.
_MOST_SECONDS: Final = 86_400.0
#: Characters kept of a user's, a course's or a kernel's name.
_MOST_TEXT: Final = 200
_ID: Final = re.compile(r"([0-9]{1,18})-[0-9a-f]{8}", re.ASCII)


class Book:
    """The leases of one pool. Used by one thread at a time.

    ``give_up_at`` (``time.monotonic()``, see ``Database.transaction``) bounds
    how long any decision may wait for others to finish theirs.
    """

    def __init__(self, database: Database, settings: PoolSettings, clock: Clock | None = None) -> None:
        self._db = database
        self._rules = settings.rules
        self._attach_within = settings.attach_within
        self._clock = clock or Clock()
        self._devices = DeviceTable(database, self._rules.device_milli)
        self.give_up_at: float | None = None

    def register(self, devices: Sequence[Device]) -> None:
        """Make these the pool's devices. Leases on others live on; nothing new is granted there."""
        with self._db.snapshot():
            if not self._devices.is_news(devices):
                return
        with self._db.transaction(self.give_up_at):
            self._devices.register(devices, pid_namespace())
            self._serve_line()

    # -- Asking ------------------------------------------------------------

    def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Grant, or put in line; repeated with the same key, return what became of it."""
        if not _KEY.fullmatch(key):
            raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
        admission.check_rules(request, self._rules)
        row = self._draft(request, holder, key)
        with self._db.transaction(self.give_up_at):
            known, somebody_waits, number = self._db.one("ask", key=key)
            if known:
                return self._by_key(key)
            row["number"], row["id"] = number, f"{number}-{row['id']}"
            statuses = self._devices.open()
            parts = None if somebody_waits else placement.place(request, statuses, self._rules)
            if parts is None:
                admission.check(request, [status.device for status in statuses], self._rules)
                self._insert_waiting(row)
                return self._lease(str(row["id"]))
            self._insert_held(row, parts)
        return records.live_lease(row, parts, None)

    def _draft(self, request: SliceRequest, holder: Holder, key: str) -> dict[str, Any]:
        """Return what is known of a lease's row before any decision."""
        me = Process.current()
        keeper = holder.process or me
        return {
            "id": secrets.token_hex(4),
            "key": key,
            "request": str(request),
            "user": _plain(holder.user),
            "course": holder.course and _plain(holder.course),
            "kernel": holder.kernel and _plain(holder.kernel),
            "requested_at": self._clock.wall(),
            "keeper": records.write_process(keeper),
            "pulse": self._db.pulses.own() if keeper == me else None,
            "process": None,
        }

    def _insert_held(self, row: dict[str, Any], parts: tuple[Slice, ...]) -> None:
        row.update(state="held", turn=None, slices=self._devices.write(parts), held_at=row["requested_at"])
        row.update(self._attach_deadline())
        self._db.run("insert_lease", row)
        self._devices.take(parts)

    def _insert_waiting(self, row: dict[str, Any]) -> None:
        row.update(state="waiting", turn=self._next_turn(), slices="[]", held_at=None)
        row.update(deadline=None, deadline_reason=None)
        self._db.run("insert_lease", row)
        self._serve_line()

    def _attach_deadline(self) -> dict[str, object]:
        return {
            "deadline": self._clock.uptime() + self._attach_within,
            "deadline_reason": EndReason.NEVER_ATTACHED.value,
        }

    def shortage(self, lease_id: str) -> TimedOut:
        """Return the error that says why this lease still waits."""
        with self._db.snapshot():
            row = self._row_of(lease_id)
            statuses = self._devices.open()
            ahead = (self._place(row) or 1) - 1
        request = records.read_request(row["request"])
        message, remedy, largest = admission.shortage(request, statuses, ahead, self._rules)
        return TimedOut(message, remedy, largest_now=largest)

    def explain(self, lease_id: str) -> Outlook:
        """Say why this lease waits."""
        with self._db.snapshot():
            row = self._row_of(lease_id)
            place = self._place(row)
            statuses = self._devices.open()
        if place is None:
            raise BadRequest(
                f"Lease {lease_id} does not wait: it is {row['state']}.", "Nothing needs to be done."
            )
        request = records.read_request(row["request"])
        return Outlook(place, admission.shortage(request, statuses, place - 1, self._rules)[0])

    # -- The line ----------------------------------------------------------

    def _next_turn(self) -> int:
        return int(self._db.one("last_turn")[0]) + 1

    def _serve_line(self) -> None:
        """Grant to everybody in line whose turn has come."""
        line = self._db.run("line").fetchall()
        if not line:
            return
        for waiter, parts in queueing.grants(_waiters(line), self._devices.open(), self._rules):
            values = {"number": waiter.number, "now": self._clock.wall(), **self._attach_deadline()}
            self._db.run("grant", {**values, "slices": self._devices.write(parts)})
            self._devices.take(parts)

    # -- Reading -----------------------------------------------------------

    def lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now, ended ones included."""
        with self._db.snapshot():
            return self._lease(lease_id)

    def status(self, url: str) -> PoolStatus:
        """Return everything as one snapshot."""
        with self._db.snapshot():
            statuses = tuple(self._devices.statuses())
            leases = tuple(self._value(row) for row in self._db.run("leases").fetchall())
            line = self._db.run("line").fetchall()
        waiting = [records.live_lease(row, (), place) for place, row in enumerate(line, 1)]
        return PoolStatus(url, statuses, leases, tuple(waiting))

    def _lease(self, lease_id: str) -> Lease:
        row = self._live(lease_id)
        if row is not None:
            return self._value(row)
        number = _number(lease_id)
        ended = None if number is None else self._db.one("ended_by_number", number=number)
        if ended is None or ended["id"] != lease_id:
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")
        return records.ended_lease(ended)

    def _by_key(self, key: str) -> Lease:
        row = self._db.one("lease_by_key", key=key)
        if row is not None:
            return self._value(row)
        return records.ended_lease(self._db.one("ended_by_key", key=key))

    def _value(self, row: sqlite3.Row) -> Lease:
        return records.live_lease(row, self._devices.read(row["slices"]), self._place(row))

    def _place(self, row: sqlite3.Row) -> int | None:
        turn = row["turn"]
        return None if turn is None else int(self._db.one("place_in_line", turn=turn)[0])

    def _live(self, lease_id: str) -> sqlite3.Row | None:
        """Return the row of a lease that has not ended, or None."""
        number = _number(lease_id)
        row: sqlite3.Row | None = None if number is None else self._db.one("lease_by_number", number=number)
        return row if row is not None and row["id"] == lease_id else None

    def _row_of(self, lease_id: str) -> sqlite3.Row:
        """Return the row of a lease, or say how it ended."""
        row = self._live(lease_id)
        if row is None:
            raise gone(self._lease(lease_id))
        return row

    # -- Changing ----------------------------------------------------------

    def attach(self, lease_id: str, process: Process, ready_within: float | None, grace: float) -> Lease:
        """Tie the lease to a process; see ``Pool.attach``."""
        _check_seconds("grace", grace)
        _check_seconds("ready_within", ready_within)
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            watched = ready_within is not None and row["state"] == LeaseState.HELD
            values = {
                "number": row["number"],
                "process": records.write_process(process),
                # What lives on without us is not given up when our sign of life has gone.
                "outlives": row["pulse"] != self._db.pulses.own() or not _ends_with_us(process),
                "grace": grace,
                "deadline": self._clock.uptime() + (ready_within or 0) if watched else None,
                "reason": EndReason.NOT_READY.value if watched else None,
            }
            self._db.run("attach", values)
            return self._lease(lease_id)

    def renew(self, lease_id: str, ttl: float | None) -> Lease:
        """Lift the deadline, or set it ``ttl`` seconds from now."""
        _check_seconds("ttl", ttl)
        with self._db.transaction(self.give_up_at):
            number = self._row_of(lease_id)["number"]
            deadline = None if ttl is None else self._clock.uptime() + ttl
            reason = None if ttl is None else EndReason.EXPIRED.value
            self._db.run("set_deadline", {"number": number, "deadline": deadline, "reason": reason})
            return self._lease(lease_id)

    def park(self, lease_id: str) -> Lease:
        """Give a held lease's slices to the next in line."""
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            if row["state"] == LeaseState.WAITING:
                raise BadRequest("A lease that waits in line holds nothing to park.", "Release it instead.")
            if row["state"] == LeaseState.HELD:
                home = ",".join(part.device.uuid for part in self._devices.read(row["slices"]))
                values = {"number": row["number"], "home": home, "now": self._clock.wall()}
                self._db.run("park", values)
                self._devices.give_back(row["slices"])
                self._serve_line()
            return self._lease(lease_id)

    def resume(self, lease_id: str) -> Lease:
        """Put a parked lease in line for its devices."""
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            if row["state"] == LeaseState.PARKED:
                self._db.run("resume", {"number": row["number"], "turn": self._next_turn()})
                self._serve_line()
            return self._lease(lease_id)

    def release(self, lease_id: str, reason: EndReason) -> None:
        """End the lease if it has not ended yet."""
        with self._db.transaction(self.give_up_at):
            self._release(self._live(lease_id), reason)

    def release_key(self, key: str, reason: EndReason) -> None:
        """End the lease of that key, if there is one."""
        with self._db.transaction(self.give_up_at):
            self._release(self._db.one("lease_by_key", key=key), reason)

    def _release(self, row: sqlite3.Row | None, reason: EndReason) -> None:
        if row is not None:
            self._end(row, reason)
            if row["somebody_waits"]:
                self._serve_line()

    def _end(self, row: sqlite3.Row, reason: EndReason) -> None:
        values = {"number": row["number"], "now": self._clock.wall(), "reason": reason.value}
        self._db.run("remember", values)
        self._db.run("delete_lease", values)
        self._devices.give_back(row["slices"])

    def look(self, at_most_every: float = 0.0) -> None:
        """End every lease whose process is gone or whose deadline has passed.

        With ``at_most_every`` (seconds) nothing is done when any process of
        this machine looked that recently.
        """
        now = self._clock.uptime()
        if at_most_every:
            with self._db.snapshot():
                age = now - self._db.one("looked_at")[0]
            if 0 <= age < at_most_every:
                return
        findings = reclaim.look(self._db, now)
        if findings.dead or findings.overdue or at_most_every:
            with self._db.transaction(self.give_up_at):
                self._db.run("set_looked_at", {"now": now})
                reclaim.reclaim(self._db, findings, now, self._end)
                self._serve_line()


def gone(lease: Lease) -> LeaseGone:
    """Return the error for a lease that has ended."""
    reason = lease.end_reason.value if lease.end_reason else "unknown"
    ended = time.strftime("%H:%M:%S", time.localtime(lease.ended_at))
    return LeaseGone(
        f"The lease on {lease.request} ended at {ended}: {reason}.", "Ask for a new slice.", reason=reason
    )


def _check_seconds(name: str, value: float | None) -> None:
    """Refuse a time that is no time: a deadline that never comes would keep a slice for ever."""
    # Written so that NaN, which compares with nothing, is refused.
    if value is not None and not 0 <= value <= _MOST_SECONDS:
        raise BadRequest(f"{name} is {value} seconds.", f"Accepted: 0 to {_MOST_SECONDS:.0f} seconds.")


def _plain(text: str) -> str:
    """Cut a text that came from outside, and leave out what a file or a terminal could choke on."""
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_TEXT])


def _ends_with_us(process: Process) -> bool:
    """Whether it is this process or its child, which it watches for as long as it lives."""
    try:
        return process.pid == os.getpid() or psutil.Process(process.pid).ppid() == os.getpid()
    except psutil.Error:
        return False


def _number(lease_id: str) -> int | None:
    match = _ID.fullmatch(lease_id)
    return int(match[1]) if match else None


def _waiters(line: Sequence[sqlite3.Row]) -> Iterator[queueing.Waiter]:
    for row in line:
        home = frozenset(row["home"].split(",")) if row["home"] else frozenset()
        yield queueing.Waiter(row["number"], records.read_request(row["request"]), home)
