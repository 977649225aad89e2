"""What was used, by whom and for what: sums over leases. Pure: rows in, lines out.

A row is one of ``Pool.history()``; a lease that lives is made to look like one
by :func:`living`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    #: The most memory seen in use on one device, and the mean over time; None where nothing was measured.
    peak_mib: int | None
    mean_mib: float | None
    #: How many were measured, and how many of these never had a process on a device.
    measured: int
    untouched: int
    #: Seconds from request to grant; None where nothing was granted.
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
    waits = [max(0.0, row.held_at - row.requested_at) for row in rows if row.held_at is not None]
    reasons = Counter(row.reason for row in rows)
    return UsageRow(
        key=key,
        leases=len(rows),
        people=len({row.user for row in rows}),
        gpu_hours=sum(row.gpu_seconds for row in rows) / 3600,
        peak_mib=max((row.peak_mib for row in measured if row.peak_mib is not None), default=None),
        mean_mib=_mean(measured),
        measured=len(measured),
        untouched=sum(not row.touched for row in measured),
        median_wait=statistics.median(waits) if waits else None,
        reasons=dict(sorted(reasons.items(), key=lambda each: (-each[1], each[0]))),
    )


def living(lease: Lease, now: float) -> EndedLease:
    """Return a held lease as a row, up to ``now`` (Unix seconds) and since it got what it has."""
    held_at = lease.requested_at if lease.held_at is None else lease.held_at
    milli = sum(part.milli for part in lease.slices)
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
        held_seconds=max(0.0, now - held_at),
        gpu_seconds=milli / WHOLE * max(0.0, now - held_at),
        reason=LIVING,
    )


def _mean(rows: Iterable[EndedLease]) -> float | None:
    """Return the mean memory over all the time on devices for which it is known."""
    known = [(row.mean_mib, row.device_seconds or 0.0) for row in rows if row.mean_mib is not None]
    seconds = sum(each for _, each in known)
    return sum(mean * each for mean, each in known) / seconds if seconds else None
