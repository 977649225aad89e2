"""How often the waits that people are told come true, in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool.devices.inventory import parse_devices
from gpu_pool.policy.queue import Policy
from gpu_pool.simulation import WORKLOADS, Arrival, Workload, arrivals
from gpu_pool.simulation.backtest import Backtest, backtest
from gpu_pool_client import parse_request

HOUR = 3600.0
GPU = parse_devices("V100-SXM2-32GB:1")


def days(workload: Workload, count: float, every: int) -> Backtest:
    short = replace(workload, lasts=count * 24 * HOUR)
    policy = Policy(weights=workload.weights)
    return backtest(arrivals(short), parse_devices(workload.devices), policy, every=every)


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_four_of_five_waits_are_within_the_range_that_was_told(name: str) -> None:
    """The figures of docs/explanation/fairness.md: ``-s`` prints them."""
    found = days(WORKLOADS[name], 4, every=40)
    parts = [count / found.told for count in (found.within, found.sooner, found.later)]
    print(f"{name}: within {parts[0]:.0%}, sooner {parts[1]:.0%}, later {parts[2]:.0%}, {found}")
    assert found.told > 300
    assert parts[0] >= 0.8
    assert found.silent <= 0.1 * (found.told + found.silent)


def test_the_same_days_give_the_same_figures() -> None:
    found = days(WORKLOADS["one-size"], 0.5, every=10)
    assert found == days(WORKLOADS["one-size"], 0.5, every=10)
    assert found.told == found.within + found.sooner + found.later > 0


def test_who_waits_for_one_that_outlasts_all_is_told_nothing_rather_than_minutes() -> None:
    """Leases of minutes, and then one of a day: no wait of minutes is told once it has lasted longer."""
    request = parse_request("1")
    short = [Arrival(600.0 * n, f"u{n}", "ml", request, 300.0 + 10 * n) for n in range(20)]
    endless = Arrival(20_000.0, "eve", "ml", request, 24 * HOUR)
    waiting = [Arrival(20_600.0 + 60 * n, f"w{n}", "ml", request, 60.0) for n in range(10)]
    found = backtest([*short, endless, *waiting], GPU)
    assert found.silent > found.told
    assert found.later == 0
