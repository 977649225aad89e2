"""Which part of a long queue is enough to decide who is granted something now."""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpu_pool.policy import placement
from gpu_pool.policy.fairness import FairShares
from gpu_pool.policy.queue_state import Rules, Shape, Situation, Waiter
from gpu_pool_client import DeviceStatus, SliceRequest

#: Where something fits as often as this, few ask for it, or they would have it.
_MUCH = 64


def room(request: SliceRequest, statuses: Sequence[DeviceStatus], rules: Rules) -> int:
    """Return how many of this request could be granted at most."""
    one, left = replace(request, count=1), list(statuses)
    for found in range(_MUCH):
        parts = placement.place(one, left, rules)
        if parts is None:
            return found
        left = placement.deduct(left, parts)
    return sys.maxsize


def queue_head(
    now: Situation, arrivals: Iterable[tuple[Iterable[Waiter], Mapping[Shape, float]]], most: int
) -> list[Waiter]:
    """Return those of a long queue who come before all others when at most ``most`` can be granted something.

    ``arrivals`` are the waiters that something fits for, by course, in order
    of arrival, with the last arrival of each shape; those of a course have one
    priority, but for some who are in the queue in any case, and nothing
    reserved. They are read only as far as needed. ``now`` has everything but
    the queue.
    """
    shares = FairShares(now)
    return [waiter for course, last in arrivals for waiter in _queue_head(course, last, most, shares)]


def _queue_head(
    arrivals: Iterable[Waiter], last: Mapping[Shape, float], most: int, shares: FairShares
) -> list[Waiter]:
    """Read one course's arrivals until whoever follows comes too late.

    Nobody's turn is before their arrival. Once ``most`` users have had their
    turn with one shape, it fits no more: one of them was refused it, or each was
    granted something. So whoever arrives after these turns comes too late for it.
    """
    found: list[Waiter] = []
    #: By user, the latest turn of those read: their own come one after the other.
    turns: dict[str, float] = {}
    seen: set[tuple[str, Shape]] = set()
    #: By shape, when each user who has it comes to it, the soonest first.
    soonest: dict[Shape, list[float]] = {shape: [] for shape in last}
    latest = math.inf
    for waiter in arrivals:
        if waiter.since > latest:
            break
        found.append(waiter)
        user, shape = waiter.user, waiter.shape
        turns[user] = max(turns.get(user, -math.inf), shares.user_key(waiter)[0])
        if (user, shape) not in seen:
            seen.add((user, shape))
            insort(soonest[shape], turns[user])
            latest = max(_too_late(soonest[each], most, last[each]) for each in last)
    return found


def _too_late(turns: Sequence[float], most: int, last: float) -> float:
    """Return after which arrival a shape is granted no more, or asked for no more."""
    return min(turns[most - 1], last) if len(turns) >= most else last
