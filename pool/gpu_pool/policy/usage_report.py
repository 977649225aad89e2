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
