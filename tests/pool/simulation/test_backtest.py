"""How often the waits that people are told come true, in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from gpu_pool.devices.inventory import parse_devices
from gpu_pool.policy.forecast import expected_waits
from gpu_pool.policy.queue import Policy, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool.simulation import WORKLOADS, Arrival, Workload, arrivals
from gpu_pool.simulation.engine import SimulatedMoment, Simulation
from gpu_pool_client import Device, parse_request

HOUR = 3600.0
GPU = parse_devices("V100-SXM2-32GB:1")


@dataclass(frozen=True, slots=True)
class Backtest:
    """How expected waits compare with what came: numbers of waiters, each asked about once a moment."""

    #: Who was told a range, and of those whose wait was in it, shorter, or longer.
    told: int
    within: int
    sooner: int
    later: int
    #: Who was told nothing.
    silent: int
    #: The median of the ranges' widths, and of the waits that came, in seconds.
    width: float
    wait: float


def backtest(
    arrivals: Iterable[Arrival],
    devices: Sequence[Device],
    policy: Policy | None = None,
    *,
    every: int = 1,
) -> Backtest:
    """Ask at every so many moments of a simulation what all in the queue are told; compare with what came."""
    simulation = Simulation(arrivals, devices, decide, policy or Policy(), Rules())
    told: list[tuple[int, float, tuple[float, float] | None]] = []
    for number, moment in enumerate(simulation.moments()):
        if number % every == 0:
            told += _told(moment)
    came = {each.number: each.held_at for each in simulation.outcomes}
    return _compare([(wait, came[number] - at) for number, at, wait in told])


def _told(moment: SimulatedMoment) -> Iterable[tuple[int, float, tuple[float, float] | None]]:
    now = moment.situation.now
    granted = {waiter.number for waiter, _ in moment.decision.grants}
    waits = expected_waits(moment.situation)
    return [(w.number, now, waits.get(w.number)) for w in moment.situation.queue if w.number not in granted]


def _compare(found: Sequence[tuple[tuple[float, float] | None, float]]) -> Backtest:
    told = [(wait, came) for wait, came in found if wait is not None]
    widths = sorted(latest - soonest for (soonest, latest), _ in told)
    waits = sorted(came for _, came in told)
    return Backtest(
        told=len(told),
        within=sum(soonest <= came <= latest for (soonest, latest), came in told),
        sooner=sum(came < soonest for (soonest, _), came in told),
        later=sum(came > latest for (_, latest), came in told),
        silent=len(found) - len(told),
        width=widths[len(widths) // 2] if widths else 0.0,
        wait=waits[len(waits) // 2] if waits else 0.0,
    )


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
