"""What everybody has used: as granted, for fairness and quotas; as measured; and as kept of ended leases."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.policy.queue import Policy, Usage, faded_use
from gpu_pool.policy.quotas import Account
from gpu_pool.store.database import Database, Row, held_seconds
from gpu_pool.store.device_table import DeviceTable
from gpu_pool.store.lease_table import LeaseTable, read_failure
from gpu_pool_client import Device, EndedLease, EndReason, Lease, LeaseState

_WEEK: Final = 7 * 86_400
#: The Unix epoch was a Thursday.
_FIRST_MONDAY: Final = 4 * 86_400


class UsageTotals:
    """What everybody has used, kept so that fairness and quotas need not read the history.

    Reads and writes it inside the transactions of its caller. Times are Unix seconds.
    """

    def __init__(self, database: Database, policy: Policy, clock: Clock, term_began: float) -> None:
        self._db = database
        self._policy = policy
        self._clock = clock
        self._term_began = term_began

    def add(self, lease: Row) -> None:
        """Count what a lease has used since it was granted, as it ends or is parked."""
        if lease["held_at"] is None:
            return
        times = self._times()
        now, milli = times["now"], lease["milli"]
        since = now - held_seconds(lease["held_at"], lease["held_from"], now, self._clock.uptime())
        used = {
            "by_course": faded_use(milli, since, now, now, self._policy.course_half_life),
            "by_user": faded_use(milli, since, now, now, self._policy.user_half_life),
            "in_week": milli * max(0.0, now - max(since, times["week_began"])),
            "in_term": milli * max(0.0, now - max(since, times["term_began"])),
        }
        values = {"course": lease["course"], "user": lease["user"], **used, **times}
        self._db.run("add_use", values)
        self._db.run("add_week_use", values)
        self._db.run("add_course_use", values)

    def usage(self) -> Usage:
        """Return what the queue compares courses and users by."""
        times = self._times()
        courses = self._db.run("course_uses_now", times).fetchall()
        users = self._db.run("user_uses_now", times).fetchall()
        return Usage(
            {row["course"]: row["by_course"] for row in courses},
            {(row["course"], row["user"]): row["by_user"] for row in users},
        )

    def accounts(self) -> Iterator[Account]:
        """Yield what quotas count: what is held, parked or waited for, and what was used before."""
        times = self._times()
        for row in self._db.run("accounts", {**times, "uptime": self._clock.uptime()}).fetchall():
            yield Account(**dict(row))
        for course, user, in_week, in_term in self._db.run("uses_now", times).fetchall():
            yield Account(user, course, in_week=in_week, in_term=in_term)

    def _times(self) -> dict[str, float]:
        now = self._clock.wall()
        return {
            "now": now,
            # Last Monday's midnight, UTC: the same in every process.
            "week_began": now - (now - _FIRST_MONDAY) % _WEEK,
            "term_began": self._term_began,
            "course_half_life": self._policy.course_half_life,
            "user_half_life": self._policy.user_half_life,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What a lease was seen to use in some time. Memory is that on one device, as what is granted is."""

    #: The most memory in use on one device at once; None where that was not known.
    peak_mib: int | None = None
    #: Memory times the time for which it was known, and that time, over all devices.
    mib_seconds: float = 0.0
    memory_seconds: float = 0.0
    #: Time with at least one process on a device, over all devices.
    device_seconds: float = 0.0


@dataclass(slots=True)
class UseTally:
    """What one lease has used since it was last written down; see :class:`Measured`."""

    peak_mib: int | None = None
    mib_seconds: float = 0.0
    memory_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, memory_mib: int | None, seconds: float) -> None:
        """Count what is in use of one device, for so many seconds; None where that is not known."""
        self.device_seconds += seconds
        if memory_mib is not None:
            self.peak_mib = memory_mib if self.peak_mib is None else max(self.peak_mib, memory_mib)
            self.mib_seconds += memory_mib * seconds
            self.memory_seconds += seconds

    def measured(self) -> Measured:
        """Return it as it is written down."""
        return Measured(self.peak_mib, self.mib_seconds, self.memory_seconds, self.device_seconds)


class MeasuredUseTable:
    """Reads what is held, and adds what was measured of it. Each call is a transaction of its own."""

    def __init__(self, database: Database, leases: LeaseTable, devices: DeviceTable) -> None:
        self._db = database
        self._leases = leases
        self._devices = devices
        self._known: tuple[list[Device], list[tuple[object, ...]]] | None = None
        self._held: tuple[Lease, ...] = ()

    def held(self) -> tuple[Lease, ...]:
        """Return the held leases, oldest first: the very same tuple while nothing about them has changed."""
        with self._db.snapshot():
            devices = [status.device for status in self._devices.statuses(with_gone=True)]
            known = devices, [tuple(row) for row in self._db.run("held").fetchall()]
            if known != self._known:
                leases = self._leases.not_waiting()
                self._known = known
                self._held = tuple(lease for lease in leases if lease.state is LeaseState.HELD)
        return self._held

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the pool."""
        with self._db.snapshot():
            return tuple(status.device for status in self._devices.statuses())

    def add(self, measured: Mapping[str, Measured]) -> None:
        """Add what was measured to these leases, by id, also to those that have ended meanwhile."""
        with self._db.transaction():
            for lease_id, each in measured.items():
                values = {
                    "number": int(lease_id.partition("-")[0]),
                    "id": lease_id,
                    "peak_mib": each.peak_mib,
                    "mib_seconds": each.mib_seconds,
                    "memory_seconds": each.memory_seconds,
                    "device_seconds": each.device_seconds,
                }
                if not self._db.run("add_to_lease", values).rowcount:
                    self._db.run("add_to_history", values)


#: Leases that are read one by one at once, and by one user of theirs: nobody else is served meanwhile.
MOST_ROWS: Final = 100_000
#: It is also what is kept one by one of each user.
MOST_OF_USER: Final = 10_000
#: Rows that one end moves into the sums: more than it adds.
_AT_AN_END: Final = 4
#: Rows that a service moves in one transaction, some milliseconds' work.
AT_A_TIME: Final = 500
#: The latest ends that are kept one by one until they are counted, and the place where nobody counts them.
_MOST_UNCOUNTED: Final = 10_000
_NOBODY_COUNTS: Final = 1 << 62
#: Users whose rows are counted in memory.
_MOST_KNOWN: Final = 4_096


class HistoryTable:
    """What is kept of leases that have ended: one by one for some time, and as sums for good.

    Every end moves a few old rows into the sums, and a service does so by itself, so that no
    transaction has much of it to do, and the history of somebody who asks without end stays small.
    Reads and writes inside the transactions and snapshots of its caller.
    """

    def __init__(self, database: Database, clock: Clock, keep: float) -> None:
        self._db = database
        self._clock = clock
        #: Seconds for which leases are kept one by one.
        self._keep = keep
        #: How many rows a user has: counted once, and then with each end that this process records.
        self._rows: dict[str, int] = {}
        #: Up to which place in the order of ends these were counted, by whoever counts them in this process.
        self._counted = _NOBODY_COUNTS

    def add(self, lease: sqlite3.Row, reason: EndReason) -> None:
        """Keep a lease that ends now, which is then in the history alone; and keep less of older ones."""
        times = {"now": self._clock.wall(), "uptime": self._clock.uptime()}
        values = {"number": lease["number"], "reason": reason.value, **times}
        self._db.run("remember", values)
        self._db.run("delete_lease", values)
        self.forget(_AT_AN_END)
        self._forget_surplus(lease["user"])

    def forget(self, most: int | None = None) -> int:
        """Move up to so many leases into the sums that ended too long ago; return how many those were."""
        return self._sum_up("expired", {"before": self._clock.wall() - self._keep, "most": most or AT_A_TIME})

    def _forget_surplus(self, user: str) -> None:
        if user not in self._rows and len(self._rows) >= _MOST_KNOWN:
            self._rows.clear()
        rows = self._rows.get(user, -1) + 1 or int(
            self._db.one("history_rows_of_user", user=user, most=MOST_OF_USER + _AT_AN_END)[0]
        )
        if rows > MOST_OF_USER:
            rows -= self._sum_up("oldest_of_user", {"user": user, "most": _AT_AN_END})
        self._rows[user] = rows

    def _sum_up(self, query: str, values: Mapping[str, object]) -> int:
        places = {"counted": self._counted, "uncounted": _MOST_UNCOUNTED}
        numbers = [{"number": row["number"]} for row in self._db.run(query, {**values, **places}).fetchall()]
        for number in numbers:
            self._db.run("add_to_past_use", number)
            self._db.run("delete_from_history", number)
        return len(numbers)

    def read(self, since: float, user: str | None) -> list[EndedLease]:
        """Return what has ended since then, of one user or of all: the last one by one, before them sums."""
        of_user, most = ("", MOST_ROWS) if user is None else ("_of_user", MOST_OF_USER)
        values = {"since": since, "user": user, "most": most}
        rows = self._db.run(f"history{of_user}", values).fetchall()
        sums = self._db.run(f"past_use{of_user}", values).fetchall()
        if len(rows) == most:
            first = {"before": rows[-1]["ended_at"], "number": rows[-1]["number"]}
            sums += self._db.run("sums_of_history", {**values, **first}).fetchall()
        found = [*map(_sum, sums), *map(_row, reversed(rows))]
        return sorted(found, key=lambda each: each.ended_at) if sums else found

    def ended_after(self, place: int, since: float) -> tuple[list[EndedLease], int]:
        """Return what has ended after a place in the order of ends, and not before a time, Unix seconds.

        It comes in that order, at most :data:`MOST_ROWS`, with the place from which the next call goes on.
        The first call is from 0. What a call asks for is kept one by one until a later one.
        """
        self._counted = place
        rows = self._db.run("ended_after", {"place": place, "since": since, "most": MOST_ROWS}).fetchall()
        last = rows[-1]["place"] if len(rows) == MOST_ROWS else int(self._db.one("last_end")[0])
        return [_row(row) for row in rows], last


def _row(row: sqlite3.Row) -> EndedLease:
    touched = None if row["touched"] is None else bool(row["touched"])
    failure = read_failure(row["failure"]) if row["failure"] else None
    fields = {**row, "failure": failure, "touched": touched}
    del fields["number"]
    fields.pop("place", None)
    return EndedLease(**fields)


def _sum(row: sqlite3.Row) -> EndedLease:
    touched = None if row["touched"] < 0 else bool(row["touched"])
    return EndedLease(**{**row, "id": "", "request": "", "milli": 0, "kernel": None, "touched": touched})
