"""How often the waits that people are told come true, seen in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_pool.policy.forecast import expected_waits
from gpu_pool.policy.queue import Policy, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool.simulation.engine import Arrival, SimulatedMoment, Simulation
from gpu_pool_client import Device


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
