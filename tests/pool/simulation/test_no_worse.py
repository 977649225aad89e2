"""No workload makes the fair order use much less of the pool than strict order does, tried on random ones.

What is compared is use until all is done. Up to an earlier moment the orders have done different work: one
that lets the short go first has only the long and large left by then. So do those that leave nothing idle.

Which lease begins last is chance for all that do not know lengths: a long one may keep one device busy when
all others are free. So where the same order uses less than strict order though it keeps nothing free, that
is the measure.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_pool.policy.queue import Policy
from gpu_pool.simulation import ORDERS, Arrival, SimulatedRun, simulate
from gpu_pool_client import parse_request
from support.pools import device

SIZES = [parse_request(text) for text in ("10%", "30%", "50%", "81%", "1", "2", "4")]


def workload(seed: int, load: float, large: float, spread: float) -> list[Arrival]:
    """Return 120 arrivals on four GPUs: so loaded, so many of them large, and lengths so far apart."""
    stream, at, coming = random.Random(seed), 0.0, []
    for number in range(120):
        request = SIZES[stream.randrange(5, 7) if stream.random() < large else stream.randrange(5)]
        stay = min(43_200.0, stream.lognormvariate(7.5, spread))
        coming.append(Arrival(at, f"u{number % 5}", "ab"[number % 2], request, stay))
        milli = request.count * (request.milli or 0)
        at += stream.expovariate(1.0) * stay * milli / (4000 * load)
    return coming


def use(run: SimulatedRun) -> float:
    """Return the part of the pool that was held until all who came were served."""
    work = sum(each.milli * each.arrival.stay for each in run.outcomes)
    done = max(each.held_at + each.arrival.stay for each in run.outcomes)
    return work / (done * 1000 * len(run.devices))


def use_while_they_come(run: SimulatedRun) -> float:
    """Return the part of the pool that was held from the first request to the last."""
    last = max(each.arrival.at for each in run.outcomes)
    ends = (
        each.milli * max(0.0, min(last, each.held_at + each.arrival.stay) - each.held_at)
        for each in run.outcomes
    )
    return sum(ends) / (last * 1000 * len(run.devices))


def run(made: tuple[int, float, float, float], order: str) -> SimulatedRun:
    return simulate(workload(*made), [device(index) for index in range(4)], ORDERS[order])


def run_unreserved(made: tuple[int, float, float, float]) -> SimulatedRun:
    """Return a run of the fair order in which nobody has waited long enough for anything to be kept free."""
    devices = [device(index) for index in range(4)]
    return simulate(workload(*made), devices, ORDERS["fair"], Policy(drain_after=math.inf))


def compare(made: tuple[int, float, float, float]) -> None:
    ours, strict = use(run(made, "fair")), use(run(made, "strict order"))
    assert ours >= 0.9 * strict or ours >= 0.9 * use(run_unreserved(made))


workloads = st.tuples(
    st.integers(0, 10**6), st.floats(0.4, 1.5), st.floats(0.0, 0.4), st.floats(0.2, 2.0)
)  # fmt: skip
#: In these, less than nine tenths of strict order was in use while requests came; in the last two until all
#: was done as well, by one or another order that keeps nothing free, or by ours.
FOUND = [
    (64621, 1.375, 0.0, 1.375),
    (1920, 1.0, 0.0625, 1.0),
    (511013, 0.42272107990860025, 0.04190713363634999, 1.3261305722619214),
    # Here a rule that reserves whatever it costs, and lets nobody in meanwhile, uses too little.
    (792506, 1.0407227955514249, 0.01993674569258541, 1.9498199401612486),
    (169, 1.09375, 0.0, 1.0625),
    (169, 1.125, 0.0, 1.0625),
]


@settings(max_examples=15)
@given(workloads)
def test_no_workload_makes_fair_use_less_than_nine_tenths_of_strict_order(
    made: tuple[int, float, float, float],
) -> None:
    compare(made)


@pytest.mark.parametrize("made", FOUND)
def test_nor_do_those_in_which_less_was_in_use_while_requests_came(
    made: tuple[int, float, float, float],
) -> None:
    compare(made)


@pytest.mark.long
@settings(max_examples=2000)
@given(workloads)
def test_no_workload_of_thousands_does(made: tuple[int, float, float, float]) -> None:
    compare(made)


def test_until_all_is_done_even_an_order_that_leaves_nothing_idle_may_use_less() -> None:
    # A lease of eight hours and a half begins among the last.
    smallest, strict = run(FOUND[-1], "smallest first"), run(FOUND[-1], "strict order")
    assert use(smallest) < 0.9 * use(strict)


def test_while_requests_come_even_an_order_that_leaves_nothing_idle_may_use_less() -> None:
    # Backfill reserves nothing: whoever fits is served. By the last request it has served the small ones that
    # strict order still has to serve, and what is left is large.
    backfill, strict = run(FOUND[1], "backfill"), run(FOUND[1], "strict order")
    assert use_while_they_come(backfill) < 0.9 * use_while_they_come(strict)
    assert use(backfill) >= use(strict)


@pytest.mark.long
def test_while_requests_come_fair_uses_on_average_no_less_than_strict_order() -> None:
    for load in (0.5, 1.0, 1.5):
        made = [(seed, load, 0.1 * (seed % 5), 0.5 * (seed % 4 + 1)) for seed in range(20)]
        ours = sum(use_while_they_come(run(each, "fair")) for each in made)
        assert ours >= sum(use_while_they_come(run(each, "strict order")) for each in made)
