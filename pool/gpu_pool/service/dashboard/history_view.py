"""What has ended: GPUs in use and lent over time, sums, and rows with reasons. Pure.

A row is one of ``Pool.history()``; what lives joins them up to now, by ``use_over_time.until_now``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from gpu_pool.policy import usage_report
from gpu_pool.policy.usage_report import BusyTimes, PeriodParts, round_up, use_over_time
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
from gpu_pool_client import WHOLE, EndedLease, EndReason, format_duration
from gpu_pool_client._leases import why_over

#: Bars of the plot: half an hour each for a day, three and a half hours for a week.
BUCKETS: Final = 48
#: Rows of the table, the last to end first.
MOST_ROWS: Final = 200
_HOUR: Final = 3_600.0
_DAY: Final = 24 * _HOUR
_MIB_OF_GIB: Final = 1024
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

    #: None for what is of all courses together.
    mark: Mark | None
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Level:
    """A level line in one bar of the plot, in percent of it."""

    x: float
    to: float
    y: float


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
    #: What was in use while cells ran; none where that is not known, or not for the viewer.
    busy: tuple[Level, ...]
    #: Below them, the memory that slices could use on top of what they were granted: in percent of a plot of
    #: its own, and what the top of that means.
    burst: tuple[Block, ...]
    burst_top: str
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
    #: GiB times hours that its slices could use on top of what they were granted, and the most of one at
    #: once; empty for nothing.
    burst: str
    burst_peak: str


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


def plot(
    rows: Iterable[EndedLease],
    marks: Mapping[str, Mark],
    days: int,
    now: float,
    busy: BusyTimes | None = None,
) -> Plot:
    """Return the mean number of GPUs in use in every part of the last days, by course, and of GPUs lent.

    ``busy`` is when kernels worked, where the viewer may know it.
    """
    period = PeriodParts(now - days * _DAY, days * _DAY / BUCKETS, BUCKETS)
    use = use_over_time(rows, lambda row: course_label(row.course), period, busy)
    totals = use.held_by_all
    top = round_up(max(map(sum, zip(totals, use.lent, strict=True))) / period.seconds)
    most = top * period.seconds
    burst = [each / (period.seconds * _MIB_OF_GIB) for each in use.burst]
    most_burst = round_up(max(burst))
    return Plot(
        blocks=tuple(_blocks(use.held, marks, most)),
        lent=tuple(_above(totals, use.lent, most)),
        busy=tuple(_levels(use.busy, most)),
        burst=tuple(_above([0.0] * BUCKETS, burst, most_burst)),
        burst_top=memory(round(most_burst * _MIB_OF_GIB)),
        ticks=tuple(_ticks(days, now)),
        tick_hours=_TICK_HOURS[days],
        began=round(now - days * _DAY),
        ended=round(now),
        top=gpus(top * WHOLE),
    )


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


def _levels(busy: Sequence[float], most: float) -> Iterable[Level]:
    """Yield how high it is to what cells used, part by part; nothing where none is known to have run."""
    for bucket, amount in enumerate(busy if any(busy) else ()):
        x, y, width, _ = _bar(bucket, 100 - 100 * amount / most, 0.0)
        yield Level(x, round(x + width, 3), y)


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


def sums(rows: Iterable[EndedLease], marks: Mapping[str, Mark]) -> tuple[CourseSum, ...]:
    """Return what each course used and lent, how much it could use on top, and how many leases it had."""
    return tuple(
        CourseSum(
            each.key,
            marks[each.key],
            each.leases,
            f"{each.gpu_hours:.2f}",
            f"{each.lent_gpu_hours:.2f}",
            f"{each.burst_gib_hours:.2f}" if each.burst_peak_mib else "",
            memory(each.burst_peak_mib) if each.burst_peak_mib else "",
        )
        for each in usage_report.report(rows, lambda row: course_label(row.course))
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
