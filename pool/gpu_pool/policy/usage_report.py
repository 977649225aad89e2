"""What was used, by whom and for what, and when: sums over leases, and over the parts of a period. Pure.

A row is one of ``Pool.history()``; a lease that lives is made to look like one by :func:`living`, and joins
the others by :func:`until_now`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_pool.policy import burst
from gpu_pool_client import WHOLE, EndedLease, Lease

#: Stands where the reason of its end would, for a lease that lives.
LIVING: Final = "living"


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What some leases used together."""

    #: The user, the course, the day or the kernel that they have in common; empty for none.
    key: str
    leases: int
    people: int
    #: Share times time: 0.5 for half a GPU for an hour.
    gpu_hours: float
    #: The same of what others could have while kernels were parked.
    lent_gpu_hours: float
    #: What they could use on top of what they were granted, in GiB times hours; and the most of any, in MiB.
    burst_gib_hours: float
    burst_peak_mib: int
    #: The most memory seen in use on one device, and the mean over time; None where nothing was measured.
    peak_mib: int | None
    mean_mib: float | None
    #: How many were measured, and how many of these never had a process on a device.
    measured: int
    untouched: int
    #: Seconds from request to grant, of leases that are kept one by one; None where none was granted.
    median_wait: float | None
    #: How many ended for which reason, the most frequent first.
    reasons: Mapping[str, int]


def report(rows: Iterable[EndedLease], key_of: Callable[[EndedLease], str]) -> list[UsageRow]:
    """Return a line for all rows with the same key, in the order of the keys."""
    groups: dict[str, list[EndedLease]] = {}
    for row in rows:
        groups.setdefault(key_of(row), []).append(row)
    return [line(key, groups[key]) for key in sorted(groups)]


def line(key: str, rows: Sequence[EndedLease]) -> UsageRow:
    """Return what these rows come to together."""
    measured = [row for row in rows if row.touched is not None]
    single = [row for row in rows if row.id]
    waits = [max(0.0, row.held_at - row.requested_at) for row in single if row.held_at is not None]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons[row.reason] += row.leases
    return UsageRow(
        key=key,
        leases=sum(row.leases for row in rows),
        people=len({row.user for row in rows}),
        gpu_hours=sum(row.gpu_seconds for row in rows) / 3600,
        lent_gpu_hours=sum(row.lent_gpu_seconds for row in rows) / 3600,
        burst_gib_hours=sum(row.burst_mib_seconds for row in rows) / (1024 * 3600),
        burst_peak_mib=max((row.burst_peak_mib for row in rows), default=0),
        peak_mib=max((row.peak_mib for row in measured if row.peak_mib is not None), default=None),
        mean_mib=_mean(measured),
        measured=sum(row.leases for row in measured),
        untouched=sum(row.leases for row in measured if not row.touched),
        median_wait=statistics.median(waits) if waits else None,
        reasons=dict(sorted(reasons.items(), key=lambda each: (-each[1], each[0]))),
    )


def has_used(lease: Lease) -> bool:
    """Whether a lease that has not ended has used anything: one that is held, or was before it was parked."""
    return bool(lease.slices) or lease.held_before > 0


def living(lease: Lease, now: float) -> EndedLease:
    """Return a lease that has not ended as a row, up to ``now`` (Unix seconds)."""
    milli = sum(part.milli for part in lease.slices)
    since = now if lease.held_at is None or not lease.slices else lease.held_at
    held = max(0.0, now - since)
    parked = 0.0 if lease.parked_at is None else max(0.0, now - lease.parked_at)
    burst_for = 0.0 if lease.burst_since is None else max(0.0, now - lease.burst_since)
    # What it holds none of now, it had on average before.
    share = lease.used_before / lease.held_before if lease.held_before else 0.0
    return EndedLease(
        id=lease.id,
        request=str(lease.request),
        milli=milli,
        user=lease.holder.user,
        course=lease.holder.course or "",
        kernel=lease.holder.kernel,
        requested_at=lease.requested_at,
        # Its wait is in the history once it has ended: it may have been granted several times.
        held_at=None,
        ended_at=now,
        held_seconds=lease.held_before + held,
        gpu_seconds=lease.used_before + milli / WHOLE * held,
        reason=LIVING,
        lent_gpu_seconds=lease.lent_before + share * parked,
        burst_mib_seconds=lease.burst_before + burst.total_mib(lease.slices) * burst_for,
        burst_peak_mib=lease.burst_peak_mib,
        job=lease.terms.job,
    )


def _mean(rows: Iterable[EndedLease]) -> float | None:
    """Return the mean memory over all the time on devices for which it is known."""
    known = [(row.mean_mib, row.device_seconds or 0.0) for row in rows if row.mean_mib is not None]
    seconds = sum(each for _, each in known)
    return sum(mean * each for mean, each in known) / seconds if seconds else None


#: When kernels worked, by lease: when each piece of work began, in Unix seconds, and for how many seconds.
BusyTimes = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class PeriodParts:
    """A time that is divided into parts of the same length."""

    #: In Unix seconds.
    began: float
    #: Of one part.
    seconds: float
    parts: int

    def overlaps(self, began: float, ended: float) -> Iterator[tuple[int, float]]:
        """Yield the parts that have something of a time, each with how many seconds."""
        if ended <= self.began:
            return
        for part in range(max(0, int((began - self.began) // self.seconds)), self.parts):
            start = self.began + part * self.seconds
            if start >= ended:
                break
            seconds = min(ended, start + self.seconds) - max(began, start)
            if seconds > 0:  # by rounding, the first may end where the time begins
                yield part, seconds


@dataclass(frozen=True, slots=True)
class UseOverTime:
    """GPU-seconds in each part of a period."""

    #: What was held, by what the rows were grouped by.
    held: dict[str, list[float]]
    #: What others could have while kernels were parked.
    lent: list[float]
    #: What could be used on top of what was granted: MiB times seconds.
    burst: list[float]
    #: While cells ran: of leases that have ended, and whose servers have said when that was.
    busy: list[float] = field(default_factory=list)

    @property
    def held_by_all(self) -> list[float]:
        """What was held of all groups together."""
        return [sum(part) for part in zip(*self.held.values(), strict=True)] or [0.0] * len(self.lent)


def use_over_time(
    rows: Iterable[EndedLease],
    key_of: Callable[[EndedLease], str],
    period: PeriodParts,
    busy: BusyTimes | None = None,
) -> UseOverTime:
    """Spread what leases used over a period.

    When exactly a lease that was parked held its slice is not kept, so what it held and lent is spread
    evenly over its life; and so is its burst.

    Parameters
    ----------
    rows
        What was held; sums of old leases, which do not say when, are passed over.
    key_of
        What the rows are grouped by.
    period
        The time, and its parts.
    busy
        When kernels worked; None where that is not to be told.
    """
    held: dict[str, list[float]] = {}
    lent, burst, worked = ([0.0] * period.parts for _ in range(3))
    for row in rows:
        of_key = held.setdefault(key_of(row), [0.0] * period.parts)
        if row.held_at is None:
            continue
        life = max(row.ended_at - row.held_at, 1.0)
        for part, seconds in period.overlaps(row.held_at, row.ended_at):
            of_key[part] += seconds / life * row.gpu_seconds
            lent[part] += seconds / life * row.lent_gpu_seconds
            burst[part] += seconds / life * row.burst_mib_seconds
        share = row.gpu_seconds / row.held_seconds if row.held_seconds > 0 else 0.0
        for began, length in () if busy is None else busy.get(row.id, ()):
            for part, seconds in period.overlaps(began, min(began + length, row.ended_at)):
                worked[part] += seconds * share
    return UseOverTime(held, lent, burst, [] if busy is None else worked)


def until_now(leases: Iterable[Lease], now: float) -> list[EndedLease]:
    """Return leases that are held, or were before they were parked, like rows that end now."""
    return [
        replace(living(lease, now), held_at=began)
        for lease in leases
        if has_used(lease) and (began := lease.first_held_at or lease.held_at) is not None and began < now
    ]


def round_up(gpus: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten, and not less than a hundredth of a GPU."""
    size = 0.01
    while gpus > size * 5:
        size *= 10
    return next(size * factor for factor in (1, 2, 5) if not gpus > size * factor)
