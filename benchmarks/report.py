"""Lines of a benchmark's report, and the little statistics they need."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Line:
    """One measured ratio and, where there is one, the promise it is held to."""

    what: str
    ratio: float
    #: What the ratio was made of, in words and units.
    made_of: str
    promise: float | None = None
    kind: Literal["at most", "at least"] = "at most"
    #: The two figures of the ratio, where they are told apart; without a yardstick it is a figure alone.
    ours: float | None = None
    yardstick: float | None = None
    unit: str = ""
    #: A curve: our figure by what it grows with.
    points: tuple[tuple[float, float], ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the promise holds."""
        if self.promise is None:
            return True
        return self.ratio <= self.promise if self.kind == "at most" else self.ratio >= self.promise

    def __str__(self) -> str:
        if self.promise is None:
            verdict = ""
        else:
            verdict = f"   {self.kind} {self.promise:g}: {'kept' if self.kept else 'NOT KEPT'}"
        return f"{self.what:<58} {self.ratio:8.3f}{verdict}\n    {self.made_of}"


class Skipped(Exception):
    """What a benchmark needs is not here; the message says what."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share (0 to 1) of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(ratios: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """Return the 95% interval of the median of paired ratios, by bootstrap."""
    choose = random.Random(0).choices
    medians = [statistics.median(choose(ratios, k=len(ratios))) for _ in range(rounds)]
    return percentile(medians, 0.025), percentile(medians, 0.975)
