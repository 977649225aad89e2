"""GPUs in use over time: the parts of a period, one after the other. Pure: rows in, GPU-seconds out.

A row is one of ``Pool.history()``; what lives joins them by :func:`until_now`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_pool.policy import usage_report
from gpu_pool_client import EndedLease, Lease

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
        replace(usage_report.living(lease, now), held_at=began)
        for lease in leases
        if usage_report.has_used(lease)
        and (began := lease.first_held_at or lease.held_at) is not None
        and began < now
    ]


def round_up(gpus: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten, and not less than a hundredth of a GPU."""
    size = 0.01
    while gpus > size * 5:
        size *= 10
    return next(size * factor for factor in (1, 2, 5) if not gpus > size * factor)
