"""What ended leases have used, fading with time: a running total for each course and user."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from gpu_pool.queueing import Holding, Policy, Usage, faded_use

K = TypeVar("K", bound=Hashable)


class _Totals(Generic[K]):
    """Sums that all halve once per half-life."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        #: (total, when it was that), by key.
        self._totals: dict[K, tuple[float, float]] = {}

    def add(self, key: K, milli: int, began: float, now: float) -> None:
        """Add what was held from ``began`` until now."""
        self._totals[key] = self.of(key, now) + faded_use(milli, began, now, now, self._half_life), now

    def of(self, key: K, now: float) -> float:
        """Return what the total has faded to."""
        total, at = self._totals.get(key, (0.0, now))
        return float(total * 0.5 ** ((now - at) / self._half_life))

    def at(self, now: float) -> dict[K, float]:
        """Return all totals as they are now."""
        return {key: self.of(key, now) for key in self._totals}


class RunningUsage:
    """Adds up leases as they end; says at any time what they count as."""

    def __init__(self, policy: Policy) -> None:
        self._courses: _Totals[str] = _Totals(policy.course_half_life)
        self._users: _Totals[tuple[str, str]] = _Totals(policy.user_half_life)

    def add(self, ended: Holding, now: float) -> None:
        """Count a lease that ends now."""
        self._courses.add(ended.course, ended.milli, ended.since, now)
        self._users.add((ended.course, ended.user), ended.milli, ended.since, now)

    def at(self, now: float) -> Usage:
        """Return what all ended leases count as now."""
        return Usage(self._courses.at(now), self._users.at(now))
