"""The queue of waiters in the store: served by the pure queue, written down in its order."""

from __future__ import annotations

import functools
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from gpu_pool.clock import Clock
from gpu_pool.policy import forecast as forecasting
from gpu_pool.policy import placement, queue, yielding
from gpu_pool.policy.fairness import courses_in_turn
from gpu_pool.policy.holding_times import FEWEST, MOST_ALIKE
from gpu_pool.policy.queue import Decision, Holding, Situation, Usage, Waiter
from gpu_pool.policy.queue_state import HoldingTime, Rules
from gpu_pool.policy.sharing import Sharing
from gpu_pool.store.database import Database, Row, held_seconds
from gpu_pool.store.device_table import DeviceTable
from gpu_pool.store.lease_table import LeaseTable, read_request
from gpu_pool.store.usage import UsageTotals
from gpu_pool.tuning import Tuning
from gpu_pool_client import Outlook, Slice

#: Ended leases among which it is looked for how long those of each course and size were held.
_MOST_ENDED = 1_000
#: In a longer queue a wait is not foreseen for whoever only asks about it.
_FORESEEABLE = 50


def allowed_devices(row: Row) -> frozenset[str]:
    """Return the uuids of the devices that a waiting lease may have; empty for any."""
    return _uuids(row["home"] or row["within"])


@functools.lru_cache(maxsize=1024)
def _uuids(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


#: What somebody waits for, and where, as the store has it.
_Wanted: TypeAlias = tuple[str, str, str]


def _wanted(row: Row) -> _Wanted:
    return row["request"], row["home"], row["within"]


class QueueForecast(NamedTuple):
    """What a lease would meet in the queue that is not there."""

    outlook: Outlook
    #: Its number in the prospects.
    number: int
    #: None where a wait cannot be foreseen.
    prospects: Situation | None


class StoredQueue:
    """Grants to those whose turn has come, inside the transactions of its caller."""

    def __init__(
        self,
        database: Database,
        devices: DeviceTable,
        leases: LeaseTable,
        use: UsageTotals,
        rules: Rules,
        sharing: Sharing,
        clock: Clock,
        tuning: Tuning,
    ) -> None:
        self._db = database
        self._tuning = tuning
        self._devices = devices
        self._leases = leases
        self._use = use
        self._rules = rules
        self.sharing = sharing
        self._clock = clock

    @property
    def long(self) -> int:
        """Of how many leases a queue is at most that is in order at any time."""
        return self._tuning.long_queue

    def serve(self) -> int:
        """Grant to everybody whose turn has come, and write down in which order the others follow.

        Return how many that were.

        Where very many wait, only grants are made every time. In which order
        the others follow, and what is emptied for them, may then lag by some
        seconds: so long that it takes a twentieth of the time or less.
        """
        count, tuning = self._db.one("count_waiters")[0], self._tuning
        is_long = count > tuning.long_queue
        left = self._db.one("sorted_until")[0] - self._clock.uptime() if is_long else 0.0
        # A moment of another boot may be far ahead.
        if 0 < left <= tuning.longest_queue_pause:
            return self._serve_unsorted()
        if not count:
            return 0
        began = time.thread_time()
        granted = self._serve_sorted()
        if is_long:
            worked = time.thread_time() - began
            pause = min(tuning.longest_queue_pause, tuning.queue_pause * worked)
            self._db.run("set_sorted_until", {"until": self._clock.uptime() + pause})
        return granted

    def _serve_sorted(self) -> int:
        """Grant to everybody whose turn has come, and write down in which order the others follow."""
        rows = {row["number"]: row for row in self._db.run("waiters").fetchall()}
        now = self._situation([self._waiter(row) for row in rows.values()])
        decision = queue.decide(now)
        for waiter, parts in decision.grants:
            del rows[waiter.number]
            self._grant(waiter, parts, now.now)
        if rows:
            self._write_order(now, decision, rows)
        return len(decision.grants)

    def _serve_unsorted(self) -> int:
        """Grant to everybody whose turn has come, and write nothing about the others.

        Most of a long queue ask for the same few things, of which nothing is free: they are left out.
        """
        fits = self._fitting()
        if not fits:
            return 0
        rows = self._db.run("waiters").fetchall()
        waiters = [self._waiter(row) for row in rows if row["reserved"] or _wanted(row) in fits]
        courses = courses_in_turn((row["course"], self._is_batch(row)) for row in rows)
        now = replace(self._situation(waiters), courses=courses)
        grants = queue.grant(now).grants
        for waiter, parts in grants:
            self._grant(waiter, parts, now.now)
        return len(grants)

    def _fitting(self) -> set[_Wanted]:
        """Return what of all that is waited for could be granted if nothing were reserved."""
        statuses, fits = self._devices.open(), set()
        for row in self._db.run("waiting_for").fetchall():
            uuids = allowed_devices(row)
            usable = [each for each in statuses if not uuids or each.device.uuid in uuids]
            if placement.place(read_request(row["request"]), usable, self._rules) is not None:
                fits.add(_wanted(row))
        return fits

    def _grant(self, waiter: Waiter, parts: Sequence[Slice], now: float) -> None:
        row = self._db.one("lease_by_number", number=waiter.number)
        granted = self._leases.granted(row, parts)
        self._db.run("grant", {"number": waiter.number, **granted})
        self._db.run("needs_nobody", {"number": waiter.number})
        self._devices.count("take", parts)
        asked_at = row["resumed_at"] if row["resumed_at"] is not None else waiter.since
        waited = {"waited": round(max(0.0, now - asked_at), 3)}
        self._db.audit_buffer.decided("granted", row, parts, waited, asked=False)

    def why_waiting(self, row: Row, place: int) -> Outlook:
        """Say why this lease waits."""
        waiter = self._waiter(row)
        reserved = [self._waiter(each) for each in self._db.run("reserved").fetchall()]
        waiters = {each.number: each for each in (waiter, *reserved)}
        # Whoever has something reserved is told when it will be free.
        now = replace(self._bare(), queue=list(waiters.values()))
        if waiter.reserved:
            now = replace(now, holdings=self._holdings(), history=self._holding_times())
        why = forecasting.explain(waiter.number, now, self._devices.drained())
        return Outlook(place, why, giving_way=self._db.one("giving_way", number=waiter.number)[0])

    def prospects(self) -> Situation | None:
        """Return what expected waits are worked out from; None for a long queue or without facts."""
        history = self._holding_times()
        if not history or self._db.one("count_waiters")[0] > self._tuning.long_queue:
            return None
        return replace(self._situation(self._waiters()), history=history)

    def queue_head(self, most: int) -> list[Waiter]:
        """Return the first who wait, in the order of their turns."""
        return [self._waiter(row) for row in self._db.run("first_waiters", {"most": most}).fetchall()]

    def waiting(self) -> tuple[Situation, dict[int, float]]:
        """Return the pool with those who wait, and those that idle kernels give way to.

        By number: when each asked. As moments of idle kernels that does not change if the clock is set.
        """
        rows = self._db.run("waiters").fetchall()
        now = self._situation([self._waiter(row) for row in rows])
        yielded_to = {
            waiter.number: now.now if row["queued_at"] is None else self._clock.wall_at(row["queued_at"])
            for waiter, row in zip(now.queue, rows, strict=True)
            if yielding.is_yielded_to(
                self.sharing.course_or_default(waiter.course).yield_after if row["yields"] else None,
                waiter.longest,
            )
        }
        return now, yielded_to

    def foresee(self, row: Row) -> QueueForecast | None:
        """Say what a lease would meet in the queue that is not there; None if it would be granted at once."""
        waiters = self._waiters()
        number = 1 + max((each.number for each in waiters), default=0)
        now = self._situation([*waiters, self._waiter({**row, "number": number})])
        if any(waiter.number == number for waiter, _ in queue.decide(now).grants):
            return None
        places = [waiter.number for waiter in queue.in_order_of_turn(now)]
        told = Outlook(places.index(number) + 1, forecasting.explain(number, now, self._devices.drained()))
        history = [] if len(waiters) > _FORESEEABLE else self._holding_times()
        return QueueForecast(told, number, replace(now, history=history) if history else None)

    def _holding_times(self) -> list[HoldingTime]:
        """Return for how long leases were held that ended lately; none if too few did to tell anything."""
        rows = self._db.run("holding_times", {"most": _MOST_ENDED, "alike": MOST_ALIKE}).fetchall()
        if len(rows) < FEWEST:
            return []
        return [HoldingTime(row["course"], row["milli"], row["held_seconds"]) for row in rows]

    def _write_order(self, now: Situation, decision: Decision, rows: Mapping[int, sqlite3.Row]) -> None:
        """Write the positions in the queue of those who still wait, and what is emptied for them."""
        granted = [Holding(w.user, w.course, parts, since=now.now) for w, parts in decision.grants]
        left = [waiter for waiter in now.queue if waiter.number in rows]
        after = replace(now, queue=left, holdings=[*now.holdings, *granted])
        # The turns are those that there are, or whoever follows somebody that left would get another.
        turns = sorted(row["turn"] for row in rows.values())
        for turn, waiter in zip(turns, queue.in_order_of_turn(after), strict=True):
            row, reserved = rows[waiter.number], ",".join(decision.reservations.get(waiter.number, ()))
            if (row["turn"], row["reserved"]) != (turn, reserved):
                self._db.run("set_turn", {"number": waiter.number, "turn": turn, "reserved": reserved})

    def _waiters(self) -> list[Waiter]:
        return [self._waiter(row) for row in self._db.run("waiters").fetchall()]

    def _situation(self, waiters: Sequence[Waiter]) -> Situation:
        """Return what the queue is told."""
        now = self._bare()
        late = now.now - now.policy.drain_after
        # What is reserved, and for whom, alone depends on how long others held theirs.
        history = self._holding_times() if any(w.reserved or w.since <= late for w in waiters) else []
        usage = self._use.usage()
        return replace(now, queue=waiters, holdings=self._holdings(), usage=usage, history=history)

    def _bare(self) -> Situation:
        """Return a situation without waiters, and without what anybody has or had."""
        statuses, now = self._devices.open(), self._clock.wall()
        return Situation([], [], statuses, self._rules, self.sharing.policy, Usage(), now)

    def _holdings(self) -> list[Holding]:
        return [self._holding(row) for row in self._db.run("holdings").fetchall()]

    def _waiter(self, row: Row) -> Waiter:
        course = self.sharing.course_or_default(row["course"])
        request = read_request(row["request"])
        return Waiter(
            number=row["number"],
            request=request,
            devices=allowed_devices(row),
            user=row["user"],
            course=row["course"],
            since=row["waiting_since"],
            priority=self.sharing.priority(row["user"], row["course"]),
            reserved=tuple(row["reserved"].split(",")) if row["reserved"] else (),
            batch=self._is_batch(row),
            is_parked=bool(row["home"]),
            longest=request.at_most(course.longest_lease),
            is_said=request.length is not None,
        )

    def _is_batch(self, row: Row) -> bool:
        return bool(row["batch"]) or self.sharing.course_or_default(row["course"]).batch

    def _holding(self, row: sqlite3.Row) -> Holding:
        ends_at = None if row["ends_by"] is None else self._clock.wall_at(row["ends_by"])
        is_said = read_request(row["request"]).length is not None
        parts = self._devices.read(row["slices"])
        now, uptime = self._clock.wall(), self._clock.uptime()
        since = now - held_seconds(row["held_at"], row["held_from"], now, uptime)
        return Holding(row["user"], row["course"], parts, ends_at, since, is_said)
