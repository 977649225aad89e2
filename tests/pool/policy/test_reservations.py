"""Reservations: made where they are worth it, shared by equals, filled by what is short, and given up."""

from __future__ import annotations

from dataclasses import replace

from gpu_pool.policy.queue import Policy, Situation, Usage, Waiter, decide
from gpu_pool.policy.queue_state import Decision, Holding, HoldingTime
from support.queues import HOUR, RULES, V100, granted, holding, statuses, waiter

ALL = tuple(each.uuid for each in V100)
#: Ninety-nine of a hundred leases of 20% last ten minutes, and one lasts a day.
MOSTLY_SHORT = [HoldingTime("", 200, 600.0)] * 198 + [HoldingTime("", 200, 24 * HOUR)] * 2


def asked(
    line: list[Waiter], held: list[Holding], history: list[HoldingTime] | None = None, now: float = HOUR
) -> Decision:
    return decide(Situation(line, held, statuses(held), RULES, Policy(), Usage(), now, history=history or []))


def said(number: int, text: str, seconds: float, **facts: object) -> Waiter:
    return waiter(number, text, longest=seconds, is_said=True, **facts)


def until(index: int, milli: int, ends_by: float, **facts: object) -> Holding:
    return holding(index, milli, ends_by, is_said=True, **facts)


def test_whoever_says_to_be_done_before_the_start_is_let_in_and_nobody_else() -> None:
    held = [until(index, 500, 2 * HOUR) for index in range(4)]
    large = said(1, "4", HOUR, since=0.0, reserved=ALL)
    shorter, longer = said(2, "50%", HOUR), said(3, "50%", HOUR + 1)
    decision = asked([large, longer, shorter], held)
    assert granted(decision) == [2]
    assert decision.reservations == {1: ALL}


def test_what_others_of_its_course_and_size_held_lets_a_request_in_where_that_is_almost_sure() -> None:
    held = [until(index, 500, HOUR + 900) for index in range(4)]
    large = said(1, "4", HOUR, since=0.0, reserved=ALL)
    small = waiter(2, "20%")
    assert granted(asked([large, small], held, MOSTLY_SHORT)) == [2]
    assert granted(asked([large, small], held, MOSTLY_SHORT[:190] + MOSTLY_SHORT[198:] * 5)) == []
    assert granted(asked([large, small], held)) == []


def test_nothing_is_kept_free_for_longer_than_it_is_worth() -> None:
    def reserved(seconds: float, ends: float) -> bool:
        held = [holding(0, 1000, HOUR + ends, since=HOUR)]
        history = [HoldingTime("", 1000, ends)] * 5
        line = [waiter(1, "4", since=0.0, longest=seconds)]
        return bool(asked(line, held, [*history, *[HoldingTime("", 4000, seconds)] * 5]).reservations)

    # Three GPUs idle, for a request that is to have four, and has waited an hour: a fifth of four GPU-hours.
    assert reserved(60.0, 900.0)
    assert not reserved(60.0, 2 * HOUR)
    assert reserved(2 * HOUR, 2 * HOUR)


def test_a_reservation_is_given_up_when_its_end_moves_away() -> None:
    history = [HoldingTime("", 1000, HOUR / 2)] * 10
    large = waiter(1, "4", since=0.0, longest=60.0, reserved=ALL)
    held = [holding(0, 1000, since=HOUR)]
    assert asked([large], held, history, now=HOUR + 1200.0).reservations == {1: ALL}
    # It has outlasted all that are known.
    assert asked([large], held, history, now=HOUR + 1801.0).reservations == {}


def test_all_who_wait_for_such_a_size_go_before_the_pool_fills_again() -> None:
    line = [waiter(number, "4", user=f"u{number}", since=0.0, reserved=ALL) for number in (1, 2)]
    line.append(waiter(3, "20%", user="u3", since=0.0))
    first = asked(line, [])
    assert granted(first) == [1]
    held = [Holding(w.user, w.course, parts, None, HOUR) for w, parts in first.grants]
    left = [replace(each, reserved=first.reservations.get(each.number, ())) for each in line[1:]]
    assert first.reservations == {2: ALL}
    assert granted(asked(left, held, now=HOUR + 60.0)) == []
    assert granted(asked(left, [], now=HOUR + 120.0)) == [2]


def test_the_gpu_that_small_leases_hold_is_emptied_and_not_the_one_that_is_free_as_a_whole_anyway() -> None:
    whole = [until(index, 1000, HOUR + 600) for index in range(3)]
    small = [until(3, 100, HOUR + 1200), until(3, 100, HOUR + 1800)]
    large = said(1, "1", HOUR, since=0.0)
    kept = asked([large], [*whole, *small]).reservations
    assert kept == {1: ALL[3:]}
    # Whatever is sooner is taken.
    large = replace(large, reserved=ALL[3:])
    assert asked([large], [*whole[1:], *small], now=HOUR + 600).grants[0][1][0].device.uuid == ALL[0]


def between(first: float, second: float) -> list[Holding]:
    """Three GPUs held as wholes for long, and two leases on the fourth that end at these times."""
    whole = [until(index, 1000, 9 * HOUR) for index in range(3)]
    return [*whole, until(3, 500, first), holding(3, 500, second, since=-9 * HOUR)]


def test_a_gpu_is_not_emptied_for_one_while_smaller_ones_wait_for_much_of_it() -> None:
    held = between(HOUR + 1200, 2 * HOUR)
    large = waiter(1, "1", since=0.0, longest=60.0)

    def reserved(text: str, **facts: object) -> bool:
        return bool(asked([large, waiter(2, text, user="u2", since=HOUR, **facts)], held).reservations)

    assert reserved("2%")
    assert not reserved("60%")
    # Batch work can wait, and those who ask for as much come after.
    assert reserved("60%", batch=True)
    assert reserved("1")


def test_a_gpu_that_is_being_emptied_is_given_up_when_smaller_ones_could_have_what_idles() -> None:
    held = between(0.0, 2 * HOUR)
    del held[3]
    large = waiter(1, "1", since=0.0, longest=60.0, reserved=ALL[3:])
    alone = asked([large, waiter(2, "60%", since=HOUR)], held)
    assert alone.reservations == {1: ALL[3:]}  # it would not fit anyway
    assert granted(alone) == []
    assert granted(asked([large, waiter(2, "50%", since=HOUR)], held)) == [2]


def test_less_may_idle_for_who_asks_for_less_than_a_gpu() -> None:
    held = between(HOUR + 1200, HOUR + 5600)
    assert asked([waiter(1, "1", since=0.0, longest=60.0)], held).reservations
    assert not asked([waiter(1, "60%", since=0.0, longest=60.0)], held).reservations


def test_nothing_is_kept_free_for_ever_for_whoever_has_waited_for_ever() -> None:
    # The next start is so far away that it was not worth it, however long somebody has waited for it.
    def held(until_then: float) -> list[Holding]:
        return [until(0, 1000, until_then), *[until(index, 1000, 2 * HOUR) for index in (1, 2, 3)]]

    large = waiter(1, "4", since=0.0, longest=60.0)
    assert not asked([large], held(40 * HOUR), now=HOUR).reservations
    assert not asked([replace(large, since=-1000 * HOUR)], held(40 * HOUR), now=HOUR).reservations
    assert asked([replace(large, since=-10 * HOUR)], held(8 * HOUR), now=HOUR).reservations


def test_what_would_idle_anyway_does_not_count_until_others_want_it() -> None:
    # Three of four GPUs are free, for twenty hours: those would cost more than eight hours of the pool.
    held = [until(0, 1000, 21 * HOUR)]
    large = waiter(1, "4", since=-9 * HOUR, longest=60.0)
    assert asked([large], held).reservations == {1: ALL}
    kept = replace(large, reserved=ALL)
    assert asked([kept, waiter(2, "10%", user="u2", since=HOUR)], held).reservations == {1: ALL}
    others = [waiter(number, "1", user=f"u{number}", since=HOUR) for number in (2, 3, 4)]
    decision = asked([kept, *others], held)
    assert granted(decision) == [2, 3, 4]
    assert decision.reservations == {}
