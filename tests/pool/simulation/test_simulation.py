"""The promises of the queue, kept in simulated time, and the figures that the documentation states."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gpu_pool.policy.queue import Decision, Policy, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool.simulation import (
    ORDERS,
    WORKLOADS,
    Arrival,
    ArrivalOutcome,
    RunFigures,
    SimulatedRun,
    arrivals,
    figures,
    simulate,
)
from gpu_pool.simulation.engine import SimulatedMoment, Simulation
from gpu_pool.simulation.history import read_history
from gpu_pool.simulation.plot import waits_plot
from gpu_pool_client import BadRequest, parse_request
from support.pools import device

HOUR = 3600.0
V100 = [device(index) for index in range(4)]


def test_the_heading_says_on_how_many_gpus_and_how_loaded_they_are() -> None:
    mixed = WORKLOADS["mixed"]
    assert mixed.title(V100).endswith("5% for a whole GPU; 4 GPUs, load 0.7")
    assert mixed.title(V100 * 2).endswith("; 8 GPUs, load 0.35")
    assert WORKLOADS["one-size"].title(V100[:1]).endswith("2% of a GPU; 1 GPU, load 0.95")


def backlog(course: str, size: str, seed: int, users: int = 5) -> list[Arrival]:
    """Return more requests than the pool could grant in an hour, waiting from the first minute on."""
    stream = random.Random(f"{course}/{seed}")
    return [
        Arrival(
            0.0 if number < 40 else stream.random() * HOUR,
            f"{course}-{number % users}",
            course,
            parse_request(size),
            stream.uniform(180.0, 540.0),
        )
        for number in range(150)
    ]


def received(run: SimulatedRun, until: float) -> Counter[str]:
    """Return milli-seconds held by course until then."""
    found: Counter[str] = Counter()
    for each in run.outcomes:
        seconds = min(until, each.held_at + each.arrival.stay) - each.held_at
        found[each.arrival.course] += round(each.milli * max(0.0, seconds))
    return found


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 3.0}


def shares(sizes: tuple[str, str, str], seed: int) -> dict[str, float]:
    """Return what courses with these sizes, always with somebody waiting, receive in an hour."""
    coming = [
        each for course, size in zip(WEIGHTS, sizes, strict=True) for each in backlog(course, size, seed)
    ]
    got = received(simulate(coming, V100[:2], decide, Policy(WEIGHTS)), HOUR)
    return {course: got[course] / got.total() for course in WEIGHTS}


@pytest.mark.parametrize("seed", range(3))
def test_backlogged_courses_receive_their_weight_within_five_percent_over_an_hour(seed: int) -> None:
    for course, share in shares(("10%", "10%", "10%"), seed).items():
        assert share == pytest.approx(WEIGHTS[course] / 6, rel=0.05)


def test_courses_of_different_sizes_receive_their_weight_within_five_hundredths_of_the_pool() -> None:
    for course, share in shares(("5%", "10%", "20%"), seed=0).items():
        assert share == pytest.approx(WEIGHTS[course] / 6, abs=0.05)


def moments(coming: list[Arrival], count: int, policy: Policy | None = None) -> Simulation:
    return Simulation(coming, V100[:count], decide, policy or Policy(), Rules())


def test_whom_a_device_is_emptied_for_waits_at_most_for_the_longest_lease_on_it() -> None:
    """And for those of its size before it; what is let in because it likely ends before is there as well."""
    coming = [each for each in arrivals(WORKLOADS["mixed"]) if each.at < 4 * 24 * HOUR]
    latest: dict[int, float] = {}
    served = later = 0
    for moment in moments(coming, 4).moments():
        reservations = moment.decision.reservations
        for waiter, _ in moment.decision.grants:
            served += waiter.number in latest
            later += moment.situation.now > latest.pop(waiter.number, math.inf)
        for number, kept in list(reservations.items())[: not latest]:
            latest[number] = longest_end(moment, kept)
        # Given up, where its end had moved away.
        latest = {number: end for number, end in latest.items() if number in reservations}
    assert served > 10
    assert later <= served / 10


def longest_end(moment: SimulatedMoment, uuids: tuple[str, ...]) -> float:
    """Return when the last lease on these devices ends at the latest; all are limited to 4 hours."""
    just = [(moment.situation.now + 4 * HOUR, parts) for _, parts in moment.decision.grants]
    held = [(each.ends_by or 0.0, each.parts) for each in moment.situation.holdings]
    return max(end for end, parts in [*held, *just] for part in parts if part.device.uuid in uuids)


def crowd(course: str, size: str, hours: float, every: float) -> list[Arrival]:
    """Return ever new users, more than there is room for, who stay half an hour to an hour."""
    stream = random.Random(course)
    request = parse_request(size)
    return [
        Arrival(number * every, f"new-{number}", course, request, stream.uniform(1800, 3600), HOUR)
        for number in range(int(hours * HOUR / every))
    ]


@pytest.mark.parametrize("course", ["class", "lab"])
def test_a_large_request_is_not_starved_by_ever_new_small_ones(course: str) -> None:
    coming = crowd("class", "10%", 8, every=100.0)
    coming.append(Arrival(HOUR, "large", course, parse_request("1"), HOUR, HOUR))
    run = simulate(coming, V100[:2], decide)
    assert outcome(run, "large").wait <= Policy().drain_after + HOUR


def test_a_user_who_holds_already_is_not_starved_by_ever_new_users() -> None:
    coming = crowd("class", "10%", 8, every=150.0)
    coming.insert(0, Arrival(0.0, "eager", "class", parse_request("10%"), 6 * HOUR))
    coming.append(Arrival(HOUR, "eager", "class", parse_request("10%"), HOUR))
    run = simulate(coming, V100[:1], decide)
    second = [each for each in run.outcomes if each.arrival.user == "eager"][1]
    others = [each for each in run.outcomes if 2 * HOUR < each.held_at < second.held_at]
    assert HOUR < second.wait <= 5 * HOUR
    assert others


def outcome(run: SimulatedRun, user: str) -> ArrivalOutcome:
    return next(each for each in run.outcomes if each.arrival.user == user)


# -- The figures -------------------------------------------------------------


def compared(name: str) -> dict[str, RunFigures]:
    workload = WORKLOADS[name]
    coming = arrivals(workload)
    policy = Policy(workload.weights)
    return {
        order: figures(simulate(coming, V100, ORDERS[order], policy))
        for order in ("fair", "strict order", "backfill")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixed", "research"])
def test_ours_beats_strict_order_by_far_and_is_as_full_as_backfill(name: str) -> None:
    by_order = compared(name)
    ours, strict, backfill = by_order["fair"], by_order["strict order"], by_order["backfill"]
    assert ours.waits.p95 < strict.waits.p95 / 10
    assert ours.utilisation > strict.utilisation - 0.002
    assert ours.utilisation > backfill.utilisation - 0.005


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixed", "research"])
def test_whole_gpus_are_had_sooner_than_by_backfill(name: str) -> None:
    by_order = compared(name)
    ours, backfill = by_order["fair"], by_order["backfill"]
    assert ours.whole.p95 < backfill.whole.p95
    assert ours.whole.median < backfill.whole.median
    assert ours.whole.worst < backfill.whole.worst


@pytest.mark.long
def test_the_eager_wait_and_the_others_hardly_do() -> None:
    coming = [each for each in arrivals(WORKLOADS["one-size"]) if each.at < 3 * 24 * HOUR]
    fair = figures(simulate(coming, V100[:1], decide)).waits
    strict = figures(simulate(coming, V100[:1], ORDERS["strict order"])).waits
    assert fair.median < strict.median / 2
    assert fair.mean == pytest.approx(strict.mean, rel=0.1)


# -- The simulator itself ----------------------------------------------------


def test_the_same_seed_gives_the_same_people_and_another_seed_others() -> None:
    mixed = replace(WORKLOADS["mixed"], lasts=HOUR)
    assert arrivals(mixed) == arrivals(mixed, seed=mixed.seed)
    assert arrivals(mixed) != arrivals(mixed, seed=2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_asks_for_as_much_as_it_says(name: str) -> None:
    workload = WORKLOADS[name]
    asked = sum(
        each.stay * each.request.count * (each.request.milli or 0) / 1000 for each in arrivals(workload)
    )
    assert asked / workload.lasts == pytest.approx(sum(group.load for group in workload.groups), rel=0.06)


def test_two_who_want_the_same_gpu_are_served_one_after_the_other() -> None:
    coming = [Arrival(at, f"u{at}", "", parse_request("1"), 100.0) for at in (0.0, 40.0)]
    found = figures(simulate(coming, V100[:1], ORDERS["strict order"]))
    assert (found.waits.median, found.waits.worst, found.waits.mean) == (60.0, 60.0, 30.0)
    assert found.utilisation == 1.0
    assert found.by_user["u0.0"].worst == 0.0
    assert found.jain == pytest.approx((1 + 100 / 160) ** 2 / (2 * (1 + (100 / 160) ** 2)))


def test_a_length_that_was_said_with_a_recorded_request_is_its_end_and_is_believed() -> None:
    coming = [
        Arrival(0.0, "said", "", parse_request("50% for 20min"), HOUR),
        Arrival(0.0, "long", "", parse_request("50%"), HOUR),
        Arrival(60.0, "next", "", parse_request("50%"), HOUR, longest=2 * HOUR),
    ]
    simulation = moments(coming, 1)
    held, waiting = [], []
    for moment in simulation.moments():
        held += moment.situation.holdings
        waiting += moment.situation.queue
    assert {each.user: (each.ends_by, each.is_said) for each in held} == {
        "said": (1200.0, True),
        "long": (None, False),
    }
    assert {each.user: (each.longest, each.is_said) for each in waiting}["next"] == (2 * HOUR, False)
    assert [each.held_at for each in simulation.outcomes] == [0.0, 0.0, 1200.0]


def test_the_other_orders_are_what_their_names_say() -> None:
    def first(order: str, *sizes: str) -> list[float]:
        coming = [Arrival(0.0, "", "", parse_request("60%"), 50.0)]
        coming += [Arrival(1.0 + n, "", "", parse_request(s), 50.0) for n, s in enumerate(sizes)]
        outcomes = simulate(coming, V100[:1], ORDERS[order]).outcomes
        return [each.held_at for each in sorted(outcomes, key=lambda each: each.arrival.at)][1:]

    assert first("strict order", "1", "20%") == [50.0, 100.0]
    assert first("backfill", "1", "20%") == [52.0, 2.0]
    assert first("smallest first", "80%", "50%") == [100.0, 50.0]


def test_a_history_is_read_and_counted_from_its_first_request() -> None:
    lines = [
        '{"requested_at": 1060, "held_seconds": 5, "user": "b", "course": null, "request": "2%", "id": 7}\n',
        "\n",
        '{"requested_at": 1000, "held_seconds": 9, "user": "a", "course": "ml", "request": "2x50%"}\n',
        '{"requested_at": 1001, "held_seconds": null, "user": "never", "request": "2%"}\n',
    ]
    assert [(each.at, each.user, each.course, each.stay) for each in read_history(lines)] == [
        (0.0, "a", "ml", 9.0),
        (60.0, "b", "", 5.0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        "{}",
        '{"requested_at": 1, "request": "lots"}',
        '{"requested_at": NaN, "request": "2%"}',
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str) -> None:
    with pytest.raises(BadRequest, match="Line 1 of the history"):
        read_history([line])


def test_the_plot_is_well_formed_and_names_every_order_and_size() -> None:
    coming = [Arrival(float(n), "", "", parse_request(size), 9e3) for n, size in enumerate(("1", "2%", "1"))]
    by_order = {name: figures(simulate(coming, V100[:1], order)) for name, order in ORDERS.items()}
    drawn = waits_plot("<mixed>", by_order)
    words = {each.text for each in ElementTree.fromstring(drawn).iter() if each.text}
    assert {"<mixed>", "2%", "1", *ORDERS} <= words


def test_an_order_that_grants_nothing_ends() -> None:
    run = simulate([Arrival(0.0, "", "", parse_request("2%"), 1.0)], V100, lambda *_: Decision((), {}))
    assert run.outcomes == ()
