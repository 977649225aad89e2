"""Which leases are over because their process is gone or their deadline has passed.

It is judged for whoever reads a lease, and written for good by the pool: both by :func:`why_over`. What
ends leases and serves the queue by itself is here, each a transaction of the store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database, Row
from gpu_pool.store.lease_table import read_process
from gpu_pool.store.locks import LivenessLocks
from gpu_pool_client import EndReason

#: Seconds by which the pool is later than whoever ends a kernel at the end of its longest
#: lease: a kernel should have ended before its slice is given to another.
_MARGIN: Final = 30.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What was seen of all leases at one time."""

    #: Processes seen dead, as the store writes them.
    dead: frozenset[str] = frozenset()
    #: Whether a deadline has passed.
    overdue: bool = False
    #: Whether there is no lease that has not ended, and whether anybody is in the queue.
    nothing_lives: bool = False
    somebody_waits: bool = False

    def __bool__(self) -> bool:
        return bool(self.dead) or self.overdue


def over(database: Database, findings: Findings, now: float) -> dict[str, EndReason]:
    """Return why leases are over that the findings call for, by id: what the pool and others end."""
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


def _overdue(database: Database, now: float) -> list[sqlite3.Row]:
    return database.run("overdue", {"now": now, "margin": _MARGIN}).fetchall()


def _is_dead(text: str, liveness_lock: str, liveness: LivenessLocks) -> bool:
    alive = read_process(text).is_alive()
    if alive is None and liveness_lock:
        # Of another container, say, where only those inside see processes. It is given up
        # when its keeper's sign of life has gone, for then nobody is left there who looks.
        return not liveness.beats(int(liveness_lock))
    return alive is False


def end(store: StoreContext, row: sqlite3.Row, reason: EndReason, *, asked: bool = False) -> None:
    """End the lease of a row, inside the caller's transaction; ``asked`` if somebody asked for it."""
    parts = store.devices.read(row["slices"])
    store.use.add(row)
    store.history.add(row, reason)
    store.db.run("needs_nobody", {"number": row["number"]})
    store.devices.count("give_back", parts)
    why = {"reason": row["ending"] or reason.value, "message": row["notice"] or None}
    store.db.audit_buffer.decided("ended", row, parts, why, asked=asked)


def leads(store: StoreContext, unless_within: float) -> bool:
    """Whether it is for this process to end what is over, and to serve the queue as time passes.

    It is where no other process does, or where the one that does has not for so many seconds: it
    may stand still.
    """
    if store.db.liveness.reconciles():
        return True
    with store.db.snapshot():
        age = store.clock.uptime() - store.db.one("looked_at")[0]
    return not 0 <= age < unless_within


def find_over(store: StoreContext) -> Findings:
    """Return which processes that keep leases alive are gone, and whether deadlines have passed.

    Every such process is looked at, without holding up writers.
    """
    liveness = store.db.liveness
    with store.db.snapshot():
        lives = [row["life"].rpartition(" ") for row in store.db.run("lives")]
        overdue = store.db.one("overdue", now=store.clock.uptime(), margin=_MARGIN) is not None
        somebody_waits = bool(store.db.one("count_waiters")[0])
    dead = frozenset(text for text, _, liveness_lock in lives if _is_dead(text, liveness_lock, liveness))
    return Findings(dead, overdue, not lives, somebody_waits)


def end_gone(store: StoreContext, dead: Collection[str]) -> None:
    """End what was kept alive by processes that were seen dead, as :func:`find_over` names them."""
    with store.db.transaction(store.give_up_at):
        _end_dead(store, dead)


def end_overdue(store: StoreContext) -> None:
    """End what is past its deadline, or its longest time."""
    with store.db.transaction(store.give_up_at):
        _end_late(store)


def serve_queue(store: StoreContext, *, tell: bool = True) -> bool:
    """Grant to those whose turn has come, as time decides too; return whether there was any.

    ``tell`` if other processes are to know by it that this one leads.
    """
    with store.db.transaction(store.give_up_at):
        if tell:
            store.db.run("set_looked_at", {"now": store.clock.uptime()})
        return store.queue.serve() > 0


def end_over(store: StoreContext) -> None:
    """End what is over, and serve the queue if anything was: before whoever asks has to wait."""
    findings = find_over(store)
    if findings:
        with store.db.transaction(store.give_up_at):
            _end_late(store)
            _end_dead(store, findings.dead)
            store.queue.serve()


def _end_late(store: StoreContext) -> None:
    for row in _overdue(store.db, store.clock.uptime()):
        end(store, row, EndReason(row["why"]))


def _end_dead(store: StoreContext, dead: Collection[str]) -> None:
    """End what was kept alive by processes that are dead.

    A lease is ended for the exact process that was seen dead, so one that has
    another by now is left alone. Where its holder may attach another one, that has to be within the grace.
    """
    now = store.clock.uptime()
    for row in store.db.run("processes").fetchall():
        if (row["process"] or row["keeper"]) not in dead:
            continue
        reason = why_over(row, dead, now)
        if reason is not None:
            end(store, row, reason)
        else:
            values = {"deadline": now + row["grace"], "reason": EndReason.PROCESS_GONE.value}
            store.db.run("detach", {"number": row["number"], **values})
