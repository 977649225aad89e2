"""Which idle kernels give way, and for whom; and that nobody is overtaken for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy import placement
from gpu_pool.policy.queue import Policy, Situation, Usage, Waiter
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.yielding import (
    MOST_PARKINGS,
    HeldKernel,
    ask_back,
    is_yielded_to,
    may_yield,
    place_of_return,
    yields_at,
)
from gpu_pool_client import Device, DeviceStatus, Slice, parse_request
from support.pools import device

NOW = 10_000.0
RULES = Rules()


def gpus(count: int, per_node: int = 8) -> list[Device]:
    return [device(index, node=f"node-{index // per_node}") for index in range(count)]


def on(number: int, devices: Sequence[Device], milli: int = 1000, idle: float | None = 100.0) -> HeldKernel:
    """Return a kernel that holds as much of each of these devices, and has been idle for so long."""
    parts = tuple(Slice(each, milli, each.memory_mib * milli // 1000, 0) for each in devices)
    return HeldKernel(number, parts, None if idle is None else NOW - idle, working=idle is None)


def situation(devices: Sequence[Device], kernels: Sequence[HeldKernel], *queue: Waiter) -> Situation:
    statuses = [DeviceStatus(each, 0, 0, 0, 0, RULES.device_milli) for each in devices]
    for kernel in kernels:
        statuses = placement.deduct(statuses, kernel.parts)
    return Situation(queue, (), statuses, RULES, Policy(), Usage(), NOW)


def asks(number: int, size: str, **more: object) -> Waiter:
    return Waiter(number, parse_request(size), since=NOW - 100 + number / 100, user=f"u{number}", **more)  # type: ignore[arg-type]


def asked(
    devices: Sequence[Device],
    kernels: Sequence[HeldKernel],
    *queue: Waiter,
    reservations: dict[int, tuple[str, ...]] | None = None,
    waited: float = 0.0,
) -> dict[int, tuple[int, ...]]:
    now = situation(devices, kernels, *queue)
    return ask_back(now, reservations or {}, kernels, {waiter.number: NOW - waited for waiter in queue})


def test_nobody_is_asked_while_nobody_waits_or_all_can_be_served() -> None:
    two = gpus(2)
    assert asked(two, [on(1, two[:1])]) == {}
    assert asked(two, [on(1, two[:1])], asks(9, "1")) == {}


def test_the_least_recently_used_of_equals_is_asked() -> None:
    three = gpus(3)
    kernels = [on(1, three[:1], idle=90), on(2, three[1:2], idle=200), on(3, three[2:], idle=70)]
    assert asked(three, kernels, asks(9, "1")) == {9: (2,)}
    # Two who wait are given two kernels, the first of them that which has been idle for longest.
    assert asked(three, kernels, asks(8, "1"), asks(9, "50%")) == {8: (2,), 9: (1,)}


def test_the_fewest_that_free_enough_are_asked_though_others_have_been_idle_for_longer() -> None:
    eight = gpus(8)
    four = on(1, eight[:4], idle=70)
    ones = [on(number, [each], idle=500) for number, each in enumerate(eight[4:], 2)]
    assert asked(eight, [four, *ones], asks(9, "4")) == {9: (1,)}
    assert set(asked(eight, [four, *ones], asks(9, "5"))[9]) == {1, 2}
    slices = [on(number, eight[:1], 20, idle=500) for number in range(10, 20)]
    half, quarter = on(20, eight[:1], 500, idle=61), on(21, eight[:1], 250, idle=900)
    assert asked(eight[:1], [*slices, half, quarter], asks(30, "50%")) == {30: (20,)}


def test_who_runs_works_is_unknown_or_has_just_returned_is_not_asked() -> None:
    one = gpus(1)
    idle = on(1, one)
    assert may_yield(idle, NOW, NOW)
    for other in (
        replace(idle, idle_since=None),
        replace(idle, working=True),
        replace(idle, working=None),
        replace(idle, idle_since=NOW - 4),
        replace(idle, yield_after=None),
        replace(idle, returned=True),
        replace(idle, asked=True),
    ):
        assert not may_yield(other, NOW)
        assert asked(one, [other], asks(9, "1"), waited=3600.0) == {}


def test_a_slice_that_idles_goes_sooner_to_whoever_has_waited_for_as_long_as_its_course_says() -> None:
    one = gpus(1)
    short = on(1, one, idle=59)
    assert asked(one, [short], asks(9, "1"), waited=59) == {}
    assert asked(one, [short], asks(9, "1"), waited=60) == {9: (1,)}
    assert asked(one, [replace(short, yield_after=900.0)], asks(9, "1"), waited=899) == {}
    # Where a course says less than the pause between two cells, that holds.
    assert asked(one, [replace(short, idle_since=NOW - 2, yield_after=1.0)], asks(9, "1")) == {9: (1,)}


def test_who_has_waited_for_long_does_not_have_to_wait_for_those_who_have_not() -> None:
    two = gpus(2)
    kernels = [on(1, two[:1], idle=30), on(2, two[1:], idle=20)]
    now, new, old = situation(two, kernels, asks(8, "1"), asks(9, "1")), NOW - 10, NOW - 100
    assert ask_back(now, {}, kernels, {8: new, 9: old}) == {9: (1,)}
    assert ask_back(now, {}, kernels, {8: old, 9: old}) == {8: (1,), 9: (2,)}


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_it_gives_way_once_both_it_and_who_waits_say_so(idle: int, waited: int, after: int) -> None:
    kernel = replace(on(1, gpus(1), idle=idle), yield_after=after)
    goes = idle >= min(5, after) and (idle >= after or waited >= after)
    assert bool(asked(gpus(1), [kernel], asks(9, "1"), waited=waited)) == goes


def test_a_kernel_is_parked_for_others_so_often_in_an_hour_at_most() -> None:
    kernel = on(1, gpus(1))
    often = replace(kernel, parkings=tuple(NOW - 3000 + number for number in range(MOST_PARKINGS)))
    assert yields_at(often, NOW) == yields_at(often) == NOW + 600
    rarely = replace(often, parkings=often.parkings[1:])
    assert (yields_at(rarely, NOW), yields_at(rarely)) == (NOW - 40, NOW - 95)


def test_what_is_coming_serves_the_next_and_is_not_asked_for_twice() -> None:
    two = gpus(2)
    coming, idle = replace(on(1, two[:1]), asked=True), on(2, two[1:])
    assert asked(two, [coming, idle], asks(9, "1")) == {}
    assert asked(two, [coming, idle], asks(8, "1"), asks(9, "1")) == {9: (2,)}


def test_who_cannot_be_served_is_passed_over_and_nobody_gives_way_in_vain() -> None:
    eight = gpus(8)
    kernels = [on(1, eight[:1], idle=None), *(on(number, [eight[number]]) for number in range(1, 8))]
    kernels = [replace(kernel, number=place + 1) for place, kernel in enumerate(kernels)]
    assert set(asked(eight, kernels, asks(90, "8"), asks(91, "2"))) == {91}


def test_all_devices_of_one_slice_are_in_one_node() -> None:
    two = gpus(4, per_node=2)
    kernels = [on(1, two[:1], idle=900), on(2, two[1:2], idle=None), on(3, two[2:3]), on(4, two[3:])]
    assert set(asked(two, kernels, asks(9, "2"))[9]) == {3, 4}


def test_reserved_devices_are_emptied_for_whom_they_are_reserved_alone() -> None:
    two = gpus(2)
    kernels = [on(1, two[:1], idle=900), on(2, two[1:])]
    reservations = {8: (two[0].uuid,)}
    large = asks(8, "2", reserved=(two[0].uuid,))
    assert asked(two, kernels, asks(9, "1"), reservations=reservations) == {9: (2,)}
    # Those of who waits for both are not enough while the other one is given away first.
    assert asked(two, kernels, large, reservations=reservations)[8] == (1, 2)


def test_who_returns_to_its_own_devices_has_those_asked_back() -> None:
    two = gpus(2)
    kernels = [on(1, two[:1], idle=900), on(2, two[1:])]
    home = asks(9, "1", devices=frozenset([two[1].uuid]), is_parked=True)
    assert asked(two, kernels, home) == {9: (2,)}


def test_others_give_way_to_who_gives_way_or_ends_soon() -> None:
    assert is_yielded_to(60.0, None)
    assert is_yielded_to(None, 600.0)
    assert not is_yielded_to(None, 601.0)
    assert not is_yielded_to(None, None)
    one = gpus(1)
    kernels = [on(1, one)]
    assert ask_back(situation(one, kernels, asks(9, "1")), {}, kernels, {}) == {}


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Device], list[HeldKernel], Waiter]:
    """Draw devices of which whole ones or parts are held, and somebody who wants some."""
    devices = gpus(draw(st.sampled_from([1, 4, 8])), per_node=4)
    kernels: list[HeldKernel] = []
    whole = draw(st.booleans())
    place = 0
    while place < len(devices):
        wide = draw(st.integers(1, 4)) if whole else 1
        held = [each for each in devices[place : place + wide] if each.node == devices[place].node]
        sizes = [1000] if whole else draw(st.lists(st.sampled_from([100, 200, 500]), max_size=4))
        for milli in sizes if sum(sizes) <= 1000 else sizes[:1]:
            idle = draw(st.one_of(st.none(), st.integers(61, 900).map(float)))
            kernels.append(on(len(kernels) + 1, held, milli, idle))
        place += len(held)
    count = draw(st.integers(1, min(4, len(devices))))
    milli = 1000 if whole else draw(st.sampled_from([100, 300, 600, 1000]))
    return devices, kernels, asks(99, f"{count}x{milli / 10:g}%" if count > 1 else f"{milli / 10:g}%")


@given(crowds())
def test_no_smaller_set_of_idle_kernels_would_do(
    drawn: tuple[list[Device], list[HeldKernel], Waiter],
) -> None:
    devices, kernels, waiter = drawn
    found = asked(devices, kernels, waiter).get(99)
    now = situation(devices, kernels, waiter)
    idle = [kernel for kernel in kernels if may_yield(kernel, NOW)]

    def serves(giving: Sequence[HeldKernel]) -> bool:
        statuses = list(now.statuses)
        for kernel in giving:
            statuses = placement.give_back(statuses, kernel.parts)
        return placement.place(waiter.request, statuses, RULES) is not None

    possible = (
        len(each) for size in range(len(idle) + 1) for each in combinations(idle, size) if serves(each)
    )
    fewest = next(possible, None)
    assert (len(found) if found else None) == (fewest or None)
    assert found is None or serves([kernel for kernel in kernels if kernel.number in found])


@given(st.lists(st.tuples(st.sampled_from(["comes", "returns", "leaves"]), st.integers(0, 3)), max_size=60))
def test_no_kernel_overtakes_anybody_twice(steps: list[tuple[str, int]]) -> None:
    waiting: dict[int, float] = {}
    overtaken: dict[int, frozenset[int]] = {}
    times: dict[tuple[int, int], int] = {}
    for number, (step, who) in enumerate(steps):
        now = float(number)
        if step == "comes":
            waiting[100 + number] = now
        elif step == "leaves" and waiting:
            waiting.pop(sorted(waiting)[who % len(waiting)])
        elif step == "returns":
            # It is served at once, and stands before everybody who came later than it counts from.
            since, overtaken[who] = place_of_return(now, waiting.items(), overtaken.get(who, frozenset()))
            assert overtaken[who] <= waiting.keys()
            for each, at in waiting.items():
                if at > since:
                    times[who, each] = times.get((who, each), 0) + 1
    assert set(times.values()) <= {1}


def test_who_returns_stands_before_all_that_it_has_not_overtaken() -> None:
    since, overtaken = place_of_return(50.0, [(1, 10.0), (2, 20.0)], ())
    assert since < 10.0
    assert overtaken == {1, 2}
    since, overtaken = place_of_return(60.0, [(1, 10.0), (2, 20.0), (3, 55.0)], overtaken)
    assert 20.0 < since < 55.0
    assert overtaken == {1, 2, 3}
    assert place_of_return(70.0, [(2, 20.0), (3, 55.0)], overtaken) == (70.0, frozenset({2, 3}))
