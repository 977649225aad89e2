"""What a run was like, and what a way of giving slices was like to recorded days, in figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from gpu_pool.simulation.engine import ArrivalOutcome, SimulatedRun
from gpu_pool.simulation.recorded import RecordedSession
from gpu_pool.simulation.replay import ReplayResult, SliceWait
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


#: A cell that starts within so many seconds counts as started at once.
AT_ONCE: Final = 6.0
_MILLI_HOUR: Final = WHOLE * 3_600.0


@dataclass(frozen=True, slots=True)
class GpuHours:
    """Amounts of GPU, in hours of a whole one."""

    #: From each session's first to its last second, as recorded.
    reserved: float
    #: By slices.
    held: float
    #: By slices while a cell ran on them.
    used: float


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds from a cell's submission to its begin."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class CellFigures:
    """How cells fared."""

    count: int
    #: The part of them that began within :data:`AT_ONCE`.
    at_once: float
    delay: Delays


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Parts of all devices' time, from the first to the last recorded second."""

    held: float
    used: float


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """One way in figures."""

    gpu_hours: GpuHours
    cells: CellFigures
    utilisation: PoolUse
    #: How many slices were asked back, and given back before their kernel ended.
    asked_back: int
    parked: int
    #: Waits for slices, first ones and those to take one again, by course and by size.
    by_course: Mapping[str, WaitFigures]
    by_size: Mapping[str, WaitFigures]


def replay_figures(sessions: Sequence[RecordedSession], result: ReplayResult) -> ReplayFigures:
    """Return what a way was like for these sessions."""
    time = len(result.devices) * WHOLE * max((session.ends_at for session in sessions), default=0.0)
    return ReplayFigures(
        gpu_hours=GpuHours(
            reserved=sum(session.gpu_seconds for session in sessions) / 3_600.0,
            held=result.held / _MILLI_HOUR,
            used=sum(session.used_gpu_seconds for session in sessions) / 3_600.0,
        ),
        cells=_cell_figures(sorted(result.delays)),
        utilisation=PoolUse(
            result.held_in_time / time if time else 0.0, result.used_in_time / time if time else 0.0
        ),
        asked_back=result.asked_back,
        parked=result.parked,
        by_course=_waits_by(result.waits, lambda session: session.course),
        by_size=_waits_by(
            sorted(result.waits, key=lambda wait: wait.session.milli), lambda session: session.request.size
        ),
    )


def _cell_figures(delays: Sequence[float]) -> CellFigures:
    if not delays:
        return CellFigures(0, 1.0, Delays(0.0, 0.0, 0.0))
    at_once = sum(delay <= AT_ONCE for delay in delays) / len(delays)
    return CellFigures(len(delays), at_once, Delays(*(quantile(delays, part) for part in (0.5, 0.95, 0.99))))


def _waits_by(found: Sequence[SliceWait], key: Callable[[RecordedSession], str]) -> dict[str, WaitFigures]:
    groups: dict[str, list[SliceWait]] = defaultdict(list)
    for each in found:
        groups[key(each.session)].append(each)
    return {name: wait_figures(each.seconds for each in group) for name, group in groups.items()}
