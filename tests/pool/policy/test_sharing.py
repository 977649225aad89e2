"""Courses, quotas, longest leases and turns, as the store keeps them. Time is the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.store import leases, reclaim
from gpu_pool_client import EndReason, LeaseState, NotAllowed, OverQuota
from support.pools import device
from support.stores import START


def test_a_request_that_has_waited_long_is_not_overtaken_any_more(pools: Any) -> None:
    pool = pools(device(0), device(1), drain_after="10min")
    half = [pool.ask("50%", "bob"), pool.ask("100%", "bob")]
    whole = pool.ask("1")
    assert pool.state(pool.ask("2%", "eve")) is LeaseState.HELD
    pool.now += 601
    reclaim.serve_queue(pool.lease_store)
    pool.end(half[1])
    assert pool.state(whole) is LeaseState.HELD


def test_courses_take_turns_by_weight(pools: Any) -> None:
    pool = pools(courses={"heavy": {"weight": 3}, "light": {}})
    running = [pool.ask("1", "ada", "heavy")]
    waiting = [pool.ask("1", f"user{n}", course) for n in range(12) for course in ("heavy", "light")]
    served: list[str] = []
    while len(served) < 12:
        pool.now += 600
        pool.end(running.pop())
        running = [lease for lease in waiting if pool.state(lease) is LeaseState.HELD]
        served += [str(lease.holder.course) for lease in running]
    assert 8 <= served.count("heavy") <= 10, "three quarters, as exactly as whole GPUs allow"


def test_all_of_a_course_may_be_batch_work(pools: Any) -> None:
    pool = pools(courses={"grading": {"priority": 9, "batch": True}, "class": {}})
    held = pool.ask("1", "ada", "class")
    graders, student = pool.ask("1", "eve", "grading"), pool.ask("1", "bob", "class")
    assert leases.read(pool.lease_store, graders.id).holder.batch
    pool.end(held)
    assert [pool.state(lease) for lease in (graders, student)] == [LeaseState.WAITING, LeaseState.HELD]


def test_the_user_who_has_had_less_comes_first(pools: Any) -> None:
    pool = pools()
    first = pool.ask("1", "ada")
    pool.now += 3600
    again, other = pool.ask("1", "ada"), pool.ask("1", "bob")
    pool.end(first)
    assert [pool.state(lease) for lease in (again, other)] == [LeaseState.WAITING, LeaseState.HELD]


def test_places_in_line_are_the_order_of_turn(pools: Any) -> None:
    pool = pools(courses={"urgent": {"priority": 1}, "other": {}})
    pool.ask("1", "bob", "other")
    later, sooner = pool.ask("1", "ada", "other"), pool.ask("1", "eve", "urgent")
    assert [leases.read(pool.lease_store, lease.id).position for lease in (sooner, later)] == [1, 2]


def test_the_longest_lease(pools: Any) -> None:
    pool = pools(courses={"ml101": {"longest_lease": "2h"}})
    lease = pool.ask("1", course="ml101")
    waiting = pool.ask("2%", course="ml101")
    assert lease.terms.ends_at == pytest.approx(START + 7200, abs=1)
    pool.now += 7200
    reclaim.end_over(pool.lease_store)
    assert pool.state(lease) is LeaseState.HELD, "whoever ends the kernel has a moment to do so"
    pool.now += 31
    reclaim.end_over(pool.lease_store)
    assert leases.read(pool.lease_store, lease.id).end_reason is EndReason.TOO_LONG
    assert leases.read(pool.lease_store, waiting.id).terms.ends_at == pytest.approx(pool.now + 7200, abs=1)


def test_a_length_that_is_said_is_the_end(pools: Any) -> None:
    pool = pools(courses={"ml101": {"longest_lease": "2h"}})
    lease = pool.ask("50% for 20min", course="ml101")
    assert (lease.terms.ends_at, lease.terms.ends_as_asked) == (pytest.approx(START + 1200, abs=1), True)
    longer = pool.ask("50% for 3h", course="ml101")
    assert (longer.terms.ends_at, longer.terms.ends_as_asked) == (pytest.approx(START + 7200, abs=1), False)
    pool.now += 600
    leases.lend(pool.lease_store, lease.id)
    pool.now += 36_000
    again = leases.queue_again(pool.lease_store, lease.id)
    assert again.terms.ends_at == pytest.approx(pool.now + 600, abs=1), "what was held before counts"
    pool.now += 631
    reclaim.end_over(pool.lease_store)
    assert leases.read(pool.lease_store, lease.id).end_reason is EndReason.TOO_LONG


def test_who_says_a_short_length_is_let_in_before_what_is_reserved(pools: Any) -> None:
    pool = pools(drain_after="30min")
    pool.ask("50% for 1h")
    pool.ask("1 for 1h", "eve")
    pool.now += 1900
    reclaim.serve_queue(pool.lease_store)
    short, long = pool.ask("10% for 20min", "bob"), pool.ask("10% for 3h", "cyd")
    silent = pool.ask("10%", "dan")
    assert [pool.state(each) for each in (short, long, silent)] == [
        LeaseState.HELD,
        LeaseState.WAITING,
        LeaseState.WAITING,
    ]


def test_parked_time_does_not_count(pools: Any) -> None:
    pool = pools(courses={"ml101": {"longest_lease": "2h"}})
    lease = pool.ask("1", course="ml101")
    pool.now += 3600
    assert leases.lend(pool.lease_store, lease.id).terms.ends_at is None
    pool.now += 36_000
    assert leases.queue_again(pool.lease_store, lease.id).terms.ends_at == pytest.approx(
        pool.now + 3600, abs=1
    )


def test_a_course_that_does_not_exist(pools: Any) -> None:
    pool = pools(courses={"ml101": {}})
    assert pool.ask("2%").state is LeaseState.HELD, "no course is the default one"
    with pytest.raises(NotAllowed, match=r"no course 'ml102'. Its courses are: ml101"):
        pool.ask("2%", course="ml102")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"per_user": {"slices": 1}},
            "You hold 1 slice, and 1 slice is the most; you asked for 1 slice more",
        ),
        (
            {"per_user": {"share": "60%"}},
            "hold 50% of a GPU, and 60% of a GPU is the most.* Allowed now: 10%",
        ),
        ({"per_user": {"memory": "20GiB"}}, "hold 16GiB, and 20GiB is the most.* Allowed now: 4GiB"),
        ({"courses": {"ml101": {"quota": {"slices": 1}}}}, "Together, ml101 hold 1 slice"),
        ({"courses": {"ml101": {"per_user": {"slices": 1}}}}, "In ml101 you hold 1 slice"),
        ({"groups": {"phd": {"users": ["ada"], "quota": {"slices": 1}}}}, "your group phd holds 1 slice"),
    ],
)
def test_over_quota_is_told_apart_from_full(pools: Any, settings: dict[str, Any], words: str) -> None:
    pool = pools(**settings)
    first = pool.ask("50%", course="ml101")
    with pytest.raises(OverQuota, match=words):
        pool.ask("50%", course="ml101")
    with pytest.raises(OverQuota):
        pool.ask("50%", course="of my own invention" if "courses" not in settings else "ml101")
    assert not leases.status(pool.lease_store, "").queue
    pool.end(first)
    assert pool.ask("50%", course="ml101").state is LeaseState.HELD


def test_who_holds_nothing_is_told_the_most_that_may_be_asked_for(pools: Any) -> None:
    pool = pools(per_user={"memory": "16GiB"})
    with pytest.raises(OverQuota, match="may hold 16GiB at most.* Ask for at most 50%[.]$"):
        pool.ask("60%")
    assert pool.ask("50%").state is LeaseState.HELD


def test_what_others_hold_is_not_mine(pools: Any) -> None:
    pool = pools(per_user={"slices": 1})
    pool.ask("1", "bob")
    waiting = pool.ask("1")
    assert waiting.state is LeaseState.WAITING
    with pytest.raises(OverQuota):
        pool.ask("2%")


def test_when_more_is_allowed(pools: Any) -> None:
    pool = pools(default_course={"longest_lease": "90min"}, per_user={"slices": 1})
    pool.ask("2%")
    pool.now += 600
    with pytest.raises(OverQuota, match="The next ends by itself within 1h20min"):
        pool.ask("2%")


def test_gpu_hours_count_from_monday_and_over_all_that_was_held(pools: Any) -> None:
    pool = pools(per_user={"gpu_hours_per_week": 1})
    first = pool.ask("50%")
    pool.now += 3600
    pool.end(first)
    second = pool.ask("50%")
    pool.now += 3700
    with pytest.raises(OverQuota, match=r"You used 1.0 GPU-hours this week, and 1 is the most.* Monday"):
        pool.ask("2%")
    pool.end(second)
    with pytest.raises(OverQuota):
        pool.ask("2%")
    assert pool.ask("2%", "bob").state is LeaseState.HELD
    pool.now += 7 * 86_400
    assert pool.ask("2%").state is LeaseState.HELD


def test_gpu_hours_of_a_term(pools: Any) -> None:
    pool = pools(per_user={"gpu_hours_per_term": 1}, term_began="2025-09-01")
    lease = pool.ask("1")
    pool.now += 3601
    pool.end(lease)
    pool.now += 7 * 86_400
    with pytest.raises(OverQuota, match="this term"):
        pool.ask("2%")
