"""Lines, leases and decisions for tests of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from gpu_pool.policy import placement
from gpu_pool.policy.queue import (
    Decision,
    Holding,
    Policy,
    Situation,
    Usage,
    Waiter,
    decide,
    in_order_of_turn,
)
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import DeviceStatus, Slice, SliceRequest, parse_request
from gpu_pool_client._free import fits
from support.pools import device

RULES = Rules()
V100 = [device(index) for index in range(4)]
HOUR = 3600.0


def waiter(number: int, text: str = "2%", **facts: object) -> Waiter:
    """Return a waiter of this number, which came at that second."""
    return Waiter(number, parse_request(text), **{"since": float(number), **facts})  # type: ignore[arg-type]


def holding(index: int, milli: int, ends_by: float | None = None, **facts: object) -> Holding:
    """Return a lease on one of the devices."""
    part = Slice(V100[index], milli, V100[index].memory_mib * milli // 1000)
    names = {"user": "somebody", "course": "", **facts}
    return Holding(parts=(part,), ends_by=ends_by, **names)  # type: ignore[arg-type]


def statuses(holdings: Sequence[Holding], count: int = 4) -> list[DeviceStatus]:
    """Return the first devices with these leases on them."""
    found = [DeviceStatus(each, 0, 0, 0, 0) for each in V100[:count]]
    for each in holdings:
        found = placement.deduct(found, each.parts)
    return found


def decided(
    line: Sequence[Waiter],
    held: Sequence[Holding] = (),
    count: int = 4,
    now: float = 100.0,
    policy: Policy | None = None,
    usage: Usage | None = None,
) -> Decision:
    """Decide about the queue."""
    found = statuses(held, count)
    return decide(Situation(line, held, found, RULES, policy or Policy(), usage or Usage(), now))


def granted(decision: Decision) -> list[int]:
    """Return the numbers of those who are granted something."""
    return [each.number for each, _ in decision.grants]


def ordered(line: Sequence[Waiter], held: Sequence[Holding] = (), **given: object) -> list[int]:
    """Return the numbers of the queue in order of turn."""
    policy, usage = given.get("policy", Policy()), given.get("usage", Usage())
    found = in_order_of_turn(Situation(line, held, statuses(held), RULES, policy, usage, 100.0))  # type: ignore[arg-type]
    return [each.number for each in found]


# Queues and what is held beside them, made up.
requests = st.one_of(
    st.builds(SliceRequest, count=st.integers(1, 4), milli=st.sampled_from([20, 100, 333, 500, 1000])),
    st.builds(SliceRequest, memory_mib=st.integers(350, 32768)),
)
uuids = [each.uuid for each in V100]
waiters = st.builds(
    Waiter,
    number=st.integers(0, 10_000),
    request=requests,
    devices=st.one_of(st.just(frozenset()), st.sampled_from(uuids).map(lambda uuid: frozenset([uuid]))),
    user=st.sampled_from("abc"),
    course=st.sampled_from(["", "lab", "class"]),
    since=st.floats(0, 4000),
    priority=st.sampled_from([0, 0, 0, 1]),
    reserved=st.one_of(st.just(()), st.lists(st.sampled_from(uuids), max_size=2).map(tuple)),
    batch=st.sampled_from([False, False, True]),
)
lines = st.lists(waiters, max_size=25, unique_by=lambda each: each.number)
occupants = st.builds(
    holding,
    index=st.integers(0, 3),
    milli=st.sampled_from([20, 100, 300, 1000]),
    ends_by=st.one_of(st.none(), st.floats(4000, 20000)),
    user=st.sampled_from("abc"),
    course=st.sampled_from(["", "lab"]),
)


def feasible(holdings: list[Holding]) -> list[Holding]:
    """Leave out what would hold more than there is."""
    kept: list[Holding] = []
    for each in holdings:
        free = {status.device.uuid: status for status in statuses(kept)}
        if all(fits(part, free[part.device.uuid]) for part in each.parts):
            kept.append(each)
    return kept


occupied = st.lists(occupants, max_size=15).map(feasible)
