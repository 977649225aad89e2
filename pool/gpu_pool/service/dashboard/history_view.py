"""What has ended: GPUs in use and lent over time, sums, and rows with reasons. Pure.

A row is one of ``Pool.history()``; what lives joins them up to now.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Final

from gpu_pool.policy import usage_report
from gpu_pool.service.dashboard.pool_view import (
    Mark,
    PageTime,
    Viewer,
    course_label,
    gpus,
    memory,
    moment,
    request_text,
)
from gpu_pool_client import WHOLE, EndedLease, EndReason, Lease, format_duration
from gpu_pool_client._leases import why_over

#: Bars of the plot: half an hour each for a day, three and a half hours for a week.
BUCKETS: Final = 48
#: Rows of the table, the last to end first.
MOST_ROWS: Final = 200
_HOUR: Final = 3_600.0
_DAY: Final = 24 * _HOUR
#: Hours between two times below the plot, by the days that it shows.
_TICK_HOURS: Final = {1: 6, 7: 24, 30: 120}
#: Percent of the plot at its ends where no time but the last is written.
_MARGIN: Final = 6.0
#: How a lease ends that its own user ended.
_OWN_DOING: Final = frozenset((EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.PROCESS_GONE))
#: The days that can be chosen.
PERIODS: Final = (1, 7, 30)


@dataclass(frozen=True, slots=True)
class Block:
    """One course in one bar of the plot. In percent of the plot, from its left and its top."""

    #: None for what was lent, of all courses together.
    mark: Mark | None
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A time below the plot, at so many percent; in UTC, until a script writes it by the reader's clock."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """GPUs in use over time."""

    blocks: tuple[Block, ...]
    #: Above them, what others could have while kernels were idle.
    lent: tuple[Block, ...]
    ticks: tuple[Tick, ...]
    #: Hours from one tick to the next, and the Unix seconds at which the plot begins and ends.
    tick_hours: int
    began: int
    ended: int
    #: What the plot's top means: ``2 GPUs``, ``50%``. The line in it is half of that.
    top: str


@dataclass(frozen=True, slots=True)
class CourseSum:
    """What was used of one course."""

    course: str
    mark: Mark
    leases: int
    gpu_hours: str
    #: GPU-hours that others could have while its kernels were idle.
    lent: str


@dataclass(frozen=True, slots=True)
class PastRow:
    """One lease that has ended."""

    id: str
    user: str
    course: str
    purpose: str
    request: str
    ended: PageTime
    #: None if it never was granted.
    waited: str | None
    held: str
    gpu_hours: str
    peak: str
    reason: str
    #: The administrator's words, where one ended it.
    note: str
    #: How its kernel failed, the last time that one did.
    failure: str

    @property
    def why(self) -> str:
        """Why it ended, with the administrator's words and the kernel's own last ones."""
        why = f"{self.reason}: “{self.note}”" if self.note else self.reason
        return f"{why}. Its kernel failed: {self.failure}" if self.failure else why


def visible(rows: Iterable[EndedLease], viewer: Viewer) -> list[EndedLease]:
    """Return the rows that a viewer may see: their own, and for administrators all."""
    return [row for row in rows if viewer.is_admin or row.user == viewer.user]


def living(leases: Iterable[Lease], now: float) -> list[EndedLease]:
    """Return leases that are held, or were before they were parked, like rows that end now."""
    return [
        replace(usage_report.living(lease, now), held_at=began)
        for lease in leases
        if usage_report.has_used(lease)
        and (began := lease.first_held_at or lease.held_at) is not None
        and began < now
    ]


def plot(rows: Iterable[EndedLease], marks: Mapping[str, Mark], days: int, now: float) -> Plot:
    """Return the mean number of GPUs in use in every part of the last days, by course, and of GPUs lent."""
    seconds = days * _DAY / BUCKETS
    used, lent = _spread(rows, now - days * _DAY, seconds)
    totals = [sum(of_course[bucket] for of_course in used.values()) for bucket in range(BUCKETS)]
    top = _round_up(max(map(sum, zip(totals, lent, strict=True))) / seconds)
    return Plot(
        blocks=tuple(_blocks(used, marks, top * seconds)),
        lent=tuple(_above(totals, lent, top * seconds)),
        ticks=tuple(_ticks(days, now)),
        tick_hours=_TICK_HOURS[days],
        began=round(now - days * _DAY),
        ended=round(now),
        top=gpus(top * WHOLE),
    )


def _spread(
    rows: Iterable[EndedLease], began: float, seconds: float
) -> tuple[dict[str, list[float]], list[float]]:
    """Return GPU-seconds in use by course and bucket, and those lent by bucket.

    What a lease used and lent is spread evenly over its life.
    """
    used: dict[str, list[float]] = {}
    lent = [0.0] * BUCKETS
    for row in rows:
        of_course = used.setdefault(course_label(row.course), [0.0] * BUCKETS)
        for bucket, part in _parts(row, began, seconds):
            of_course[bucket] += part * row.gpu_seconds
            lent[bucket] += part * row.lent_gpu_seconds
    return used, lent


def _parts(row: EndedLease, began: float, seconds: float) -> Iterable[tuple[int, float]]:
    """Yield the buckets in which a lease lived, each with the part of its life that is in it."""
    if row.held_at is None or row.ended_at <= began:
        return
    life = max(row.ended_at - row.held_at, 1.0)
    for bucket in range(max(0, int((row.held_at - began) // seconds)), BUCKETS):
        start = began + bucket * seconds
        overlap = min(row.ended_at, start + seconds) - max(row.held_at, start)
        if overlap <= 0:
            break
        yield bucket, overlap / life


def _blocks(used: Mapping[str, Sequence[float]], marks: Mapping[str, Mark], most: float) -> Iterable[Block]:
    for bucket in range(BUCKETS):
        y = 100.0
        for course in sorted(used):
            height = 100 * used[course][bucket] / most
            if height > 0:
                y -= height
                yield Block(marks[course], *_bar(bucket, y, height))


def _above(used: Sequence[float], lent: Sequence[float], most: float) -> Iterable[Block]:
    """Yield what was lent, on top of what was in use."""
    for bucket, amount in enumerate(lent):
        height = 100 * amount / most
        if height > 0:
            yield Block(None, *_bar(bucket, 100 - 100 * used[bucket] / most - height, height))


def _bar(bucket: int, y: float, height: float) -> tuple[float, float, float, float]:
    width = 100 / BUCKETS
    return round(bucket * width, 3), round(y, 3), round(width, 3), round(height, 3)


def _ticks(days: int, now: float) -> Iterable[Tick]:
    """Yield round times, but those too near to an end of the plot for what stands below it."""
    step, began = _TICK_HOURS[days] * _HOUR, now - days * _DAY
    at = (began // step + 1) * step
    while at < now:
        x = 100 * (at - began) / (now - began)
        if _MARGIN <= x <= 100 - _MARGIN:
            utc = datetime.fromtimestamp(at, timezone.utc)
            yield Tick(round(x, 3), f"{utc:%H:%M}" if days == 1 else f"{utc.day} {utc:%b}")
        at += step


def _round_up(value: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten, and not less than a hundredth of a GPU."""
    size = 0.01
    while value > size * 5:
        size *= 10
    return next(size * factor for factor in (1, 2, 5) if not value > size * factor)


def sums(rows: Iterable[EndedLease], marks: Mapping[str, Mark]) -> tuple[CourseSum, ...]:
    """Return what each course used and lent, and how many leases it had."""
    leases: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    lent: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        leases[course_label(row.course)] += row.leases
        seconds[course_label(row.course)] += row.gpu_seconds
        lent[course_label(row.course)] += row.lent_gpu_seconds
    return tuple(
        CourseSum(course, marks[course], leases[course], _hours(seconds[course]), _hours(lent[course]))
        for course in sorted(leases)
    )


def taken_away(rows: Sequence[EndedLease], viewer: Viewer) -> tuple[PastRow, ...]:
    """Return which leases of the viewer's own ended by something else than their own doing."""
    own = [row for row in rows if row.user == viewer.user and row.reason not in _OWN_DOING]
    return past_rows(own)


def past_rows(rows: Sequence[EndedLease]) -> tuple[PastRow, ...]:
    """Return the last leases, the last to end first; not the sums of old ones."""
    single = [row for row in rows if row.id]
    return tuple(_row(row) for row in reversed(single[-MOST_ROWS:]))


def _row(row: EndedLease) -> PastRow:
    held_at = row.held_at
    waited = None if held_at is None else format_duration(max(0.0, held_at - row.requested_at))
    return PastRow(
        id=row.id,
        user=row.user,
        course=course_label(row.course),
        purpose=row.kernel or "",
        request=request_text(row.request),
        ended=moment(row.ended_at),
        waited=waited,
        held="" if held_at is None else format_duration(row.held_seconds),
        gpu_hours="" if held_at is None else _hours(row.gpu_seconds),
        peak="" if row.peak_mib is None else memory(row.peak_mib),
        reason=why_over(row.reason),
        note=row.note,
        failure="" if row.failure is None else row.failure.message,
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"
