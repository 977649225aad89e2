"""Recorded days: sessions that had a slice, and when their cells ran on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool_client import WHOLE, SliceRequest

_HOUR: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class RecordedCell:
    """One cell, or whatever else kept a session's slice busy. Times are in seconds."""

    at: float
    seconds: float
    #: Thousandths of a GPU that it needed itself, of all devices together; None for all that its session had.
    milli: int | None = None

    @property
    def ended_at(self) -> float:
        """When it ended."""
        return self.at + self.seconds


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One kernel or job, from asking for its slice to its end, as if the slice had been there at once."""

    at: float
    ends_at: float
    user: str
    course: str
    request: SliceRequest
    #: Thousandths of a GPU that it had, of all devices together.
    milli: int
    #: In order of time; one from the first to the last second where it is not known what was busy when.
    cells: tuple[RecordedCell, ...]
    #: For one that was cut at its begin: for how long it had been idle by then, in seconds.
    idle_before: float = 0.0
    #: Whether it is a job, or it is not known what of it was busy when: it never gives way.
    is_job: bool = False

    @property
    def gpus(self) -> float:
        """What it had, in whole GPUs."""
        return self.milli / WHOLE

    @property
    def gpu_seconds(self) -> float:
        """What it reserved from its first to its last second."""
        return self.gpus * (self.ends_at - self.at)

    @property
    def used_gpu_seconds(self) -> float:
        """What it reserved while its cells ran."""
        return self.gpus * sum(cell.seconds for cell in self.cells)

    def moved(self, seconds: float) -> RecordedSession:
        """Return it so many seconds later."""
        cells = tuple(replace(cell, at=cell.at + seconds) for cell in self.cells)
        return replace(self, at=self.at + seconds, ends_at=self.ends_at + seconds, cells=cells)

    def within(self, begin: float, end: float) -> RecordedSession | None:
        """Return the part of it between two times, counted from the first; None where there is none."""
        at, ends_at = max(self.at, begin), min(self.ends_at, end)
        if at >= ends_at:
            return None
        cells = [
            RecordedCell(
                max(cell.at, begin) - begin,
                min(cell.ended_at, end) - max(cell.at, begin),
                cell.milli,
            )
            for cell in self.cells
            if cell.at < end and cell.ended_at > begin
        ]
        last = max((cell.ended_at for cell in self.cells if cell.at < begin), default=begin)
        return replace(
            self,
            at=at - begin,
            ends_at=ends_at - begin,
            cells=tuple(cells),
            idle_before=max(0.0, begin - last),
        )


@dataclass(frozen=True, slots=True)
class UnlimitedSums:
    """What the sessions would hold if there were GPUs for everybody. Amounts are GPU-hours."""

    reserved: float
    #: By cells, each counted with the GPUs that it needed itself.
    used: float
    #: If each cell took what it needed itself, and kept it for so many seconds after it had ended.
    held: Mapping[float, float]
    #: The part of all cells that would then have to take a slice again.
    again: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class RecordedDays:
    """What was read of a file."""

    #: In order of time.
    sessions: tuple[RecordedSession, ...]
    #: Whether it is known when cells ran.
    has_cells: bool = False
    #: Rows that are understood and tell nothing here, such as jobs without a GPU.
    left_out: int = 0
    #: Rows that are not understood: the line of the file, and why.
    bad: tuple[tuple[int, str], ...] = ()

    def window(self, begin: float, seconds: float) -> RecordedDays:
        """Return a part of them, with time counted from its begin.

        Sessions with cells are cut at both ends. Of others those are in it that asked
        for their slice in it, whole: what they would have done otherwise is not known.
        """
        end = begin + seconds
        if self.has_cells:
            parts = (session.within(begin, end) for session in self.sessions)
            return replace(self, sessions=tuple(part for part in parts if part is not None))
        inside = [session for session in self.sessions if begin <= session.at < end]
        return replace(self, sessions=tuple(session.moved(-begin) for session in inside))

    def arrivals(self) -> list[Arrival]:
        """Return the sessions as leases that are held from their first second to their last."""
        return [
            Arrival(each.at, each.user, each.course, each.request, each.ends_at - each.at)
            for each in self.sessions
        ]

    def sums(self, limits: Sequence[float]) -> UnlimitedSums:
        """Return what would be held without any queue; ``limits`` are idle seconds."""
        cells = max(1, sum(len(session.cells) for session in self.sessions))
        used = sum(_own(session, cell) * cell.seconds for session in self.sessions for cell in session.cells)
        held = {limit: used + sum(_kept(session, limit) for session in self.sessions) for limit in limits}
        again = {limit: sum(_returns(session, limit) for session in self.sessions) for limit in limits}
        return UnlimitedSums(
            reserved=sum(session.gpu_seconds for session in self.sessions) / _HOUR,
            used=used / _HOUR,
            held={limit: amount / _HOUR for limit, amount in held.items()},
            again={limit: count / cells for limit, count in again.items()},
        )


def _own(session: RecordedSession, cell: RecordedCell) -> float:
    return (session.milli if cell.milli is None else cell.milli) / WHOLE


def _kept(session: RecordedSession, limit: float) -> float:
    """Return the GPU-seconds that a session keeps between cells."""
    return sum(
        _own(session, cell) * min(max(0.0, following.at - cell.ended_at), limit)
        for cell, following in pairwise(session.cells)
    )


def _returns(session: RecordedSession, limit: float) -> int:
    return sum(following.at - cell.ended_at > limit for cell, following in pairwise(session.cells))
