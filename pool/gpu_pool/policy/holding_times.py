"""How long leases last in a pool, learnt from those that ended and those that are still held. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, TypeAlias

from gpu_pool.policy.queue_state import Holding, HoldingTime

#: Fewer known holding times than this tell nothing.
FEWEST: Final = 5
#: As many of each course and size, the latest, tell enough. The latest of all would be of those that are
#: short and many, and would leave out the long and few that a large request waits for.
MOST_ALIKE: Final = 100
#: What parts of leases differ by that are equal but for the rounding of floats.
_ROUNDING: Final = 1e-9
#: A course and a size, a course, or all leases.
_Kind: TypeAlias = tuple[str, int] | str | None
#: Times after which leases ended, ascending, and the part of leases that last longer.
_Curve: TypeAlias = tuple[list[float], list[float]]


class HoldingTimes:
    """How long leases last, for those of a course and size, of a course, and of all.

    By Kaplan and Meier's estimate: a lease that is still held counts as well, as one that lasted
    longer than so far. Ended leases alone would be too short, since the long ones are still held.
    """

    def __init__(self, ended: Iterable[HoldingTime], holdings: Iterable[Holding], now: float) -> None:
        have_ended: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        going_on: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for each in ended:
            have_ended[each.course, each.milli].append(each.seconds)
        for holding in holdings:
            going_on[holding.course, holding.milli].append(now - holding.since)
        self._ended, self._going_on = have_ended, going_on
        #: None of which too few are known.
        self._curves: dict[_Kind, _Curve | None] = {}

    def knows(self, course: str, milli: int) -> bool:
        """Whether enough are known to say how long a lease of this course and size lasts."""
        return self._curve(course, milli) is not None

    def rest(self, course: str, milli: int, age: float, part: float) -> float:
        """Return how much longer a lease of this age lasts, ``part`` (0 to 1) of the way up the known.

        Infinite where none of those that are known lasted that long, or too few are known.
        """
        curve = self._curve(course, milli)
        if curve is None:
            return math.inf
        times, lasting = curve
        first = bisect_right(times, age)
        here = lasting[first - 1] if first else 1.0
        # The least time after which no more than this part of those of its age are left.
        left = here * (1.0 - part) + _ROUNDING
        end = bisect_left(lasting, -left, lo=first, key=lambda each: -each)
        return times[end] - age if end < len(times) else math.inf

    def _curve(self, course: str, milli: int) -> _Curve | None:
        """Return the curve of the narrowest kind of which enough are known; None where of none are."""
        curves = self._curves
        for kind in _kinds(course, milli):
            if kind not in curves:
                ended = _of_kind(self._ended, kind)
                enough = len(ended) >= FEWEST
                curves[kind] = _survival(ended, _of_kind(self._going_on, kind)) if enough else None
            curve = curves[kind]
            if curve is not None:
                return curve
        return None


def _of_kind(times: Mapping[tuple[str, int], list[float]], kind: _Kind) -> list[float]:
    """Return those of a course and size, of a course, or all."""
    if isinstance(kind, tuple):
        return times.get(kind, [])
    found = (some for (course, _), some in times.items() if kind is None or course == kind)
    return list(chain.from_iterable(found))


def _kinds(course: str, milli: int) -> tuple[_Kind, _Kind, _Kind]:
    return (course, milli), course, None


def _survival(ended: Sequence[float], going_on: Sequence[float]) -> _Curve:
    """Return the times after which leases ended, ascending, and the part of leases that last longer."""
    times: list[float] = []
    lasting: list[float] = []
    left, part = len(ended) + len(going_on), 1.0
    # One that is still held at the very age at which another ended has lasted longer than that.
    for seconds, is_held in sorted(
        [*((each, False) for each in ended), *((each, True) for each in going_on)]
    ):
        if not is_held:
            part *= 1.0 - 1.0 / left
            times.append(seconds)
            lasting.append(part)
        left -= 1
    return times, lasting
