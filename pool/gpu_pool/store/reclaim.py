"""Which leases end because their process is gone or their deadline has passed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from gpu_pool.store.database import Database
from gpu_pool.store.lease_table import read_process
from gpu_pool.store.locks import LivenessLocks
from gpu_pool_client import EndReason

#: Seconds by which the pool is later than whoever ends a kernel at the end of its longest
#: lease: a kernel should have ended before its slice is given to another.
_MARGIN: Final = 30.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at all leases found."""

    #: Processes seen dead, as the store writes them.
    dead: frozenset[str] = frozenset()
    #: Whether a deadline has passed.
    overdue: bool = False


def look(database: Database, now: float) -> Findings:
    """Look at every process that keeps a lease alive, without holding up writers."""
    with database.snapshot():
        lives = [row["life"].rpartition(" ") for row in database.run("lives")]
        overdue = database.one("overdue", now=now, margin=_MARGIN) is not None
    dead = frozenset(
        text for text, _, liveness_lock in lives if _is_dead(text, liveness_lock, database.liveness)
    )
    return Findings(dead, overdue)


def _is_dead(text: str, liveness_lock: str, liveness: LivenessLocks) -> bool:
    alive = read_process(text).is_alive()
    if alive is None and liveness_lock:
        # Of another container, say, where only those inside see processes. It is given up
        # when its keeper's sign of life has gone, for then nobody is left there who looks.
        return not liveness.beats(int(liveness_lock))
    return alive is False


def reclaim(
    database: Database, findings: Findings, now: float, end: Callable[[sqlite3.Row, EndReason], None]
) -> None:
    """End what the findings call for, inside the caller's transaction.

    A lease is ended for the exact process that was seen dead, so one that has
    another by now is left alone.
    """
    for row in database.run("overdue", {"now": now, "margin": _MARGIN}).fetchall():
        end(row, EndReason(row["why"]))
    if findings.dead:
        for row in database.run("processes").fetchall():
            _reclaim_lease(database, row, findings.dead, now, end)


def _reclaim_lease(
    database: Database,
    row: sqlite3.Row,
    dead: Collection[str],
    now: float,
    end: Callable[[sqlite3.Row, EndReason], None],
) -> None:
    if (row["process"] or row["keeper"]) not in dead:
        return
    # What the pool itself is ending is not to be restarted.
    grace = row["grace"] if row["process"] and not row["ending"] else 0
    if grace > 0 and read_process(row["keeper"]).is_alive():
        # The promised grace: the holder may attach another process until then.
        values = {"deadline": now + grace, "reason": EndReason.PROCESS_GONE.value}
        database.run("detach", {"number": row["number"], **values})
    else:
        end(row, EndReason.PROCESS_GONE)
