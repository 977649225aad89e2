"""What a way of giving slices was like: GPU-hours, delays of cells, and waits for slices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.simulation.recorded import RecordedSession
from gpu_pool.simulation.replay import ReplayResult, SliceWait
from gpu_pool.simulation.report import WaitFigures, quantile, wait_figures
from gpu_pool_client import WHOLE

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
        cells=_cells(sorted(result.delays)),
        utilisation=PoolUse(
            result.held_in_time / time if time else 0.0, result.used_in_time / time if time else 0.0
        ),
        asked_back=result.asked_back,
        parked=result.parked,
        by_course=_grouped(result.waits, lambda session: session.course),
        by_size=_grouped(
            sorted(result.waits, key=lambda wait: wait.session.milli), lambda session: session.request.size
        ),
    )


def _cells(delays: Sequence[float]) -> CellFigures:
    if not delays:
        return CellFigures(0, 1.0, Delays(0.0, 0.0, 0.0))
    at_once = sum(delay <= AT_ONCE for delay in delays) / len(delays)
    return CellFigures(len(delays), at_once, Delays(*(quantile(delays, part) for part in (0.5, 0.95, 0.99))))


def _grouped(found: Sequence[SliceWait], key: Callable[[RecordedSession], str]) -> dict[str, WaitFigures]:
    groups: dict[str, list[SliceWait]] = defaultdict(list)
    for each in found:
        groups[key(each.session)].append(each)
    return {name: wait_figures(each.seconds for each in group) for name, group in groups.items()}
