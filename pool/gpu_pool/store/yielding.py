"""Idle kernels that give way to those who wait: what is known of them, and who is asked; see the policy.

Moments of idle kernels are kept by this boot's clock, which nobody sets.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from gpu_pool.policy import yielding
from gpu_pool.policy.yielding import MOST_PARKINGS, HeldKernel
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Row
from gpu_pool.store.lease_table import read_terms
from gpu_pool_client import BadRequest, EndReason

#: Seconds in which a kernel that is asked has parked, or said that it does not. Others are asked then.
_ANSWERS_WITHIN: Final = 60.0
_HOUR: Final = 3_600.0


def note(store: StoreContext, row: Row, since: float | None, worked_at: float | None) -> None:
    """Note since when a lease's kernel has been idle and could be parked, None for not now.

    To be called in a transaction. ``worked_at`` is when it last ran something, None where nobody says.
    """
    if since is not None and not math.isfinite(since):
        raise BadRequest(f"A kernel cannot have been idle since {since}.", "Accepted: Unix seconds.")
    if worked_at is not None:
        store.db.run("has_worked", {"number": row["number"], "at": _by_boot(store, worked_at)})
    since = None if since is None else _by_boot(store, since)
    if since != row["idle_since"]:
        store.db.run("gives_way", {"number": row["number"], "idle_since": since})
        # The session says it because it was asked, or has something to give.
        _ask(store)


def _by_boot(store: StoreContext, unix: float) -> float:
    """Return a moment that is over by this boot's clock."""
    uptime = store.clock.uptime()
    return min(uptime, uptime - (store.clock.wall() - unix))


def parkings(store: StoreContext, row: Row) -> str:
    """Return when a lease was parked for others, as it is written, where it is parked now."""
    return _parkings(store, row, one_more=row["asked_back"] == EndReason.YIELDED)


def note_in_vain(store: StoreContext, row: Row) -> None:
    """Note that a lease was about to be parked for somebody who has gone: it counts as if it had been.

    Else whoever asks and withdraws again and again would have somebody's kernel put aside as often.
    """
    store.db.run("set_parkings", {"number": row["number"], "parkings": _parkings(store, row, one_more=True)})


def _parkings(store: StoreContext, row: Row, *, one_more: bool) -> str:
    now = store.clock.uptime()
    kept = [at for at in json.loads(row["parkings"]) if now - _HOUR <= at <= now]
    if one_more:
        kept.append(now)
    return json.dumps(kept[-MOST_PARKINGS:])


def place(store: StoreContext, row: Row) -> dict[str, Any]:
    """Return since when a parked lease that wants its slices again counts as waiting, and whom it overtakes.

    Only who was parked because somebody waited overtakes anybody.
    """
    now, last = store.clock.wall(), row["overtaken"]
    if row["asked_back"] != EndReason.YIELDED:
        return {"since": now, "overtaken": last}
    newcomers = [(each["number"], each["waiting_since"]) for each in store.db.run("newcomers").fetchall()]
    # Once it has returned, it has overtaken all who were there, and later ones have higher numbers.
    before = [number for number, _ in newcomers if number <= last]
    since, _ = yielding.place_of_return(now, newcomers, before)
    return {"since": since, "overtaken": max([last, *(number for number, _ in newcomers)])}


def ask_back(store: StoreContext, *, at_once: bool = False) -> bool:
    """Ask idle kernels to give way to those who wait, others than those that have not answered.

    Return whether anything has changed. ``at_once`` if whoever asks waits for the answer: a very long
    queue is gone through by the pool, and not for each who joins it.
    """
    with store.db.snapshot():
        may_be_asked = store.db.one("may_be_asked")
        is_long = at_once and store.db.one("count_waiters")[0] > store.queue.long
    if is_long or not (may_be_asked["somebody"] or may_be_asked["is_asked"]):
        return False
    with store.db.transaction(store.give_up_at):
        return _ask(store)


def _ask(store: StoreContext) -> bool:
    uptime = store.clock.uptime()
    unheard = store.db.run("forget_unheard", {"since": uptime - _ANSWERS_WITHIN, "now": uptime}).rowcount
    changed = unheard > 0
    if not store.db.one("may_be_asked")["somebody"]:
        return changed
    held = [_kernel(store, row) for row in store.db.run("idle").fetchall()]
    if not any(yielding.may_yield(kernel, store.clock.wall()) for kernel in held):
        return changed
    now, yielded_to = store.queue.waiting()
    reservations = {waiter.number: waiter.reserved for waiter in now.queue if waiter.reserved}
    for waiter, numbers in yielding.ask_back(now, reservations, held, yielded_to).items():
        for number in numbers:
            store.db.run("ask_for", {"number": number, "waiter": waiter, "now": uptime})
            why = {"reason": EndReason.YIELDED.value, "message": None}
            row = store.db.one("lease_by_number", number=number)
            store.db.audit_buffer.decided("asked-back", row, (), why, asked=False)
            changed = True
    return changed


def _kernel(store: StoreContext, row: Row) -> HeldKernel:
    slices, terms = store.devices.read(row["slices"]), None
    if row["terms"] is not None:
        terms = store.sharing.where_kernels_run(read_terms(row["terms"]), slices)
    return HeldKernel(
        row["number"],
        slices,
        store.clock.wall_at(row["idle_since"]),
        working=False,
        yield_after=terms.yield_after if terms is not None else None,
        returned=row["returned_at"] is not None,
        parkings=tuple(store.clock.wall_at(at) for at in json.loads(row["parkings"])),
        # Also where its user or an administrator asks for it: it goes as soon as it is idle.
        asked=row["asked_back"] is not None,
    )
