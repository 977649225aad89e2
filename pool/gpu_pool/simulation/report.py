"""What a run was like: utilisation, waits, and how evenly they were shared out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpu_pool.simulation.engine import ArrivalOutcome, SimulatedRun
from gpu_pool_client import WHOLE

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """Waits of some requests, in seconds."""

    count: int
    mean: float
    median: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run in figures."""

    #: The part of all devices' time that was held while people kept arriving.
    utilisation: float
    waits: WaitFigures
    #: Of those who asked for one or more whole devices.
    whole: WaitFigures
    #: By the size of the request as it is written, smallest first.
    by_size: Mapping[str, WaitFigures]
    #: By user, in order of name.
    by_user: Mapping[str, WaitFigures]
    #: Jain's index over the users' (time held) / (time held and waited): 1 when all fared alike,
    #: 1/n when one had everything.
    jain: float


def figures(run: SimulatedRun) -> RunFigures:
    """Return what a run was like."""
    outcomes = run.outcomes
    by_size = _grouped(outcomes, lambda each: each.arrival.request.size)
    sizes = sorted(by_size, key=lambda size: by_size[size][0].milli)
    by_user = _grouped(outcomes, lambda each: each.arrival.user)
    return RunFigures(
        utilisation=_utilisation(run),
        waits=waits(outcomes),
        whole=waits(each for each in outcomes if each.arrival.request.whole_devices),
        by_size={size: waits(by_size[size]) for size in sizes},
        by_user={user: waits(by_user[user]) for user in sorted(by_user)},
        jain=_jain([_fared(of_user) for of_user in by_user.values()]),
    )


def waits(outcomes: Iterable[ArrivalOutcome]) -> WaitFigures:
    """Return the waits of these requests."""
    return wait_figures(outcome.wait for outcome in outcomes)


def wait_figures(seconds: Iterable[float]) -> WaitFigures:
    """Return what these waits were like."""
    sorted_waits = sorted(seconds)
    if not sorted_waits:
        return WaitFigures(0, 0.0, 0.0, 0.0, 0.0)
    mean = sum(sorted_waits) / len(sorted_waits)
    median, p95 = quantile(sorted_waits, 0.5), quantile(sorted_waits, 0.95)
    return WaitFigures(len(sorted_waits), mean, median, p95, sorted_waits[-1])


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least of the ordered values that this part of them does not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _grouped(
    outcomes: Iterable[ArrivalOutcome], key: Callable[[ArrivalOutcome], K]
) -> dict[K, list[ArrivalOutcome]]:
    found: dict[K, list[ArrivalOutcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome)].append(outcome)
    return found


def _utilisation(run: SimulatedRun) -> float:
    last = max((outcome.arrival.at for outcome in run.outcomes), default=0.0)
    held = sum(
        outcome.milli * max(0.0, min(last, outcome.held_at + outcome.arrival.stay) - outcome.held_at)
        for outcome in run.outcomes
    )
    capacity = len(run.devices) * WHOLE * last
    return held / capacity if capacity else 0.0


def _fared(outcomes: Iterable[ArrivalOutcome]) -> float:
    held = waited = 0.0
    for outcome in outcomes:
        held += outcome.arrival.stay
        waited += outcome.wait
    return held / (held + waited) if held else 1.0


def _jain(values: Sequence[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
