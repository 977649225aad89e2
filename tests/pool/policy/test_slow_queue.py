"""The queue decides as a slow version of it does, which tries everybody and adds everything up each time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from gpu_pool.policy import placement
from gpu_pool.policy.holding_times import FEWEST, HoldingTimes
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
from gpu_pool.policy.queue_state import HoldingTime, Rules
from gpu_pool_client import DeviceStatus, parse_request
from support.pools import device
from support.slow_queue import decide_slowly, order_slowly

COURSES, USERS = ("", "lab", "class"), "abc"
#: Two machines of four V100, one of which is over-granted; one of two A100, whose slices have one size each;
#: two MIG instances.
DEVICES = [
    *(device(index, node="one" if index < 4 else "two") for index in range(8)),
    *(device(index, model="A100-SXM4-40GB", memory_mib=40960, one_size=True) for index in (8, 9)),
    *(device(index, memory_mib=5120, milli=142, mig_profile="1g.5gb") for index in (10, 11)),
]
SIZES = ["2%", "10%", "50%", "81%", "1", "2", "4", "2x50%", "6GiB", "35GiB", "2% for 20min", "1 for 1h"]
SIZES += ["1 model=A100", "4 for 2h", "10% model=V100", "5GiB"]
lengths = st.one_of(st.none(), st.sampled_from([60.0, 1200.0, 3600.0, 4 * 3600.0]))
waiters = st.builds(
    Waiter,
    number=st.integers(0, 10_000),
    # Equal ones are often not the same object.
    request=st.sampled_from(SIZES).map(lambda text: replace(parse_request(text))),
    devices=st.sampled_from([frozenset[str]()] * 7 + [frozenset([DEVICES[0].uuid])]),
    user=st.sampled_from(USERS),
    course=st.sampled_from(COURSES),
    since=st.integers(0, 20).map(lambda each: 500.0 * each),
    priority=st.sampled_from([0, 0, 0, 0, 1]),
    batch=st.sampled_from([False, False, False, True]),
    longest=lengths,
    is_said=st.booleans(),
)
past = st.builds(
    HoldingTime, st.sampled_from(COURSES), st.sampled_from([20, 100, 1000, 4000]), st.floats(60, 2e4)
)
usages = st.builds(
    Usage,
    st.dictionaries(st.sampled_from(COURSES), st.floats(0, 2e6)),
    st.dictionaries(st.tuples(st.sampled_from(COURSES), st.sampled_from(USERS)), st.floats(0, 2e6)),
)
weights = st.dictionaries(st.sampled_from(COURSES), st.sampled_from([0.0, 1.0, 3.0]))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Return a pool, who wait for it, and what earlier ones of them were granted."""
    devices = draw(st.lists(st.sampled_from(DEVICES), min_size=1, unique_by=lambda each: each.uuid))
    statuses = [DeviceStatus(each, 0, 0, 0, 0, 1200 if each.index == 3 else 1000) for each in devices]
    queue = draw(st.lists(waiters, max_size=30, unique_by=lambda each: each.number))
    policy, history = Policy(draw(weights)), draw(st.lists(past, max_size=30))
    first = Situation(draw(st.lists(waiters, max_size=12)), (), statuses, Rules(), policy, Usage(), 0.0)
    held = []
    for each in first.queue:
        parts = placement.place(each.request, statuses, Rules())
        if parts is not None:
            statuses = placement.deduct(statuses, parts)
            ends_by = None if each.longest is None else 10_000.0 + each.longest
            held.append(Holding(each.user, each.course, parts, ends_by, each.since, each.is_said))
    shut = draw(st.sampled_from([None, None, *devices]))
    statuses = [replace(each, drained=each.device is shut) for each in statuses]
    return replace(
        first,
        queue=queue,
        holdings=held,
        statuses=statuses,
        usage=draw(usages),
        now=10_000.0,
        history=history,
    )


def after(now: Situation, decision: Decision, ended: int) -> Situation:
    """Return the situation a while later, when one lease has ended."""
    granted = {waiter.number for waiter, _ in decision.grants}
    statuses, held = list(now.statuses), list(now.holdings)
    for each, parts in decision.grants:
        statuses = placement.deduct(statuses, parts)
        held.append(Holding(each.user, each.course, parts, None, now.now))
    if held:
        statuses = placement.give_back(statuses, held.pop(ended % len(held)).parts)
    kept = decision.reservations
    queue = [
        replace(each, reserved=kept.get(each.number, ())) for each in now.queue if each.number not in granted
    ]
    return replace(now, queue=queue, holdings=held, statuses=statuses, now=now.now + 300.0)


@given(situations(), st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_decisions_are_those_of_a_slow_queue(now: Situation, ends: list[int]) -> None:
    for ended in ends:
        decision = decide(now)
        event(f"granted {min(3, len(decision.grants))}, reserved {bool(decision.reservations)}")
        assert decision == decide_slowly(now)
        now = after(now, decision, ended)


@given(situations())
def test_turns_are_those_of_a_slow_queue(now: Situation) -> None:
    assert in_order_of_turn(now) == order_slowly(now)


@given(st.lists(past, max_size=40), situations(), st.floats(0, 2e4), st.floats(0, 1))
def test_what_is_known_is_that_of_the_narrowest_kind(
    ended: list[HoldingTime], now: Situation, age: float, part: float
) -> None:
    times = HoldingTimes(ended, now.holdings, now.now)
    for course in COURSES:
        for milli in (20, 1000):
            narrowing = [
                ([e for e in ended if is_kind(e)], [h for h in now.holdings if is_kind(h)])
                for is_kind in (
                    lambda each, course=course, milli=milli: (each.course, each.milli) == (course, milli),
                    lambda each, course=course: each.course == course,
                    lambda each: True,
                )
            ]
            alike = next((each for each in narrowing if len(each[0]) >= FEWEST), narrowing[-1])
            # As those of one course, none of which has the size that is asked for.
            same = [replace(each, course="x", milli=2) for each in alike[0]]
            held = [replace(each, course="x") for each in alike[1]]
            expected = HoldingTimes(same, held, now.now).rest("x", 1, age, part)
            assert times.rest(course, milli, age, part) == expected
