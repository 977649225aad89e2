"""What holds for every line: laws of the queue, tried on made-up ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from gpu_pool.policy import placement, queue
from gpu_pool.policy.placement import give_back
from gpu_pool.policy.queue import Holding, Policy, Situation, Usage, Waiter, decide
from gpu_pool_client import parse_request
from gpu_pool_client._free import fits
from support.queues import RULES, decided, granted, lines, occupied, ordered, statuses, uuids, waiter


@given(lines, occupied)
def test_nothing_is_ever_granted_twice(line: list[Waiter], held: list[Holding]) -> None:
    left = statuses(held)
    for each, parts in decided(line, held, now=4000.0).grants:
        free = {status.device.uuid: status for status in left}
        assert all(fits(part, free[part.device.uuid]) for part in parts)
        assert len({part.device.uuid for part in parts}) == each.request.count
        assert not each.devices or {part.device.uuid for part in parts} <= each.devices
        left = placement.deduct(left, parts)


@given(lines, occupied)
def test_nobody_waits_for_what_is_free_unless_it_is_reserved_for_somebody_named(
    line: list[Waiter], held: list[Holding]
) -> None:
    decision = decided(line, held, now=4000.0)
    left = statuses(held)
    for _, parts in decision.grants:
        left = placement.deduct(left, parts)
    for each in line:
        if each.number in granted(decision):
            continue
        others = {u for number, kept in decision.reservations.items() if number != each.number for u in kept}
        mine = [s for s in left if s.device.uuid not in others]
        mine = [s for s in mine if not each.devices or s.device.uuid in each.devices]
        assert placement.place(each.request, mine, RULES) is None


@given(lines, occupied)
def test_one_reservation_at_a_time_is_for_those_who_wait_and_ask_for_the_same(
    line: list[Waiter], held: list[Holding]
) -> None:
    decision = decided(line, held, now=4000.0)
    kept = set(decision.reservations.values())
    assert len(kept) <= 1
    assert all(len(each) == len(set(each)) for each in kept)
    assert set(decision.reservations) <= {each.number for each in line} - set(granted(decision))
    for_whom = [each for each in line if each.number in decision.reservations]
    assert len({(each.request, each.devices, each.batch) for each in for_whom}) <= 1


@given(lines, occupied)
def test_reservations_are_stable_from_decision_to_decision(line: list[Waiter], held: list[Holding]) -> None:
    first = decided(line, held, now=4000.0)
    left = [
        replace(each, reserved=first.reservations.get(each.number, ()))
        for each in line
        if each.number not in granted(first)
    ]
    # Whoever else comes takes from batch work what was kept free for it.
    is_batch = bool(left) and all(each.batch for each in left)
    newcomer = waiter(20_000, "2%", user="new", since=4000.0, priority=1, batch=is_batch)
    held = [*held, *(Holding(w.user, w.course, parts, None, 4000.0) for w, parts in first.grants)]
    second = decided([*left, newcomer], held, now=4001.0)
    assert first.reservations.items() <= second.reservations.items()


@given(lines, occupied)
def test_the_same_size_of_the_same_user_comes_in_order_of_arrival(
    line: list[Waiter], held: list[Holding]
) -> None:
    line = [replace(each, reserved=()) for each in line]
    decision = decided(line, held, now=4000.0)
    served = set(granted(decision))

    def kind(each: Waiter) -> tuple[object, ...]:
        return each.course, each.user, each.request, each.devices, each.priority

    for later in line:
        for earlier in line:
            if kind(earlier) == kind(later) and (earlier.since, earlier.number) < (later.since, later.number):
                assert later.number not in served or earlier.number in served


@given(lines, occupied, st.randoms(use_true_random=False))
def test_a_decision_depends_on_nothing_but_what_it_is_told(
    line: list[Waiter], held: list[Holding], random: object
) -> None:
    shuffled = list(line)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    line = [replace(each, reserved=()) for each in line]
    shuffled = [replace(each, reserved=()) for each in shuffled]
    assert decided(line, held, now=4000.0) == decided(shuffled, held, now=4000.0)


#: Who waits together in lines that are longer than what is granted of them.
crowds = st.lists(
    st.builds(
        Waiter,
        number=st.integers(0, 10_000),
        request=st.sampled_from([parse_request(text) for text in ("50%", "100%", "1", "2", "33%")]),
        devices=st.sampled_from([frozenset(), frozenset(), frozenset(uuids[:1])]),
        user=st.sampled_from("abcdefghijkl"),
        course=st.sampled_from(["", "lab"]),
        since=st.integers(0, 40).map(lambda minutes: 100.0 * minutes),
    ),
    min_size=15,
    max_size=40,
    unique_by=lambda each: each.number,
)
uses = st.dictionaries(
    st.tuples(st.sampled_from(["", "lab"]), st.sampled_from("abcdefghijkl")), st.floats(0, 2e6), max_size=12
)
#: Users who come before the others of their course.
priors = st.sampled_from(["", "", "a", "kl"])


def crowd(
    line: list[Waiter], held: list[Holding], used: dict[tuple[str, str], float], prior: str
) -> Situation:
    """Return a situation with the reservations that a first decision makes."""
    line = [replace(each, priority=each.user in prior) for each in line]
    now = Situation(line, held, statuses(held), RULES, Policy(), Usage({}, used), 4000.0)
    kept = decide(now).reservations
    return replace(now, queue=[replace(each, reserved=kept.get(each.number, ())) for each in line])


@given(crowds, occupied, uses, priors, st.sampled_from(["", *uuids]))
def test_grants_need_nobody_who_could_not_be_placed_if_nothing_were_reserved(
    line: list[Waiter], held: list[Holding], used: dict[tuple[str, str], float], prior: str, gone: str
) -> None:
    whole = crowd(line, held, used, prior)
    whole = replace(whole, statuses=[each for each in whole.statuses if each.device.uuid != gone])
    few = [
        each
        for each in whole.queue
        if each.reserved
        or placement.place(
            each.request, [s for s in whole.statuses if s.device.uuid in (each.devices or uuids)], RULES
        )
    ]
    event("read in full" if len(few) == len(line) else "in part")
    event("reserved" if any(each.reserved for each in few) else "nothing reserved")
    part = replace(whole, queue=few, courses=frozenset(each.course for each in whole.queue))
    assert queue.grant(part).grants == decide(whole).grants


@given(lines)
def test_everybody_stands_in_line_once(line: list[Waiter]) -> None:
    assert sorted(ordered(line)) == sorted(each.number for each in line)


@given(occupied)
def test_background_undoes_granting(held: list[Holding]) -> None:
    empty = statuses([])
    for each in held:
        parts = each.parts
        assert give_back(placement.deduct(empty, parts), parts) == empty
