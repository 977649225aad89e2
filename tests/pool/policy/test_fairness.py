"""What courses and users have had, in numbers: what the order of turn is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gpu_pool.policy.fairness import FairShares, turns
from gpu_pool.policy.queue import Holding, Policy, Situation, Usage, Waiter
from support.queues import RULES, holding, statuses, waiter

NOW = 10_000.0
#: What was used one half-life / ln 2 ago and earlier counts, in all, like this many seconds of it.
COURSE, USER = 900 / math.log(2), 3600 / math.log(2)


def situation(
    line: Sequence[Waiter] = (), held: Sequence[Holding] = (), usage: Usage | None = None, **weights: float
) -> Situation:
    """Return a situation on four GPUs."""
    policy = Policy(weights=weights)
    return Situation(line, held, statuses(held), RULES, policy, usage or Usage(), NOW)


def now(index: int, milli: int, course: str, user: str = "ada", ago: float = 0.0) -> Holding:
    return holding(index, milli, course=course, user=user, since=NOW - ago)


def test_a_course_has_had_what_it_holds_for_a_tenth_of_the_memory() -> None:
    held = [now(index, 1000, "a") for index in range(3)]
    assert FairShares(situation(held=held)).course_key("a") == pytest.approx(3000 * 0.1 / (4000 * 1.1))


def test_what_was_held_for_long_counts_in_full() -> None:
    held = [now(index, 1000, "a", ago=1e9) for index in range(4)]
    assert FairShares(situation(held=held)).course_key("a") == pytest.approx(1.0)
    half = [now(index, 1000, "a", ago=900) for index in range(4)]
    assert FairShares(situation(held=half)).course_key("a") == pytest.approx(0.6 / 1.1)


def test_what_was_used_before_counts_too() -> None:
    usage = Usage(courses={"a": 4000 * COURSE})
    assert FairShares(situation([waiter(1, course="a")], usage=usage)).course_key("a") == pytest.approx(
        1 / 1.1
    )


def test_courses_that_have_had_less_than_half_are_equal() -> None:
    exactly = [now(index, 1000, "a") for index in range(2)]
    assert FairShares(situation(held=exactly)).course_key("a") == 0.0
    more = [*exactly, now(2, 20, "a")]
    assert FairShares(situation(held=more)).course_key("a") > 0.0
    assert FairShares(situation(held=more)).course_key("b") == 0.0


def test_the_part_of_a_course_is_by_weight_among_those_that_hold_or_wait() -> None:
    held = [now(0, 1000, "a"), now(1, 1000, "b")]
    assert FairShares(situation(held=held)).course_key("a") == 0.0  # half of its half
    heavy = FairShares(situation(held=held, b=3.0))
    assert heavy.course_key("a") == pytest.approx(1000 * 0.1 / (1000 * 1.1))
    assert heavy.course_key("b") == 0.0
    waits = FairShares(situation([waiter(1, course="b")], [now(0, 1000, "a")], b=3.0))
    assert waits.course_key("a") == pytest.approx(1000 * 0.1 / (1000 * 1.1))


def test_a_course_of_no_weight_comes_last() -> None:
    assert FairShares(situation([waiter(1, course="a")], a=0.0)).course_key("a") == math.inf
    assert FairShares(situation([waiter(1, course="a"), waiter(2, course="b")], a=0.0)).course_key("b") == 0.0


def test_a_user_is_put_off_by_what_they_hold() -> None:
    mine = waiter(7, "2%", user="ada", course="a", since=5.0)
    assert FairShares(situation([mine])).user_key(mine) == (5.0, 5.0, 7)
    turn, since, number = FairShares(situation([mine], [now(0, 40, "a")])).user_key(mine)
    assert (since, number) == (5.0, 7)
    assert turn == pytest.approx(5.0 + 2 * USER)
    elsewhere = FairShares(situation([mine], [now(0, 40, "b"), now(1, 40, "a", "bob")]))
    assert elsewhere.user_key(mine)[0] == 5.0


def test_a_user_is_put_off_by_what_they_used() -> None:
    mine = waiter(7, "2%", user="ada", course="a", since=5.0)
    usage = Usage(users={("a", "ada"): 20 * 60.0, ("b", "ada"): 1e9})
    assert FairShares(situation([mine], usage=usage)).user_key(mine)[0] == pytest.approx(65.0)
    longer = FairShares(situation([mine], [now(0, 20, "a", ago=3600)]))
    assert longer.user_key(mine)[0] == pytest.approx(5.0 + 1.5 * USER)


def test_a_clock_that_was_set_back_takes_nothing_away() -> None:
    mine = waiter(7, "2%", user="ada", course="a", since=5.0)
    shares = FairShares(situation([mine], [now(0, 20, "a", ago=-500)]))
    assert shares.user_key(mine)[0] == pytest.approx(5.0 + USER)


def test_a_turn_is_charged_as_if_it_were_held() -> None:
    mine = waiter(7, "1", user="ada", course="a", since=5.0)
    shares = FairShares(situation([mine]))
    for _ in range(3):
        shares.charge(mine)
    assert shares.user_key(mine)[0] == pytest.approx(5.0 + 3 * USER)
    assert shares.course_key("a") == pytest.approx(3000 * 0.1 / (4000 * 1.1))
    together = waiter(8, "3", user="bob", course="b")
    shares.charge(together)
    assert shares.user_key(together)[0] == pytest.approx(together.since + USER)


@pytest.mark.parametrize(
    ("held", "size", "over"),
    [
        ([], "4", False),  # who holds nothing is due something
        ([now(0, 20, "a")], "1", False),
        ([now(0, 1000, "a")], "1", False),  # exactly its part
        ([now(0, 1000, "a"), now(1, 20, "a")], "1", True),
    ],
)
def test_when_a_course_goes_over_its_part(held: list[Holding], size: str, over: bool) -> None:
    mine = waiter(1, size, course="a")
    assert FairShares(situation([mine, waiter(2, course="b")], held)).goes_over(mine) is over


def test_the_only_course_goes_over_nothing() -> None:
    mine = waiter(1, "1", course="a")
    assert not FairShares(situation([mine], [now(index, 1000, "a") for index in range(4)])).goes_over(mine)


def test_the_course_whose_turn_it_is() -> None:
    line = [
        waiter(1, course="a"),
        waiter(2, course="b"),
        waiter(3, course="b", priority=1),
        waiter(4, course="a", priority=1),
        waiter(5, course="b", priority=1),
    ]
    assert next(iter(turns(line, FairShares(situation(line))))).number == 3
    assert list(turns([], FairShares(situation()))) == []


def test_a_waiter_is_found_by_number() -> None:
    line = [waiter(1), waiter(2)]
    assert situation(line).waiter(2) is line[1]
    with pytest.raises(KeyError, match="3"):
        situation(line).waiter(3)
