"""Lines of a benchmark's report, and the little statistics they need."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

Verdict = Literal["kept", "not kept", "undecided"]
Kind = Literal["at most", "at least"]
#: What one round of a benchmark has measured.
Round = TypeVar("Round")
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Line:
    """One measured ratio and, where there is one, the promise it is held to."""

    what: str
    ratio: float
    #: What the ratio was made of, in words and units.
    made_of: str
    promise: float | None = None
    kind: Kind = "at most"
    #: The two figures of the ratio, where they are told apart; without a yardstick it is a figure alone.
    ours: float | None = None
    yardstick: float | None = None
    unit: str = ""
    #: A curve: our figure by what it grows with.
    points: tuple[tuple[float, float], ...] = ()
    #: Where the ratio lies with a certainty of 95%, if it was measured in rounds.
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the promise holds: undecided while it lies within the interval. None without a promise."""
        if self.promise is None:
            return None
        low, high = self.interval or (self.ratio, self.ratio)
        best, worst = (low, high) if self.kind == "at most" else (-high, -low)
        limit = self.promise if self.kind == "at most" else -self.promise
        if worst <= limit:
            return "kept"
        return "not kept" if best > limit else "undecided"

    def __str__(self) -> str:
        verdict = "" if self.promise is None else f"   {self.kind} {self.promise:g}: {self.verdict}"
        return f"{self.what:<58} {self.ratio:8.3f}{verdict}\n    {self.made_of}"


class Skipped(Exception):
    """What a benchmark needs is not here; the message says what."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share (0 to 1) of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the median of independent values, by bootstrap."""
    choose = random.Random(0).choices
    medians = [statistics.median(choose(values, k=len(values))) for _ in range(_RESAMPLES)]
    return percentile(medians, 0.025), percentile(medians, 0.975)


def compared(
    what: str,
    pairs: Sequence[tuple[float, float]],
    made_of: str,
    promise: float | None = None,
    kind: Kind = "at most",
    *,
    unit: str = "",
) -> Line:
    """Return the line of what was measured in pairs: ours, and right beside it the yardstick, in ``unit``.

    The ratio is the median of the pairs' ratios: what else the machine did meanwhile slowed both of a pair.
    """
    ratios = [ours / yardstick for ours, yardstick in pairs]
    ours, yardstick = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio, between = statistics.median(ratios), interval(ratios)
    made_of = f"{made_of}; 95% interval {between[0]:.3g} to {between[1]:.3g}, of {len(pairs)}"
    return Line(what, ratio, made_of, promise, kind, ours, yardstick, unit, interval=between)


def until_decided(
    measure: Callable[[], Round], lines: Callable[[Sequence[Round]], list[Line]], least: int, most: int
) -> list[Line]:
    """Measure ``least`` rounds, and up to ``most`` while a promise is undecided; return the lines."""
    rounds = [measure() for _ in range(least)]
    while any(line.verdict == "undecided" for line in lines(rounds)) and len(rounds) < most:
        rounds.append(measure())
    return lines(rounds)
