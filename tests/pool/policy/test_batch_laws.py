"""Batch work comes after all that is not, whatever else is said of either: laws, tried on made-up queues."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from gpu_pool.policy import placement
from gpu_pool.policy.forecast import explain
from gpu_pool.policy.queue import Holding, Policy, Situation, Usage, Waiter
from gpu_pool_client import parse_request
from support.queues import RULES, decided, granted, holding, lines, occupied, ordered, statuses, waiter


@given(lines, occupied)
def test_no_batch_work_is_before_anything_else_in_the_queue(line: list[Waiter], held: list[Holding]) -> None:
    batch = {each.number for each in line if each.batch}
    order = [number in batch for number in ordered(line, held, now=4000.0)]
    assert order == sorted(order)


@given(lines, occupied)
def test_without_others_batch_work_is_a_queue_like_any_other(line: list[Waiter], held: list[Holding]) -> None:
    plain = [replace(each, batch=False) for each in line]
    batch = [replace(each, batch=True) for each in line]
    assert ordered(plain, held, now=4000.0) == ordered(batch, held, now=4000.0)
    first, second = decided(plain, held, now=4000.0), decided(batch, held, now=4000.0)
    assert granted(first) == granted(second)
    assert first.reservations == second.reservations


@given(lines, occupied)
def test_nothing_that_another_could_have_is_granted_to_batch_work(
    line: list[Waiter], held: list[Holding]
) -> None:
    """What others are granted, they are granted with batch work in the queue as without it."""
    others = [each for each in line if not each.batch]
    assume(others)
    assert [each for each in granted(decided(line, held, now=4000.0)) if _is_of(each, others)] == granted(
        decided(others, held, now=4000.0)
    )


def test_a_course_that_waits_with_batch_work_alone_takes_nothing_from_the_parts_of_others() -> None:
    # With a third of the pool, and not a half, the first course would be over its part.
    names = ["one", "one", *["two"] * 6]
    held = [holding(index // 2, 500, ends_by=4060.0, course=name) for index, name in enumerate(names)]
    line = [waiter(1, "1", course="one")]
    batch = waiter(2, "1", course="three", batch=True)
    decision = decided([*line, batch], held, now=4000.0)
    assert decision.reservations
    assert decision.reservations == decided(line, held, now=4000.0).reservations


def _is_of(number: int, line: list[Waiter]) -> bool:
    return any(each.number == number for each in line)


@given(lines, occupied)
def test_no_device_is_kept_free_for_batch_work_while_anybody_else_waits(
    line: list[Waiter], held: list[Holding]
) -> None:
    decision = decided(line, held, now=40_000.0)
    left = [each for each in line if each.number not in granted(decision)]
    if any(not each.batch for each in left):
        assert not [each for each in left if each.batch and each.number in decision.reservations]


@given(st.integers(0, 3), st.integers(0, 9))
def test_a_priority_raises_no_batch_work_above_anything_else(priority: int, other: int) -> None:
    batch = waiter(1, "1", user="a", priority=other + priority, batch=True)
    assert ordered([batch, waiter(2, "1", user="b", priority=-other)]) == [2, 1]


def test_what_was_kept_free_for_batch_work_goes_to_who_comes() -> None:
    held = [holding(0, 500), holding(1, 500), holding(2, 500), holding(3, 500)]
    late = waiter(1, "1", since=0.0, batch=True)
    first = decided([late], held, now=4000.0)
    assert first.reservations
    kept = replace(late, reserved=first.reservations[1])
    second = decided([kept, waiter(2, "4x50%", since=4000.0)], held, now=4000.0)
    assert granted(second) == [2]


def test_batch_work_reads_why_it_waits() -> None:
    line = [Waiter(1, parse_request("1"), user="a", batch=True)]
    held = [holding(0, 500)]
    now = Situation(line, held, statuses(held, 1), RULES, Policy(), Usage(), 0.0)
    assert explain(1, now).endswith("it comes after everybody who sits at a notebook.")
    assert "batch" not in explain(1, replace(now, queue=[replace(line[0], batch=False)]))
    assert placement.place(line[0].request, now.statuses, RULES) is None
