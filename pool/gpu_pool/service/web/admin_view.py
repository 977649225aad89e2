"""What administrators see besides: the quotas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_pool.courses import Quota, Sharing
from gpu_pool.service.web.words import count, gpus, memory
from gpu_pool_client import Lease, PoolStatus


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A quota, and whose it is."""

    whose: str
    allowed: str
    #: What of it is held and waited for now.
    now: str


def quota_rows(sharing: Sharing, status: PoolStatus) -> tuple[QuotaRow, ...]:
    """Return every quota that limits anything, with what is held and waited for of it now."""
    return tuple(_rows(sharing, [*status.leases, *status.line]))


def _rows(sharing: Sharing, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    yield from _of_each("each user, over all courses", sharing.per_user, leases)
    courses = [*sorted(sharing.courses.items()), ("", sharing.default)]
    for name, course in courses:
        whose = name or "those without a course"
        of_course = [lease for lease in leases if (lease.holder.course or "") == name]
        yield from _together(f"{whose}, together", course.quota, of_course)
        yield from _of_each(f"{whose}, each user", course.per_user, of_course)
    for group in sharing.groups:
        of_group = [lease for lease in leases if lease.holder.user in group.users]
        yield from _together(f"group {group.name} ({count(len(group.users), 'user')})", group.quota, of_group)


def _together(whose: str, quota: Quota, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    if allowed := "; ".join(_allowed(quota)):
        yield QuotaRow(whose, allowed, _amount(leases))


def _of_each(whose: str, quota: Quota, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    """Say of a quota of each user's who has most."""
    if not (allowed := "; ".join(_allowed(quota))):
        return
    by_user: dict[str, list[Lease]] = {}
    for lease in leases:
        by_user.setdefault(lease.holder.user, []).append(lease)
    most = max(by_user, key=lambda user: (_milli(by_user[user]), len(by_user[user])), default=None)
    now = "nobody has any" if most is None else f"most: {most}, {_amount(by_user[most])}"
    yield QuotaRow(whose, allowed, now)


def _amount(leases: Sequence[Lease]) -> str:
    """Say how much is held, with how many slices, those included that are waited for."""
    mib = sum(part.memory_mib for lease in leases for part in lease.slices)
    return f"{count(len(leases), 'slice')}, {gpus(_milli(leases))}, {memory(mib)}"


def _milli(leases: Sequence[Lease]) -> int:
    return sum(part.milli for lease in leases for part in lease.slices)


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
