"""Asking for a slice: granted at once, queued or refused; and what whoever asks can be told.

What fits and whose turn it is, pure functions say (``admission``,
``placement``, ``queue``); this module reads what they need and writes what
they decide.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpu_pool.audit import audit_log
from gpu_pool.clock import Clock
from gpu_pool.names import checked_name
from gpu_pool.policy import admission, placement, quotas
from gpu_pool.policy.forecast import ForecastInput
from gpu_pool.settings import PoolSettings
from gpu_pool.store import reclaim
from gpu_pool.store.database import Database
from gpu_pool.store.device_table import DeviceTable, ForeignUse, SeenFrom
from gpu_pool.store.history import HistoryTable
from gpu_pool.store.lease_table import LeaseTable, gone, plain, read_request, write_process
from gpu_pool.store.queue import QueueForecast, StoredQueue, allowed_devices
from gpu_pool.store.resizing import Resizing
from gpu_pool.store.usage import MeasuredUseTable, UsageTotals
from gpu_pool_client import (
    BadRequest,
    Device,
    Holder,
    Lease,
    NeverFits,
    NotAllowed,
    Outlook,
    Process,
    Slice,
    SliceRequest,
    TimedOut,
)
from gpu_pool_client._processes import pid_namespace

if TYPE_CHECKING:
    from gpu_pool.courses import Courses

_KEY: Final = re.compile(r"[!-~]{1,128}")


class RequestStore:
    """The tables of a :class:`gpu_pool.store.leases.LeaseStore`, and its answers to requests for slices."""

    def __init__(self, database: Database, settings: PoolSettings, clock: Clock | None = None) -> None:
        self._db = database
        self._rules = settings.rules
        self._sharing = self._set = settings.sharing
        self._has_quotas = self._sharing.has_quotas
        self._courses: Courses | None = None
        self._most_waiting = settings.max_waiting
        database.audit_buffer.log = audit_log(settings.audit_log)
        self._clock = clock or Clock()
        self._devices = DeviceTable(database, self._rules.device_milli)
        self._leases = LeaseTable(database, self._devices, self._sharing, self._clock, settings.attach_within)
        self._use = UsageTotals(database, self._sharing.policy, self._clock, settings.term_start)
        self._queue = StoredQueue(
            database,
            self._devices,
            self._leases,
            self._use,
            self._rules,
            self._sharing,
            self._clock,
            settings.tuning,
        )
        self._history = HistoryTable(database, self._clock, settings.keep_history)
        self._resizing = Resizing(database, self._devices, self._use, self._rules, self._sharing, self._clock)
        self.measured_use = MeasuredUseTable(database, self._leases, self._devices)
        self.give_up_at: float | None = None

    def follow(self, courses: Courses, *, asked: bool = False) -> None:
        """Follow these course files, beside the settings, from the next decision on.

        ``asked`` if they were changed in the name of whoever asks here.
        """
        if courses is not self._courses:
            if self._courses is not None:
                self._db.audit_buffer.courses_changed(self._courses.usable, courses.usable, asked=asked)
            self._courses, self._sharing = courses, courses.sharing(self._set)
            self._has_quotas = self._sharing.has_quotas
            self._leases.follow(self._sharing)
            self._queue.sharing = self._resizing.sharing = self._sharing

    def register(
        self,
        devices: Sequence[Device],
        seen: SeenFrom | None = None,
        others: Mapping[str, ForeignUse] | None = None,
    ) -> None:
        """Make these the pool's devices. Leases on others live on; nothing new is granted there.

        ``seen`` says what this process sees; by default, all that processes of its pid namespace do.
        Of new ones nothing is granted that ``others`` have, see :meth:`set_others`. Raises
        ``OtherDevices`` where simulated and real devices would mix.
        """
        if any(device.simulated for device in devices):
            self._db.liveness.use_simulated()
        seen = seen or self.seen_from()
        with self._db.snapshot():
            if not self._devices.would_change(devices, seen):
                return
            simulated = self._devices.has_simulated()
        with contextlib.ExitStack() as held:
            alone = simulated and held.enter_context(self._db.liveness.nobody_simulates())
            held.enter_context(self._db.transaction(self.give_up_at))
            self._devices.register(devices, seen, nobody_simulates=alone)
            if others is not None:
                self._devices.set_others(others)
            self._queue.serve()

    @staticmethod
    def seen_from(gpus: str = "", others: Collection[str] = (), *, everything: bool = False) -> SeenFrom:
        """Return what this process sees, where ``gpus`` is a digest of the GPUs that there are."""
        return SeenFrom(f"{pid_namespace()} {gpus}".strip(), others, everything)

    def usable(self, own: Collection[str], seen: SeenFrom, *, limited: bool) -> frozenset[str]:
        """Return the uuids of the pool's devices that are for a process that sees these, and has ``own``.

        Not ``limited``, it may also have those that were found after it had looked for its own.
        """
        with self._db.snapshot():
            present = self._devices.present()
            found = set() if limited else self._devices.seen_from(seen.where)
        return frozenset((found | set(own)) & present.keys())

    def present_devices(self, *, everywhere: bool = True) -> dict[str, Device]:
        """Return the pool's real devices by uuid; else those that were seen from this pid namespace."""
        with self._db.snapshot():
            found = self._devices.present("" if everywhere else pid_namespace())
        return {uuid: device for uuid, device in found.items() if not device.simulated}

    def set_faults(self, faults: Mapping[str, str]) -> None:
        """Note why nothing new can run on these devices, by uuid, empty where it can."""
        with self._db.snapshot():
            known = self._devices.present()
        if any(uuid in known and known[uuid].fault != fault for uuid, fault in faults.items()):
            with self._db.transaction(self.give_up_at):
                if self._devices.set_faults(faults):
                    self._queue.serve()

    def has_simulated(self) -> bool:
        """Whether simulated devices are in the pool."""
        with self._db.snapshot():
            return self._devices.has_simulated()

    def forget_simulated(self) -> None:
        """Take simulated devices from the pool if no process uses them any more, and no lease.

        What is known of leases that have ended is kept.
        """
        with self._db.liveness.nobody_simulates() as alone:
            if alone:
                with self._db.transaction(self.give_up_at):
                    self._devices.forget_simulated()

    def set_others(self, others: Mapping[str, ForeignUse]) -> None:
        """Take note of what others than leases have of the devices, by uuid; none of the rest."""
        with self._db.transaction(self.give_up_at):
            if self._devices.set_others(others):
                self._queue.serve()

    def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        check: Callable[[], None] | None = None,
        within: Collection[str] = (),
        mark: str | None = None,
    ) -> Lease:
        """Grant, or queued; repeated with the same key, return what became of it.

        ``within`` are the uuids of the devices that it may have; none mean all. ``mark``, 8 hexadecimal
        digits, is in the id of a lease that is made now: who asked knows it from one that was there.
        """
        if not _KEY.fullmatch(key):
            raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
        row = self._draft(request, holder, key)
        limits = list(quotas.scopes(self._sharing, row["user"], row["course"])) if self._has_quotas else []
        with self._db.transaction(self.give_up_at):
            known, somebody_waits, number = self._db.one("ask", key=key)
            if known:  # whatever would be said of a new one by now
                return self._leases.by_key(key)
            admission.check_rules(request, self._rules)
            if check is not None:
                check()
            row["number"], row["id"] = number, f"{number}-{mark or os.urandom(4).hex()}"
            row["within"] = ",".join(sorted(within))
            statuses = [
                s
                for s in self._devices.statuses()
                if not s.drained and (not within or s.device.uuid in within)
            ]
            parts = None if somebody_waits else placement.place(request, statuses, self._rules)
            if parts is None or limits:
                self._check(request, row, limits)
            if parts is None:
                self._check_waiting(request, row["user"])
                self._insert_waiting(row)
                return self._leases.lease(str(row["id"]))
            self._insert_held(row, parts)
        return self._leases.value(row, parts)

    def _draft(self, request: SliceRequest, holder: Holder, key: str) -> dict[str, Any]:
        """Return what is known of a lease's row before any decision."""
        me, course = Process.current(), self._sharing.course(holder.course)
        keeper = holder.process or me
        return {
            "key": key,
            "request": str(request),
            "user": checked_name(holder.user),
            # A name that nobody has configured has no weight and no quota of its own.
            "course": course.name,
            "batch": int(holder.batch or course.batch),
            "kernel": holder.kernel and plain(holder.kernel),
            "requested_at": self._clock.wall(),
            "keeper": write_process(keeper),
            "pulse": self._db.liveness.own() if keeper == me else None,
            "process": None,
            "notice": "",
            "asked_back": None,
            "failure": "",
            "held_before": 0.0,
            "used_before": 0.0,
        }

    def _check(self, request: SliceRequest, row: dict[str, Any], limits: Sequence[quotas.Scope]) -> None:
        """Refuse what can never be granted, and what is over a quota; note how much it is."""
        within = set(filter(None, row["within"].split(",")))
        devices = [s.device for s in self._devices.statuses() if not within or s.device.uuid in within]
        admission.check(request, devices, self._rules)
        part = next(placement.candidates(request, devices, self._rules))
        row["milli"], row["memory_mib"] = request.count * part.milli, request.count * part.memory_mib
        asked = quotas.Account(row["user"], row["course"], 1, row["milli"], row["memory_mib"])
        accounts = list(self._use.accounts()) if limits else []
        allowed = quotas.Allowed(request, part.device, self._rules, limits, accounts)
        for limit in limits:
            quotas.check(limit, asked, accounts, allowed)

    def _insert_held(self, row: dict[str, Any], parts: tuple[Slice, ...]) -> None:
        granted = self._leases.granted(row, parts)
        row.update(state="held", turn=None, waiting_since=None, first_held_at=granted["now"])
        row.update(held_at=granted.pop("now"), **granted)
        self._db.run("insert_lease", row)
        self._devices.count("take", parts)
        self._db.audit_buffer.decided("granted", row, parts, {"waited": 0.0})

    def _insert_waiting(self, row: dict[str, Any]) -> None:
        row.update(state="waiting", turn=self._next_turn(), waiting_since=row["requested_at"])
        row.update(slices="[]", first_held_at=None, held_at=None)
        row.update(ends_by=None, terms=None, deadline=None, deadline_reason=None)
        self._db.run("insert_lease", row)
        self._db.audit_buffer.decided("queued", row)
        self._queue.serve()

    def shortage(self, lease_id: str) -> TimedOut:
        """Return the error that says why this lease still waits."""
        with self._db.snapshot():
            row = self._leases.row(lease_id)
            wished = allowed_devices(row)
            statuses = [s for s in self._devices.statuses() if not wished or s.device.uuid in wished]
            ahead = (self._leases.position(row) or 1) - 1
        request = read_request(row["request"])
        drained = [status for status in statuses if status.drained]
        usable = [status for status in statuses if not status.drained]
        message, remedy, largest = admission.shortage(request, usable, ahead, self._rules, drained)
        return TimedOut(message, remedy, largest_now=largest)

    def hopeless(self, devices: Sequence[Device]) -> dict[str, NeverFits]:
        """Return the waiting leases that could never have these devices, by id, each with why."""
        with self._db.snapshot():
            rows = self._db.run("waiters").fetchall()
        found: dict[str, NeverFits] = {}
        known: dict[tuple[str, frozenset[str]], NeverFits | None] = {}
        for row in rows:
            shape = row["request"], frozenset(allowed_devices(row))
            if shape not in known:
                usable = [each for each in devices if not shape[1] or each.uuid in shape[1]]
                known[shape] = self._why_never(read_request(row["request"]), usable)
            error = known[shape]
            if error is not None:
                found[row["id"]] = error
        return found

    def _why_never(self, request: SliceRequest, devices: Sequence[Device]) -> NeverFits | None:
        try:
            admission.check(request, devices, self._rules)
        except NeverFits as error:
            return error
        except NotAllowed:
            return None
        return None

    def explain(self, lease_id: str) -> Outlook:
        """Say why this lease waits."""
        with self._db.snapshot():
            row = self._leases.row(lease_id)
            place = self._leases.position(row)
            reason = reclaim.why_one_is_over(self._db, row, self._clock.uptime())
            if reason is not None:
                raise gone(self._leases.as_ended(row, reason))
            if place is None:
                raise BadRequest(f"Lease {lease_id} does not wait: it is {row['state']}.")
            return self._queue.explain(row, place)

    def prospects(self) -> ForecastInput | None:
        """Return what expected waits are worked out from; None where they are not."""
        with self._db.snapshot():
            return self._queue.prospects()

    def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        check: Callable[[], None] | None = None,
        within: Collection[str] = (),
    ) -> QueueForecast | None:
        """Say what a request would meet now; see :meth:`request` and ``Pool.forecast``."""
        admission.check_rules(request, self._rules)
        row = self._draft(request, holder, key="")
        row.update(home="", within=",".join(sorted(within)), reserved="", waiting_since=row["requested_at"])
        with self._db.snapshot():
            if check is not None:
                check()
            self._check(request, row, list(quotas.scopes(self._sharing, row["user"], row["course"])))
            found = self._queue.forecast(row)
            if found is not None and row["user"]:
                self._check_waiting(request, row["user"])
            return found

    def _check_waiting(self, request: SliceRequest, user: str) -> None:
        waiting = self._db.one("waiting_of_user", user=user)[0]
        admission.check_waiting(request, waiting, self._most_waiting)

    def _next_turn(self) -> int:
        return int(self._db.one("last_turn")[0]) + 1
