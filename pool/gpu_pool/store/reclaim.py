"""Which leases are over because their process is gone or their deadline has passed.

It is judged for whoever reads a lease, and written for good by the pool: both by :func:`why_over`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpu_pool.store.database import Database, Row
from gpu_pool.store.lease_table import read_process
from gpu_pool.store.locks import LivenessLocks
from gpu_pool_client import EndReason

#: Seconds by which the pool is later than whoever ends a kernel at the end of its longest
#: lease: a kernel should have ended before its slice is given to another.
_MARGIN: Final = 30.0
#: Ends the lease of a row.
End: TypeAlias = Callable[[sqlite3.Row, EndReason], None]


@dataclass(frozen=True, slots=True)
class Findings:
    """What was seen of all leases at one time."""

    #: Processes seen dead, as the store writes them.
    dead: frozenset[str] = frozenset()
    #: Whether a deadline has passed.
    overdue: bool = False

    def __bool__(self) -> bool:
        return bool(self.dead) or self.overdue


def look(database: Database, now: float) -> Findings:
    """Look at every process that keeps a lease alive, without holding up writers."""
    with database.snapshot():
        lives = [row["life"].rpartition(" ") for row in database.run("lives")]
        overdue = database.one("overdue", now=now, margin=_MARGIN) is not None
    dead = frozenset(
        text for text, _, liveness_lock in lives if _is_dead(text, liveness_lock, database.liveness)
    )
    return Findings(dead, overdue)


def over(database: Database, findings: Findings, now: float) -> dict[str, EndReason]:
    """Return why leases are over that the findings call for, by id: what :func:`end_gone` and others end."""
    found: dict[str, EndReason] = {}
    if findings.overdue:
        for row in _overdue(database, now):
            found[row["id"]] = EndReason(row["why"])
    if findings.dead:
        for row in database.run("processes").fetchall():
            reason = why_over(row, findings.dead, now)
            if reason is not None:
                found[row["id"]] = reason
    return found


def why_one_is_over(database: Database, row: Row, now: float) -> EndReason | None:
    """Return the same for the lease of one row, after a look at its process."""
    text = row["process"] or row["keeper"]
    liveness_lock = "" if row["pulse"] is None else str(row["pulse"])
    is_dead = _is_dead(text, liveness_lock, database.liveness)
    return why_over(row, {text} if is_dead else (), now)


def why_over(row: Row, dead: Collection[str], now: float) -> EndReason | None:
    """Return why the lease of a row is over, where these processes are dead; None where it is not."""
    if row["deadline"] is not None and row["deadline"] <= now:
        return EndReason(row["deadline_reason"])
    if row["turn"] is None and row["ends_by"] is not None and row["ends_by"] + _MARGIN <= now:
        return EndReason.TOO_LONG
    if (row["process"] or row["keeper"]) not in dead or _has_grace(row):
        return None
    return EndReason.PROCESS_GONE


def _has_grace(row: Row) -> bool:
    """Whether the holder, who lives, may attach another process in place of the one that is dead."""
    # What the pool itself is ending is not to be restarted.
    grace = row["grace"] if row["process"] and not row["ending"] else 0
    return grace > 0 and bool(read_process(row["keeper"]).is_alive())


def end_overdue(database: Database, now: float, end: End) -> None:
    """End what is overdue, inside the caller's transaction."""
    for row in _overdue(database, now):
        end(row, EndReason(row["why"]))


def end_gone(database: Database, dead: Collection[str], now: float, end: End) -> None:
    """End what was kept alive by processes that are dead, inside the caller's transaction.

    A lease is ended for the exact process that was seen dead, so one that has
    another by now is left alone. Where its holder may attach another one, that has to be within the grace.
    """
    for row in database.run("processes").fetchall():
        if (row["process"] or row["keeper"]) not in dead:
            continue
        reason = why_over(row, dead, now)
        if reason is not None:
            end(row, reason)
        else:
            values = {"deadline": now + row["grace"], "reason": EndReason.PROCESS_GONE.value}
            database.run("detach", {"number": row["number"], **values})


def _overdue(database: Database, now: float) -> list[sqlite3.Row]:
    return database.run("overdue", {"now": now, "margin": _MARGIN}).fetchall()


def _is_dead(text: str, liveness_lock: str, liveness: LivenessLocks) -> bool:
    alive = read_process(text).is_alive()
    if alive is None and liveness_lock:
        # Of another container, say, where only those inside see processes. It is given up
        # when its keeper's sign of life has gone, for then nobody is left there who looks.
        return not liveness.beats(int(liveness_lock))
    return alive is False
