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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import psutil

from gpu_pool import admission, placement, quotas
from gpu_pool.audit import audit_log
from gpu_pool.clock import Clock
from gpu_pool.ledger import reclaim, records
from gpu_pool.ledger.accounts import AccountTable
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.devices import DeviceTable, Others
from gpu_pool.ledger.leases import LeaseTable
from gpu_pool.ledger.line import Line
from gpu_pool.ledger.resizing import Resizing
from gpu_pool.ledger.use import UseTable
from gpu_pool.ledger.versions import VersionTable
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    BadRequest,
    Device,
    DeviceStatus,
    EndReason,
    Holder,
    Lease,
    LeaseState,
    Outlook,
    PoolStatus,
    Process,
    Slice,
    SliceRequest,
    TimedOut,
)
from gpu_pool_client.processes import pid_namespace

if TYPE_CHECKING:
    from gpu_pool.coursefiles import Courses

_KEY: Final = re.compile(r"[!-~]{1,128}")
#: No deadline is set further ahead than this.
_MOST_SECONDS: Final = 86_400.0
#: Rows of history that are read at once.
_MOST_ROWS: Final = 100_000
#: Characters kept of a user's, a course's or a kernel's name.
_MOST_TEXT: Final = 200


class Book:
    """The leases of one pool. Used by one thread at a time.

    ``give_up_at`` (``time.monotonic()``, see ``Database.transaction``) bounds
    how long any decision may wait for others to finish theirs.
    """

    def __init__(self, database: Database, settings: PoolSettings, clock: Clock | None = None) -> None:
        self._db = database
        self._rules = settings.rules
        self._sharing = self._set = settings.sharing
        self._courses: Courses | None = None
        self._most_waiting = settings.max_waiting
        database.trail.log = audit_log(settings.audit_log)
        self._clock = clock or Clock()
        self._devices = DeviceTable(database, self._rules.device_milli)
        self._leases = LeaseTable(database, self._devices, self._sharing, self._clock)
        self._use = UseTable(database, self._sharing.policy, self._clock, settings.term_start)
        self._line = Line(
            database,
            self._devices,
            self._use,
            self._rules,
            self._sharing,
            settings.attach_within,
            self._clock,
        )
        self._resizing = Resizing(database, self._devices, self._use, self._rules, self._sharing, self._clock)
        #: What is measured of the leases.
        self.accounts = AccountTable(database, self._leases, self._devices)
        self.versions = VersionTable(database)
        self.give_up_at: float | None = None

    def follow(self, courses: Courses, *, asked: bool = False) -> None:
        """Follow these course files, beside the settings, from the next decision on.

        ``asked`` if they were changed in the name of whoever asks here.
        """
        if courses is not self._courses:
            if self._courses is not None:
                self._db.trail.courses_changed(self._courses.usable, courses.usable, asked=asked)
            self._courses, self._sharing = courses, courses.sharing(self._set)
            self._leases.sharing = self._line.sharing = self._resizing.sharing = self._sharing

    def register(self, devices: Sequence[Device], seen_from: str | None = None) -> None:
        """Make these the pool's devices. Leases on others live on; nothing new is granted there.

        ``seen_from`` names where devices are seen from; by default it is this process's pid namespace.
        """
        with self._db.snapshot():
            if not self._devices.is_news(devices):
                return
        with self._db.transaction(self.give_up_at):
            self._devices.register(devices, seen_from or pid_namespace())
            self._line.serve()

    def set_others(self, others: Mapping[str, Others]) -> None:
        """Take note of what others than leases have of the devices, by uuid; none of the rest."""
        with self._db.transaction(self.give_up_at):
            if self._devices.set_others(others):
                self._line.serve()

    # -- Asking ------------------------------------------------------------

    def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        check: Callable[[], None] | None = None,
        within: Collection[str] = (),
    ) -> Lease:
        """Grant, or put in line; repeated with the same key, return what became of it.

        ``within`` are the uuids of the devices that it may have; none mean all.
        """
        if not _KEY.fullmatch(key):
            raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
        admission.check_rules(request, self._rules)
        row = self._draft(request, holder, key)
        limits = list(quotas.scopes(self._sharing, row["user"], row["course"]))
        with self._db.transaction(self.give_up_at):
            known, somebody_waits, number = self._db.one("ask", key=key)
            if known:
                return self._leases.by_key(key)
            if check is not None:
                check()
            row["number"], row["id"] = number, f"{number}-{row['id']}"
            row["within"] = ",".join(sorted(within))
            statuses = [s for s in self._devices.open() if not within or s.device.uuid in within]
            parts = None if somebody_waits else placement.place(request, statuses, self._rules)
            if parts is None or limits:
                self._check(request, row, limits)
            if parts is None:
                waiting = self._db.one("waiting_of_user", user=row["user"])[0]
                admission.check_waiting(request, waiting, self._most_waiting)
                self._insert_waiting(row)
                return self._leases.lease(str(row["id"]))
            self._insert_held(row, parts)
        return self._leases.value(row, parts)

    def _draft(self, request: SliceRequest, holder: Holder, key: str) -> dict[str, Any]:
        """Return what is known of a lease's row before any decision."""
        me = Process.current()
        keeper = holder.process or me
        return {
            "id": secrets.token_hex(4),
            "key": key,
            "request": str(request),
            "user": _plain(holder.user),
            # A name that nobody has configured has no weight and no quota of its own.
            "course": self._sharing.course(holder.course).name,
            "kernel": holder.kernel and _plain(holder.kernel),
            "requested_at": self._clock.wall(),
            "keeper": records.write_process(keeper),
            "pulse": self._db.pulses.own() if keeper == me else None,
            "process": None,
            "notice": "",
            "held_before": 0.0,
        }

    def _check(self, request: SliceRequest, row: dict[str, Any], limits: Sequence[quotas.Scope]) -> None:
        """Refuse what can never be granted, and what is over a quota; note how much it is."""
        within = set(filter(None, row["within"].split(",")))
        devices = [s.device for s in self._devices.present() if not within or s.device.uuid in within]
        admission.check(request, devices, self._rules)
        part = next(placement.candidates(request, devices, self._rules))
        row["milli"], row["memory_mib"] = request.count * part.milli, request.count * part.memory_mib
        asked = quotas.Account(row["user"], row["course"], 1, row["milli"], row["memory_mib"])
        accounts = list(self._use.accounts()) if limits else []
        for limit in limits:
            quotas.check(limit, asked, accounts)

    def _insert_held(self, row: dict[str, Any], parts: tuple[Slice, ...]) -> None:
        granted = self._line.granted(row, parts)
        row.update(state="held", turn=None, waiting_since=None, held_at=granted.pop("now"), **granted)
        self._db.run("insert_lease", row)
        self._devices.take(parts)
        self._db.trail.decided("granted", row, parts, {"waited": 0.0})

    def _insert_waiting(self, row: dict[str, Any]) -> None:
        row.update(state="waiting", turn=self._next_turn(), waiting_since=row["requested_at"])
        row.update(slices="[]", held_at=None, ends_by=None, deadline=None, deadline_reason=None)
        self._db.run("insert_lease", row)
        self._db.trail.decided("queued", row)
        self._line.serve()

    def shortage(self, lease_id: str) -> TimedOut:
        """Return the error that says why this lease still waits."""
        with self._db.snapshot():
            row = self._leases.row(lease_id)
            within = row["within"].split(",") if row["within"] else None
            statuses = [s for s in self._devices.open() if within is None or s.device.uuid in within]
            ahead = (self._leases.place(row) or 1) - 1
        request = records.read_request(row["request"])
        message, remedy, largest = admission.shortage(request, statuses, ahead, self._rules)
        return TimedOut(message, remedy, largest_now=largest)

    def explain(self, lease_id: str) -> Outlook:
        """Say why this lease waits."""
        with self._db.snapshot():
            row = self._leases.row(lease_id)
            place = self._leases.place(row)
            if place is None:
                raise BadRequest(f"Lease {lease_id} does not wait: it is {row['state']}.")
            return self._line.explain(row["number"], place)

    def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        check: Callable[[], None] | None = None,
        within: Collection[str] = (),
    ) -> Outlook | None:
        """Say what a request would meet now; see :meth:`request` and ``Pool.forecast``."""
        admission.check_rules(request, self._rules)
        row = self._draft(request, holder, key="")
        row.update(home="", within=",".join(sorted(within)), reserved="", waiting_since=row["requested_at"])
        with self._db.snapshot():
            if check is not None:
                check()
            self._check(request, row, list(quotas.scopes(self._sharing, row["user"], row["course"])))
            return self._line.forecast(row)

    def _next_turn(self) -> int:
        return int(self._db.one("last_turn")[0]) + 1

    # -- Reading -----------------------------------------------------------

    def lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now, ended ones included."""
        with self._db.snapshot():
            return self._leases.lease(lease_id)

    def status(self, url: str) -> PoolStatus:
        """Return everything as one snapshot."""
        with self._db.snapshot():
            return PoolStatus(
                url, tuple(self._devices.statuses()), self._leases.not_waiting(), self._leases.in_line()
            )

    def history(self, since: float, user: str | None = None) -> list[Mapping[str, Any]]:
        """Return the leases, or those of a user, that have ended since then; see ``Pool.history``."""
        name = "history" if user is None else "history_of_user"
        with self._db.snapshot():
            rows = self._db.run(name, {"since": since, "user": user, "most": _MOST_ROWS}).fetchall()
        return [dict(row) for row in reversed(rows)]

    # -- Changing ----------------------------------------------------------

    def attach(self, lease_id: str, process: Process, ready_within: float | None, grace: float) -> Lease:
        """Tie the lease to a process; see ``Pool.attach``."""
        _check_seconds("grace", grace)
        _check_seconds("ready_within", ready_within)
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            # What is not held yet has its time once it is.
            watched = ready_within is not None and row["state"] == LeaseState.HELD
            values = {
                "number": row["number"],
                "process": records.write_process(process),
                # What lives on without us is not given up when our sign of life has gone.
                "outlives": row["pulse"] != self._db.pulses.own() or not _ends_with_us(process),
                "grace": grace,
                "ready_within": None if watched else ready_within,
                "deadline": self._clock.uptime() + (ready_within or 0) if watched else None,
                "reason": EndReason.NOT_READY.value if watched else None,
            }
            self._db.run("attach", values)
            return self._leases.lease(lease_id)

    def renew(self, lease_id: str, ttl: float | None) -> Lease:
        """Lift the deadline, or set it ``ttl`` seconds from now; with nothing attached, only sooner."""
        _check_seconds("ttl", ttl)
        with self._db.transaction(self.give_up_at):
            number = self._leases.row(lease_id)["number"]
            deadline = None if ttl is None else self._clock.uptime() + ttl
            reason = None if ttl is None else EndReason.EXPIRED.value
            self._db.run("set_deadline", {"number": number, "deadline": deadline, "reason": reason})
            return self._leases.lease(lease_id)

    def resize(self, lease_id: str, request: SliceRequest) -> Lease:
        """Change what a lease asks for; see ``Pool.resize``."""
        admission.check_rules(request, self._rules)
        with self._db.transaction(self.give_up_at):
            before = self._leases.row(lease_id)
            self._resizing.resize(before, request)
            row = self._leases.row(lease_id)
            parts = self._devices.read(row["slices"])
            self._db.trail.decided("resized", row, parts, {"before": before["request"]})
            self._line.serve()
            return self._leases.lease(lease_id)

    def park(self, lease_id: str) -> Lease:
        """Give a held lease's slices to the next in line, or leave the line if they were parked before."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            if row["state"] == LeaseState.WAITING and not row["home"]:
                raise BadRequest("A lease that waits in line holds nothing to park.", "Release it instead.")
            if row["state"] != LeaseState.PARKED:
                parts = self._devices.read(row["slices"])
                home = ",".join(part.device.uuid for part in parts) or row["home"]
                self._use.add(row)
                values = {"number": row["number"], "home": home, "now": self._clock.wall()}
                self._db.run("park", values)
                self._devices.give_back(row["slices"])
                self._db.trail.decided("parked", row, parts)
                self._line.serve()
            return self._leases.lease(lease_id)

    def resume(self, lease_id: str) -> Lease:
        """Put a parked lease in line for its devices."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            if row["state"] == LeaseState.PARKED:
                values = {"number": row["number"], "turn": self._next_turn(), "now": self._clock.wall()}
                self._db.run("resume", values)
                self._db.trail.decided("resumed", row)
                self._line.serve()
            return self._leases.lease(lease_id)

    def release(self, lease_id: str, reason: EndReason, *, asked: bool = True) -> None:
        """End the lease if it has not ended yet; ``asked`` unless the pool does it by itself."""
        with self._db.transaction(self.give_up_at):
            self._release(self._leases.live(lease_id), reason, asked=asked)

    def revoke(self, lease_id: str, words: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End somebody's lease, and keep for its holder why."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            told = {"number": row["number"], "id": lease_id, "notice": _plain(words)}
            self._db.run("tell", {**told, "ending": reason.value})
            self._release(self._leases.row(lease_id), reason)

    def release_key(self, key: str, reason: EndReason) -> None:
        """End the lease of that key, if there is one."""
        with self._db.transaction(self.give_up_at):
            self._release(self._db.one("lease_by_key", key=key), reason)

    def _release(self, row: sqlite3.Row | None, reason: EndReason, *, asked: bool = True) -> None:
        if row is not None:
            self._end(row, reason, asked=asked)
            if row["somebody_waits"]:
                self._line.serve()

    def _end(self, row: sqlite3.Row, reason: EndReason, *, asked: bool = False) -> None:
        values = {"number": row["number"], "now": self._clock.wall(), "reason": reason.value}
        self._use.add(row)
        self._db.run("remember", values)
        self._db.run("delete_lease", values)
        self._devices.give_back(row["slices"])
        why = {"reason": row["ending"] or reason.value, "words": row["notice"] or None}
        self._db.trail.decided("ended", row, self._devices.read(row["slices"]), why, asked=asked)

    def drain(self, device: str, drained: bool) -> DeviceStatus:
        """Grant nothing more on that device, or grant again; see ``Pool.drain``."""
        with self._db.transaction(self.give_up_at):
            chosen = admission.find_device(device, [status.device for status in self._devices.statuses()])
            self._devices.drain(chosen.uuid, drained)
            self._db.trail.noted("drained" if drained else "undrained", {"device": chosen.uuid})
            self._line.serve()
            return next(each for each in self._devices.statuses() if each.device == chosen)

    def try_writing(self) -> None:
        """Write something that says nothing. Raises ``LedgerUnusable`` where no decision could be kept."""
        with self._db.transaction(self.give_up_at):
            self._db.run("set_tried_at", {"now": self._clock.wall()})

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
                self._line.serve()


def _check_seconds(name: str, value: float | None) -> None:
    """Refuse a time that is no time: a deadline that never comes would keep a slice for ever."""
    # Written so that NaN, which compares with nothing, is refused.
    if value is not None and not 0 <= value <= _MOST_SECONDS:
        raise BadRequest(f"{name} is {value} seconds.", f"Accepted: 0 to {_MOST_SECONDS:.0f} seconds.")


def _plain(text: str) -> str:
    """Cut a text that came from outside, and leave out what a file or a terminal could choke on."""
    if len(text) <= _MOST_TEXT and text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_TEXT])


def _ends_with_us(process: Process) -> bool:
    """Whether it is this process or its child, which it watches for as long as it lives."""
    try:
        return process.pid == os.getpid() or psutil.Process(process.pid).ppid() == os.getpid()
    except psutil.Error:
        return False
