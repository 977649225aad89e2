"""The line of waiters in the ledger: served by the pure queue, written down in its order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpu_pool import outlook, queueing
from gpu_pool.clock import Clock
from gpu_pool.courses import Sharing
from gpu_pool.ledger import records
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.devices import DeviceTable
from gpu_pool.ledger.use import UseTable
from gpu_pool.queueing import Decision, Holding, Situation, Waiter
from gpu_pool.rules import Rules
from gpu_pool_client import EndReason, Outlook, Slice

#: Ended leases from which an expected wait is learnt.
_STAYS = 200


class Line:
    """Grants to those whose turn has come, inside the transactions of its caller."""

    def __init__(
        self,
        database: Database,
        devices: DeviceTable,
        use: UseTable,
        rules: Rules,
        sharing: Sharing,
        attach_within: float,
        clock: Clock,
    ) -> None:
        self._db = database
        self._devices = devices
        self._use = use
        self._rules = rules
        self.sharing = sharing
        self._attach_within = attach_within
        self._clock = clock

    def serve(self) -> None:
        """Grant to everybody whose turn has come, and write down in which order the others follow."""
        rows = {row["number"]: row for row in self._db.run("line").fetchall()}
        if not rows:
            return
        now = self._situation(rows.values())
        decision = queueing.decide(now)
        for waiter, parts in decision.grants:
            row = rows.pop(waiter.number)
            self._db.run("grant", {"number": waiter.number, **self.granted(row, parts)})
            self._devices.take(parts)
            waited = {"waited": round(max(0.0, now.now - waiter.since), 3)}
            self._db.trail.decided("granted", row, parts, waited, asked=False)
        if rows:
            self._write_order(now, decision, rows)

    def granted(self, row: records.Row, parts: Sequence[Slice]) -> dict[str, object]:
        """Return what changes in a lease's row when it is granted these slices."""
        uptime = self._clock.uptime()
        longest = self.sharing.courses.get(row["course"], self.sharing.default).longest_lease
        return {
            "slices": self._devices.write(parts),
            "milli": sum(part.milli for part in parts),
            "memory_mib": sum(part.memory_mib for part in parts),
            "now": self._clock.wall(),
            "ends_by": None if longest is None else uptime + max(0.0, longest - row["held_before"]),
            "uptime": uptime,
            "deadline": uptime + self._attach_within,
            "deadline_reason": EndReason.NEVER_ATTACHED.value,
        }

    def explain(self, number: int, place: int) -> Outlook:
        """Say why this lease waits, and for how long it may."""
        return self._outlook(number, place, self._situation(self._db.run("line").fetchall()))

    def forecast(self, row: records.Row) -> Outlook | None:
        """Say what a lease would meet in line that is not there; None if it would be granted at once."""
        rows = self._db.run("line").fetchall()
        number = 1 + max((each["number"] for each in rows), default=0)
        now = self._situation([*rows, {**row, "number": number}])
        if any(waiter.number == number for waiter, _ in queueing.decide(now).grants):
            return None
        places = [waiter.number for waiter in queueing.order(now)]
        return self._outlook(number, places.index(number) + 1, now)

    def _outlook(self, number: int, place: int, now: Situation) -> Outlook:
        stays = [
            outlook.Stay(row["course"], row["milli"], row["held_seconds"])
            for row in self._db.run("stays", {"count": _STAYS}).fetchall()
        ]
        why = outlook.explain(number, now)
        return Outlook(place, why, outlook.expected_wait(number, now, stays))

    def _write_order(self, now: Situation, decision: Decision, rows: Mapping[int, sqlite3.Row]) -> None:
        """Write the places in line of those who still wait, and what is emptied for them."""
        granted = [Holding(w.user, w.course, parts, since=now.now) for w, parts in decision.grants]
        left = [waiter for waiter in now.line if waiter.number in rows]
        after = replace(now, line=left, holdings=[*now.holdings, *granted])
        for turn, waiter in enumerate(queueing.order(after), start=1):
            row, reserved = rows[waiter.number], ",".join(decision.reservations.get(waiter.number, ()))
            if (row["turn"], row["reserved"]) != (turn, reserved):
                self._db.run("set_turn", {"number": waiter.number, "turn": turn, "reserved": reserved})

    def _situation(self, rows: Iterable[records.Row]) -> Situation:
        return Situation(
            [self._waiter(row) for row in rows],
            [self._holding(row) for row in self._db.run("holdings").fetchall()],
            self._devices.open(),
            self._rules,
            self.sharing.policy,
            self._use.usage(),
            self._clock.wall(),
        )

    def _waiter(self, row: records.Row) -> Waiter:
        return Waiter(
            number=row["number"],
            request=records.read_request(row["request"]),
            devices=frozenset(filter(None, (row["home"] or row["within"]).split(","))),
            user=row["user"],
            course=row["course"],
            since=row["waiting_since"],
            priority=self.sharing.priority(row["user"], row["course"]),
            reserved=tuple(filter(None, row["reserved"].split(","))),
        )

    def _holding(self, row: sqlite3.Row) -> Holding:
        ends_by = row["ends_by"]
        if ends_by is not None:
            ends_by += self._clock.wall() - self._clock.uptime()
        return Holding(row["user"], row["course"], self._devices.read(row["slices"]), ends_by, row["held_at"])
