"""Orders of the queue to compare: ours, and the three that one would write first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpu_pool.policy import placement
from gpu_pool.policy.queue import Decision, Situation, Waiter, decide

#: A rule that grants: called as ``decide`` is.
Order = Callable[[Situation], Decision]


def strict(now: Situation) -> Decision:
    """First come, first served: nobody passes anybody."""
    return _in_order(now.queue, now, stop=True)


def backfill(now: Situation) -> Decision:
    """First come, first served, passing over whoever cannot be placed now."""
    return _in_order(now.queue, now)


def smallest_first(now: Situation) -> Decision:
    """Those who ask for least first, then first come, first served."""

    def size(waiter: Waiter) -> int:
        return waiter.request.count * (waiter.request.milli or waiter.request.memory_mib or 0)

    return _in_order(sorted(now.queue, key=size), now)


def _in_order(queue: Iterable[Waiter], now: Situation, *, stop: bool = False) -> Decision:
    """Grant in this order; a waiter who cannot be placed is passed over, or stops all behind it."""
    free, grants, refused = list(now.statuses), [], set()
    for waiter in queue:
        parts = None if waiter.request in refused else placement.place(waiter.request, free, now.rules)
        if parts is not None:
            free = placement.deduct(free, parts)
            grants.append((waiter, parts))
        elif stop:
            break
        else:
            refused.add(waiter.request)
    return Decision(tuple(grants), {})


#: By name, ours first.
ORDERS: Final[Mapping[str, Order]] = {
    "fair": decide,
    "strict order": strict,
    "smallest first": smallest_first,
    "backfill": backfill,
}
