"""What administrators see besides: the quotas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu_pool.courses import Quota, Sharing
from gpu_pool.service.web.words import count, gpus, memory
from gpu_pool_client import PoolStatus


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A quota, and whose it is."""

    whose: str
    allowed: str
    #: What of it is held and waited for now.
    now: str


def quota_rows(sharing: Sharing, status: PoolStatus) -> tuple[QuotaRow, ...]:
    """Return every quota that limits anything, with what is held and waited for of it now."""
    return tuple(_rows(sharing, _totals(status)))


def _rows(sharing: Sharing, totals: Mapping[str, tuple[int, int]]) -> Iterable[QuotaRow]:
    yield from _row("each user, over all courses", sharing.per_user)
    for name, course in sorted(sharing.courses.items()):
        yield from _row(f"{name}, together", course.quota, totals.get(name, (0, 0)))
        yield from _row(f"{name}, each user", course.per_user)
    yield from _row("those without a course, together", sharing.default.quota, totals.get("", (0, 0)))
    yield from _row("those without a course, each user", sharing.default.per_user)
    for group in sharing.groups:
        yield from _row(f"group {group.name} ({count(len(group.users), 'user')})", group.quota)


def _row(whose: str, quota: Quota, total: tuple[int, int] | None = None) -> Iterable[QuotaRow]:
    allowed = "; ".join(_allowed(quota))
    if allowed:
        now = "" if total is None else f"{count(total[0], 'slice')}, {gpus(total[1])}"
        yield QuotaRow(whose, allowed, now)


def _allowed(quota: Quota) -> Iterable[str]:
    if quota.slices is not None:
        yield count(quota.slices, "slice")
    if quota.milli is not None:
        yield gpus(quota.milli)
    if quota.memory_mib is not None:
        yield memory(quota.memory_mib)
    if quota.gpu_hours_per_week is not None:
        yield f"{quota.gpu_hours_per_week:g} GPU-hours a week"
    if quota.gpu_hours_per_term is not None:
        yield f"{quota.gpu_hours_per_term:g} GPU-hours a term"


def _totals(status: PoolStatus) -> dict[str, tuple[int, int]]:
    """Return slices held, parked and waited for, and thousandths held, by course."""
    totals: dict[str, tuple[int, int]] = {}
    for lease in (*status.leases, *status.line):
        course = lease.holder.course or ""
        slices, milli = totals.get(course, (0, 0))
        totals[course] = slices + 1, milli + sum(part.milli for part in lease.slices)
    return totals
