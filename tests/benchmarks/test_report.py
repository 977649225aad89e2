"""A promise is kept, not kept or undecided by the interval in which a ratio lies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmarks are nowhere installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.report import Kind, Line, compared, until_decided


@pytest.mark.parametrize(
    ("between", "kind", "verdict"),
    [
        ((0.9, 1.0), "at most", "kept"),
        ((0.9, 1.1), "at most", "undecided"),
        ((1.01, 1.1), "at most", "not kept"),
        ((1.0, 1.1), "at least", "kept"),
        ((0.9, 1.1), "at least", "undecided"),
        ((0.9, 0.99), "at least", "not kept"),
        (None, "at most", "kept"),
        (None, "at least", "kept"),
    ],
)
def test_a_verdict_goes_by_the_interval(
    between: tuple[float, float] | None, kind: Kind, verdict: str
) -> None:
    assert Line("what", 1.0, "made of", 1.0, kind, interval=between).verdict == verdict


def test_without_a_promise_there_is_no_verdict() -> None:
    assert Line("what", 1.0, "made of").verdict is None


def test_a_ratio_is_the_median_of_pairs_and_not_of_sums() -> None:
    # The machine was ten times slower during one pair: it says nothing about the ratio.
    line = compared("what", [(2.0, 1.0), (20.0, 10.0), (2.2, 1.0)], "seconds", unit="s")
    assert line.ratio == 2.0
    assert line.interval == (2.0, 2.2)
    assert (line.ours, line.yardstick) == (2.2, 1.0)


def test_rounds_are_measured_until_the_promise_is_decided() -> None:
    measured = iter([0.8, 1.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    counted: list[float] = []

    def measure() -> float:
        counted.append(next(measured))
        return counted[-1]

    (line,) = until_decided(
        measure, lambda rounds: [compared("what", [(one, 1.0) for one in rounds], "", 1.0)], 2, 9
    )
    assert line.verdict == "kept"
    assert 2 < len(counted) < 9, "it went on while undecided, and no longer"


def test_what_stays_undecided_ends_after_the_most_rounds() -> None:
    measured = iter([0.5, 1.5] * 3)
    (line,) = until_decided(
        lambda: next(measured), lambda rounds: [compared("w", [(one, 1.0) for one in rounds], "", 1.0)], 2, 6
    )
    assert line.verdict == "undecided"
    assert next(measured, None) is None
