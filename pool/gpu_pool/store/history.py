"""What is kept of leases that have ended: one by one for some time, and as sums for good.

Every end moves a few old rows into the sums, and a service does so by itself, so that no
transaction has much of it to do, and the history of somebody who asks without end stays small.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.store.database import Database
from gpu_pool.store.lease_table import read_failure
from gpu_pool_client import EndedLease, EndReason

#: Leases that are read one by one at once, and by one user of theirs: nobody else is served meanwhile.
MOST_ROWS: Final = 100_000
#: It is also what is kept one by one of each user.
MOST_OF_USER: Final = 10_000
#: Rows that one end moves into the sums: more than it adds.
_AT_AN_END: Final = 4
#: Rows that a service moves in one transaction, some milliseconds' work.
AT_A_TIME: Final = 500
#: Users whose rows are counted in memory.
_MOST_KNOWN: Final = 4_096


class HistoryTable:
    """Reads and writes it, inside the transactions and snapshots of its caller."""

    def __init__(self, database: Database, clock: Clock, keep: float) -> None:
        self._db = database
        self._clock = clock
        #: Seconds for which leases are kept one by one.
        self._keep = keep
        #: How many rows a user has: counted once, and then with each end that this process records.
        self._rows: dict[str, int] = {}

    def add(self, lease: sqlite3.Row, reason: EndReason) -> None:
        """Keep a lease that ends now, which is then in the history alone; and keep less of older ones."""
        values = {"number": lease["number"], "now": self._clock.wall(), "reason": reason.value}
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
        numbers = [{"number": row["number"]} for row in self._db.run(query, values).fetchall()]
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


def _row(row: sqlite3.Row) -> EndedLease:
    touched = None if row["touched"] is None else bool(row["touched"])
    failure = read_failure(row["failure"]) if row["failure"] else None
    fields = {**row, "failure": failure, "touched": touched}
    del fields["number"]
    return EndedLease(**fields)


def _sum(row: sqlite3.Row) -> EndedLease:
    touched = None if row["touched"] < 0 else bool(row["touched"])
    return EndedLease(**{**row, "id": "", "request": "", "milli": 0, "kernel": None, "touched": touched})
