"""The queue: its order of turn, its reservations, and what holds for every line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool.policy.queue import Holding, Policy, Usage, faded_use
from gpu_pool_client import Slice
from support import queues
from support.queues import HOUR, V100, decided, granted, holding, ordered, waiter

# -- The order of turn -------------------------------------------------------


def test_equals_come_in_order_of_arrival() -> None:
    line = [waiter(3, user="a"), waiter(1, user="b"), waiter(2, user="c")]
    assert ordered(line) == [1, 2, 3]


def test_a_priority_comes_before_everything_else() -> None:
    line = [waiter(1, user="new"), waiter(2, user="old", priority=1), waiter(3, user="old", priority=1)]
    assert ordered(line, [holding(0, 500, user="old")]) == [2, 3, 1]


def test_a_user_who_holds_comes_after_one_who_does_not() -> None:
    line = [waiter(1, user="has"), waiter(2, user="new")]
    assert ordered(line, [holding(0, 20, user="has")]) == [2, 1]


def test_a_user_who_lately_used_more_comes_later() -> None:
    usage = Usage(users={("", "has"): 20 * HOUR})
    assert ordered([waiter(1, user="has"), waiter(2, user="new")], usage=usage) == [2, 1]


def test_waiting_outweighs_use() -> None:
    usage = Usage(users={("", "has"): 20 * 60.0})
    line = [waiter(1, user="has", since=-120.0), waiter(2, user="new", since=0.0)]
    assert ordered(line, usage=usage) == [1, 2]


def test_the_second_wish_of_one_comes_after_the_first_of_the_others() -> None:
    line = [waiter(number, user="a") for number in (1, 2, 3)] + [waiter(4, user="b"), waiter(5, user="c")]
    assert ordered(line) == [1, 4, 5, 2, 3]


def test_a_course_that_has_more_than_its_part_comes_later() -> None:
    held = [holding(index, 1000, course="a") for index in (0, 1)] + [holding(2, 900, course="b")]
    line = [waiter(1, course="a"), waiter(2, course="b")]
    assert ordered(line, held) == [2, 1]
    assert ordered(line, held, policy=Policy(weights={"a": 3.0})) == [1, 2]


def test_a_course_of_no_weight_gets_what_others_leave() -> None:
    line = [waiter(1, "1", course="none", user="x"), waiter(2, "1", course="a")]
    decision = decided(line, count=1, policy=Policy(weights={"none": 0.0}))
    assert granted(decision) == [2]
    assert granted(decided(line[:1], count=1, policy=Policy(weights={"none": 0.0}))) == [1]


def test_use_fades_to_half_in_a_half_life() -> None:
    now = faded_use(20, 0.0, HOUR, HOUR, half_life=HOUR)
    later = faded_use(20, 0.0, HOUR, 2 * HOUR, half_life=HOUR)
    assert later == pytest.approx(now / 2)
    assert faded_use(20, 0.0, 60.0, 60.0, half_life=1e9) == pytest.approx(20 * 60)


# -- Backfill and reservations -----------------------------------------------


def test_the_small_pass_the_large_until_it_has_waited_long_enough() -> None:
    held = [holding(index, 900, ends_by=HOUR * (4 - index), user=f"{index}") for index in range(4)]
    large, small = waiter(1, "1", since=0.0), waiter(2, "2%", user="b", since=1.0)
    early = decided([large, small], held, now=1799.0)
    assert (granted(early), early.reservations) == ([2], {})
    late = decided([large, small], held, now=1800.0)
    assert (granted(late), late.reservations) == ([2], {1: (V100[3].uuid,)})


def test_nobody_else_is_placed_on_a_reserved_device() -> None:
    kept = waiter(1, "1", since=0.0, reserved=(V100[0].uuid,))
    decision = decided([kept, waiter(2, "50%", user="b")], [holding(0, 100, HOUR)], count=1)
    assert (granted(decision), decision.reservations) == ([], {1: (V100[0].uuid,)})


def test_whoever_devices_are_kept_for_gets_them_as_soon_as_they_are_free() -> None:
    kept = waiter(9, "1", reserved=(V100[1].uuid,), user="much", since=90.0)
    decision = decided([waiter(1, "1", user="b"), kept], [holding(0, 500, user="much")], count=2)
    assert [(w.number, parts[0].device.index) for w, parts in decision.grants] == [(9, 1)]


def test_a_reservation_that_is_needless_frees_its_device_at_once() -> None:
    kept = waiter(2, "50%", reserved=(V100[0].uuid,), user="b", since=2.0)
    first = waiter(1, "40%", user="a", since=1.0)
    held = [holding(0, 600), holding(1, 450)]
    decision = decided([first, kept], held, count=2, now=10.0)
    assert granted(decision) == [1]
    assert decision.reservations == {2: (V100[0].uuid,)}
    decision = decided([kept, waiter(3, "40%", user="c")], held, count=2, now=10.0)
    assert [(w.number, parts[0].device.index) for w, parts in decision.grants] == [(2, 1), (3, 0)]


def test_a_parked_lease_waits_for_its_own_device_only() -> None:
    line = [waiter(1, "50%", devices=frozenset([V100[0].uuid])), waiter(2, "50%", user="b")]
    decision = decided(line, [holding(0, 1000)], count=2)
    assert [(w.number, parts[0].device.index) for w, parts in decision.grants] == [(2, 1)]


def test_the_device_that_will_be_free_soonest_is_emptied() -> None:
    ends = [900.0, 300.0, None, 600.0]
    held = [holding(index, 20, end, user=f"{index}") for index, end in enumerate(ends)]
    held.append(holding(1, 20, 700.0, user="x"))
    decision = decided([waiter(1, "1", since=-HOUR)], held)
    assert decision.reservations == {1: (V100[3].uuid,)}


def test_a_device_that_is_gone_ends_a_reservation_and_another_is_emptied() -> None:
    held = [holding(0, 20, HOUR), holding(1, 20, HOUR)]
    line = [waiter(1, "1", since=-HOUR, reserved=(V100[3].uuid,))]
    assert decided(line, held, count=2).reservations == {1: (V100[1].uuid,)}


def test_one_reservation_is_made_at_a_time_and_all_who_wait_for_its_size_share_it() -> None:
    held = [holding(index, 20, HOUR, user=f"{index}") for index in range(4)]
    line = [waiter(number, "2", user=f"u{number}", since=-HOUR) for number in (1, 2, 3)]
    line.append(waiter(4, "1", user="u4", since=-HOUR))
    assert decided(line, held).reservations == dict.fromkeys((1, 2, 3), (V100[2].uuid, V100[3].uuid))
    alone = [waiter(number, "1", user=f"u{number}", since=-HOUR) for number in (1, 2)]
    assert decided(alone, held).reservations == {1: (V100[3].uuid,)}


def test_once_the_first_of_a_size_has_begun_whoever_comes_for_it_later_waits_as_all_others_do() -> None:
    kept = V100[2].uuid, V100[3].uuid
    both = Holding("a", "", tuple(Slice(each, 1000, each.memory_mib) for each in V100[2:]), HOUR)
    held = [holding(index, 20, HOUR, user=f"{index}") for index in range(2)] + [both]
    line = [waiter(1, "2", reserved=kept), waiter(2, "2", user="b", since=90.0)]
    assert decided(line, held).reservations == {1: kept}


def test_a_request_for_all_devices_is_emptied_for_once_it_is_the_only_one() -> None:
    held = [holding(index, 20, HOUR, user=f"{index}") for index in range(4)]
    every = waiter(1, "4", since=-2 * HOUR, user="a")
    other = waiter(2, "1", since=-HOUR, user="b", reserved=(V100[0].uuid,))
    assert list(decided([every, other], held).reservations) == [2]
    assert decided([every], held).reservations == {1: tuple(each.uuid for each in V100)}


def test_on_one_single_gpu_emptying_is_strict_order() -> None:
    line = [waiter(1, "1", since=-HOUR), waiter(2, "2%", user="b")]
    assert granted(decided(line, [holding(0, 20, HOUR)], count=1)) == [2]
    line = [replace(line[0], reserved=(V100[0].uuid,)), line[1]]
    assert granted(decided(line, [holding(0, 20, HOUR)], count=1)) == []


def test_nothing_is_emptied_for_what_the_next_lease_to_end_makes_room_for() -> None:
    held = [holding(0, 20, HOUR, user=f"{number}") for number in range(50)]
    assert decided([waiter(1, "2%", since=-HOUR)], held, count=1).reservations == {}


def test_a_device_of_one_size_is_emptied_for_a_smaller_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "V100", [replace(V100[0], one_size=True)])
    held = [holding(0, 200) for _ in range(5)]
    smaller, same = waiter(1, "10%", since=-HOUR), waiter(2, "20%", since=-HOUR)
    # The next to end makes room for its own size alone, and that may go on for ever.
    assert decided([smaller, same], held[1:], count=1).reservations == {1: (V100[0].uuid,)}
    assert granted(decided([replace(smaller, reserved=(V100[0].uuid,)), same], held[1:], count=1)) == []
    assert decided([same], held, count=1).reservations == {}
    by_memory = waiter(1, "6550MiB", since=-HOUR)
    assert decided([by_memory], held, count=1).reservations == {1: (V100[0].uuid,)}


def test_a_course_that_would_get_more_than_its_part_waits_longer_for_devices_to_be_emptied() -> None:
    held = [holding(index, 1000, HOUR, course="lab") for index in (0, 1)]
    held += [holding(index, 20, HOUR, course="class") for index in (2, 3)]
    lab = waiter(1, "1", course="lab", since=0.0)
    assert decided([lab], held, now=1800.0).reservations == {}
    assert decided([lab], held, now=16 * 1800.0).reservations == {1: (V100[3].uuid,)}
    assert decided([lab], held, now=1800.0, policy=Policy({"lab": 3.0})).reservations != {}


def test_a_later_request_of_the_same_user_comes_no_sooner_than_the_earlier_one() -> None:
    line = [
        waiter(1, "10%", user="has"),
        waiter(2, "1", user="has"),
        waiter(3, "1", user="new", since=2000.0),
    ]
    usage = Usage(users={("", "has"): 1e6})
    assert ordered(line[1:], usage=usage) == [2, 3]
    assert ordered(line, usage=usage) == [3, 1, 2]
