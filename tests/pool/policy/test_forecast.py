"""What somebody who waits is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy import placement
from gpu_pool.policy.forecast import expected_wait, expected_waits, explain
from gpu_pool.policy.queue import Holding, Policy, Situation, Usage, Waiter
from gpu_pool.policy.queue_state import HoldingTime, Rules
from gpu_pool_client import DeviceStatus, Slice, parse_request
from support.pools import device

V100 = [device(index) for index in range(2)]
STAYS = [HoldingTime("ml", 500, 60.0 * minutes) for minutes in (10, 20, 30, 40, 50)]


def held(index: int, milli: int, ends_by: float | None = None, since: float = 0.0) -> Holding:
    part = Slice(V100[index], milli, V100[index].memory_mib * milli // 1000)
    return Holding("secret", "ml", (part,), ends_by, since)


def waiter(number: int, text: str = "50%", **facts: object) -> Waiter:
    names = {"user": f"secret{number}", "course": "ml", "since": float(number), **facts}
    return Waiter(number, parse_request(text), **names)  # type: ignore[arg-type]


def situation(
    line: Sequence[Waiter], holdings: Sequence[Holding], count: int = 2, now: float = 100.0
) -> Situation:
    found = [DeviceStatus(each, 0, 0, 0, 0) for each in V100[:count]]
    for each in holdings:
        found = placement.deduct(found, each.parts)
    return Situation(line, holdings, found, Rules(), Policy(), Usage(), now)


def test_it_says_what_is_needed_and_what_is_free() -> None:
    told = situation([waiter(1, "1"), waiter(2)], [held(0, 700), held(1, 900)])
    assert explain(2, told) == (
        "50% of one GPU is needed. Of 2 that would do, the one with most room has 30% and 9.6 GiB free."
    )
    assert explain(1, told).startswith("A whole GPU is needed.")


def test_of_several_gpus_it_says_how_many_are_free_and_how_much_of_the_next() -> None:
    told = "2 whole GPUs are needed. Of 2 that would do, "
    half, full = held(0, 600), held(1, 1000)
    assert explain(1, situation([waiter(1, "2")], [half, full])) == (
        f"{told}none is free; the one with most room has 40% and 12.8 GiB."
    )
    assert explain(1, situation([waiter(1, "2")], [half])) == (
        f"{told}1 is free; the next has 40% and 12.8 GiB."
    )
    assert explain(1, situation([waiter(1, "2")], [full])) == f"{told}1 is free."


def test_it_says_that_a_gpu_is_kept_free_for_somebody_and_never_for_whom() -> None:
    kept = waiter(1, "1", reserved=(V100[1].uuid,))
    text = explain(2, situation([kept, waiter(2)], [held(0, 1000), held(1, 20)]))
    assert text.endswith(
        "1 GPU is kept free for a large request that has waited longer, though you would fit there now."
    )
    assert "secret" not in text


def test_whoever_a_gpu_is_emptied_for_is_told_when_at_the_latest() -> None:
    kept = waiter(1, "1", reserved=(V100[1].uuid,))
    holdings = [held(0, 1000), held(1, 20, ends_by=700.0), held(1, 20, ends_by=400.0)]
    text = explain(1, situation([kept], holdings))
    assert text.endswith("A GPU is kept free for you; the leases that are still there end within 10 min.")
    unlimited = explain(1, situation([kept], [*holdings, held(1, 20)]))
    assert unlimited.endswith("A GPU is kept free for you.")


def test_whoever_a_gpu_is_emptied_for_is_told_when_it_likely_is_free() -> None:
    kept = waiter(1, "1", reserved=(V100[1].uuid,))
    history = [HoldingTime("", 20, 60.0 * minutes) for minutes in (10, 20, 30, 40, 50)]
    now = situation([kept], [held(0, 1000), held(1, 20, since=100.0)])
    now = replace(now, history=history, now=100.0)
    told = "A GPU is kept free for you; the leases that are still there likely end in about 50 min"
    assert explain(1, now).endswith(f"{told}.")
    limited = replace(now, holdings=[held(0, 1000), held(1, 20, since=100.0, ends_by=100.0 + 55 * 60)])
    assert explain(1, limited).endswith(f"{told}, and within 55 min at the latest.")


def test_a_parked_kernel_is_told_which_gpu_it_waits_for() -> None:
    parked = waiter(1, devices=frozenset([V100[1].uuid]), is_parked=True)
    text = explain(1, situation([parked], [held(1, 700)]))
    assert text.startswith("50% of GPU 1, where the kernel was, is needed. 30% and 9.6 GiB of it are free.")


def test_whoever_waits_for_what_is_drained_is_told_by_whom() -> None:
    drained = [replace(DeviceStatus(V100[1], 0, 0, 0, 0), drained=True, drained_at=0.0)]
    said = "An administrator has drained GPU 1 (since"
    one_is_left = explain(1, situation([waiter(1)], [held(0, 700)], count=1), drained)
    assert "30% and 9.6 GiB of it are free. " + said in one_is_left
    assert "Ask" not in one_is_left
    none_is_left = explain(1, situation([waiter(1)], [], count=0), drained)
    assert none_is_left.startswith(f"50% of one GPU is needed. {said}")
    assert none_is_left.endswith("Ask the administrator when it is in use again.")
    parked = waiter(1, devices=frozenset([V100[1].uuid]), is_parked=True)
    at_home = explain(1, situation([parked], [], count=1), drained)
    assert at_home.startswith(f"50% of GPU 1, where the kernel was, is needed. {said}")
    assert at_home.endswith("Ask the administrator when it is in use again.")
    elsewhere = waiter(1, "50% index=0")
    assert "drained" not in explain(1, situation([elsewhere], [held(0, 700)], count=1), drained)


def test_nothing_is_expected_while_fewer_than_five_stays_are_known() -> None:
    told = situation([waiter(1)], [held(0, 1000), held(1, 1000)])
    assert expected_wait(1, replace(told, history=STAYS[:4])) is None
    assert expected_wait(1, replace(told, history=STAYS)) is not None
    assert expected_wait(7, replace(told, history=STAYS)) is None


def test_stays_of_the_same_course_and_size_count_before_others() -> None:
    told = situation([waiter(1)], [held(0, 500), held(0, 500)], count=1)
    long = [HoldingTime("other", 20, 1e6) for _ in range(50)]
    assert expected_wait(1, replace(told, history=[*long, *STAYS])) == expected_wait(
        1, replace(told, history=STAYS)
    )


def test_the_range_lies_within_what_the_stays_allow_and_grows_along_the_line() -> None:
    line = [waiter(number) for number in range(1, 5)]
    told = situation(line, [held(0, 500), held(0, 500)], count=1)
    waits = expected_waits(replace(told, history=STAYS))
    assert list(waits) == [1, 2, 3, 4]
    soonest, latest = waits[1]
    assert 0 < soonest < latest < 3 * 50 * 60 + 120
    ranges = list(waits.values())
    assert ranges == sorted(ranges)


@pytest.mark.parametrize("age", [0.0, 25 * 60.0, 1e5])
def test_a_lease_is_never_expected_to_outlast_its_limit(age: float) -> None:
    holding = replace(held(0, 1000, ends_by=age + 60.0), since=0.0)
    told = situation([waiter(1, since=age)], [holding], count=1, now=age)
    wait = expected_wait(1, replace(told, history=STAYS))
    assert wait is not None
    assert wait[1] <= 3 * 60 + 120


def test_nothing_is_told_where_a_lease_has_outlasted_all_that_are_known() -> None:
    now = 60.0 * 51
    told = situation([waiter(1, since=now)], [held(0, 1000)], count=1, now=now)
    assert expected_wait(1, replace(told, history=STAYS)) is None
    # Unless it has to end some time, or another is in nobody's way.
    limited = situation([waiter(1, since=now)], [held(0, 1000, ends_by=now + 600)], count=1, now=now)
    wait = expected_wait(1, replace(limited, history=STAYS))
    assert wait is not None
    assert wait[1] <= 3 * 600 + 120
    beside = situation([waiter(1, since=now)], [held(0, 1000), held(1, 1000, since=now)], now=now)
    assert expected_wait(1, replace(beside, history=STAYS * 4)) is not None


def test_leases_that_are_still_held_count_as_longer_than_those_that_have_ended() -> None:
    """All came at once: those few who have left early are no measure for those who come anew."""
    now = 60.0 * 51
    at_once, lately = [held(0, 100) for _ in range(10)], held(1, 1000, since=now)
    stays = [HoldingTime("ml", size, each.seconds) for each in STAYS for size in (100, 1000)]
    line = [waiter(1, "1", since=now, devices=frozenset([V100[1].uuid]), is_parked=True)]
    known = replace(lately, parts=(Slice(V100[1], 100, 3276),))
    alone, beside = ([known], [*at_once, known])
    assert expected_wait(1, replace(situation(line, alone, now=now), history=stays)) is not None
    assert expected_wait(1, replace(situation(line, beside, now=now), history=stays)) is None


@given(
    st.lists(st.floats(1, 1e5), min_size=5, max_size=40),
    st.floats(0, 2e5),
    st.none() | st.floats(0, 1e5),
)
def test_the_range_comes_from_those_who_lasted_as_long_as_the_holder_has(
    seconds: list[float], age: float, left: float | None
) -> None:
    ends_by = None if left is None else age + left
    told = situation([waiter(1, since=age)], [held(0, 1000, ends_by)], count=1, now=age)
    wait = expected_wait(1, replace(told, history=[HoldingTime("ml", 1000, each) for each in seconds]))
    longer = [each - age for each in seconds if each > age]
    if wait is None:
        assert not longer
        assert left is None
        return
    soonest, latest = wait
    assert 0 <= soonest <= latest
    most = min(max(longer, default=math.inf), math.inf if left is None else left)
    assert latest <= most * 3 + 120 + 1e-6
    if longer and left is None:
        assert soonest >= 0.5 * min(longer) - 1e-6
