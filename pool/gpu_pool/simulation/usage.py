"""What ended leases have used, fading with time: a running total for each course and user."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
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
        return _fade(total, at, self._half_life, now)

    def at(self, now: float) -> _Faded[K]:
        """Return all totals as they are now, whatever is added later."""
        return _Faded(self._totals, self._half_life, now)


class _Faded(Mapping[K, float]):
    """Totals at one time. Each is worked out when it is asked for: most decisions ask for a few."""

    def __init__(self, totals: Mapping[K, tuple[float, float]], half_life: float, now: float) -> None:
        self._totals, self._half_life, self._now = dict(totals), half_life, now

    def __getitem__(self, key: K) -> float:
        return _fade(*self._totals[key], self._half_life, self._now)

    def __iter__(self) -> Iterator[K]:
        return iter(self._totals)

    def __len__(self) -> int:
        return len(self._totals)


def _fade(total: float, at: float, half_life: float, now: float) -> float:
    return float(total * 0.5 ** ((now - at) / half_life))


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
