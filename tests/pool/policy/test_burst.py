"""Memory that nobody is granted, on top of guarantees: what each may use, and laws of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy.burst import LEAST_CHANGE_MIB, BurstSlice, divide, shares

MIB = st.integers(0, 40_000)


def burst_slice(
    number: int, burst: int = 0, used: int | None = None, *, most: int = 3_000, works: bool = True
) -> BurstSlice:
    """Return one with a guarantee of 1000 MiB; of memory in use, that beyond its guarantee is said."""
    return BurstSlice(number, 1_000, 1_000 + most, burst, None if used is None else 1_000 + used, works)


@st.composite
def several(draw: st.DrawFn) -> list[BurstSlice]:
    """Draw leases of one device, whatever they had on top before."""
    return [
        BurstSlice(
            number,
            guarantee := draw(st.integers(1, 10_000)),
            guarantee + draw(st.integers(1, 10_000)),
            draw(st.integers(0, 12_000)),
            draw(st.none() | st.integers(0, 25_000)),
            draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]


def after(slices: Sequence[BurstSlice], bursts: Mapping[int, int]) -> list[BurstSlice]:
    """Return the same leases with what they have on top now, in use as far as they may use it."""
    return [
        replace(
            each,
            burst_mib=bursts[each.number],
            used_mib=None
            if each.used_mib is None
            else min(each.used_mib, each.guarantee_mib + bursts[each.number]),
        )
        for each in slices
    ]


def test_one_alone_may_use_all_that_is_free_up_to_its_limit() -> None:
    assert divide(2_500, [burst_slice(1)]) == {1: 2_500}
    assert divide(9_000, [burst_slice(1)]) == {1: 3_000}


def test_shares_are_even_up_to_each_limit() -> None:
    assert divide(1_001, [burst_slice(1), burst_slice(2)]) == {1: 501, 2: 500}
    assert divide(4_000, [burst_slice(1, most=500), burst_slice(2), burst_slice(3)]) == {
        1: 500,
        2: 1_750,
        3: 1_750,
    }


def test_what_is_not_worth_a_change_is_not_lent_unless_it_is_all_that_there_may_be() -> None:
    assert divide(63, [burst_slice(1)]) == {1: 0}
    assert divide(63, [burst_slice(1, most=50)]) == {1: 50}
    assert divide(63, [burst_slice(1, 1_000, 500)]) == {1: 63}


def test_kernels_that_work_come_before_those_that_idle() -> None:
    assert divide(4_000, [burst_slice(1, works=False), burst_slice(2)]) == {1: 1_000, 2: 3_000}


def test_what_is_not_in_use_goes_first_and_from_idle_kernels_before_others() -> None:
    works, idles = burst_slice(1, 1_000, 400), burst_slice(2, 1_000, 300, works=False)
    assert divide(1_200, [works, idles]) == {1: 900, 2: 300}
    assert divide(1_000, [works, idles]) == {1: 700, 2: 300}
    assert divide(700, [works, idles]) == {1: 400, 2: 300}


def test_then_what_idle_kernels_use_goes_and_what_others_use_at_the_last() -> None:
    works, idles = burst_slice(1, 1_000, 400), burst_slice(2, 1_000, 300, works=False)
    assert divide(500, [works, idles]) == {1: 400, 2: 100}
    assert divide(300, [works, idles]) == {1: 300, 2: 0}
    assert divide(0, [works, idles]) == {1: 0, 2: 0}


def test_who_uses_more_than_it_was_lent_has_no_claim_to_that() -> None:
    assert divide(1_000, [burst_slice(1, 0, 1_000), burst_slice(2)]) == {1: 500, 2: 500}


def test_nothing_is_on_top_where_others_use_more_than_is_free() -> None:
    assert divide(-5_000, [burst_slice(1, 100)]) == {1: 0}


@given(MIB, several())
def test_nothing_is_given_twice_and_nobody_is_below_the_guarantee_nor_above_the_limit(
    free: int, slices: list[BurstSlice]
) -> None:
    bursts = divide(free, slices)
    assert sum(bursts.values()) <= free
    assert {each.number for each in slices} == set(bursts)
    for each in slices:
        assert 0 <= bursts[each.number] <= each.limit_mib - each.guarantee_mib


@given(MIB, several(), st.randoms())
def test_the_same_leases_have_the_same_in_whatever_order_they_are_told(
    free: int, slices: list[BurstSlice], random: st.DataObject
) -> None:
    shuffled = list(slices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert divide(free, shuffled) == divide(free, slices)


@given(MIB, several())
def test_nothing_moves_by_itself(free: int, slices: list[BurstSlice]) -> None:
    bursts = divide(free, slices)
    again = after(slices, bursts)
    assert divide(free, again) == bursts


@given(MIB, several(), st.integers(1, 20_000))
def test_what_a_newcomer_is_granted_is_free_after_one_decision(
    free: int, slices: list[BurstSlice], guarantee: int
) -> None:
    before = after(slices, divide(free, slices))
    assert sum(divide(free - guarantee, before).values()) <= max(0, free - guarantee)


@given(MIB, several(), MIB)
def test_more_that_is_free_lowers_nobodys_share(free: int, slices: list[BurstSlice], more: int) -> None:
    fewer, many = shares(free, slices), shares(free + more, slices)
    assert all(many[number] >= mib for number, mib in fewer.items())


@given(MIB, several(), MIB)
def test_memory_that_becomes_free_lowers_nobody(free: int, slices: list[BurstSlice], more: int) -> None:
    bursts = divide(free, slices)
    then = divide(free + more, after(slices, bursts))
    assert all(then[number] >= mib for number, mib in bursts.items())


@given(MIB, several())
def test_no_cap_moves_by_little_unless_it_must_or_comes_to_its_limit(
    free: int, slices: list[BurstSlice]
) -> None:
    now, last = divide(free, slices), {each.number: min(each.burst_mib, each.most_mib) for each in slices}
    for each in slices:
        by = now[each.number] - last[each.number]
        assert by <= 0 or by >= LEAST_CHANGE_MIB or now[each.number] == each.most_mib
        assert by >= 0 or by <= -LEAST_CHANGE_MIB or sum(last.values()) > free


@given(MIB, several())
def test_nothing_that_is_in_use_goes_while_anything_is_on_top_that_is_not(
    free: int, slices: list[BurstSlice]
) -> None:
    given_now = shares(free, slices)
    unmet = [each for each in slices if given_now[each.number] < each.burst_in_use_mib]
    if unmet:
        assert all(given_now[each.number] <= each.burst_in_use_mib for each in slices)
        assert sum(given_now.values()) == free
