"""The public traces, where ``TRACES`` names a folder with them: they are no part of this project."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from gpu_pool.devices import discover
from gpu_pool.simulation import ORDERS, figures, simulate
from gpu_pool.simulation.engine import Lengths
from gpu_pool.simulation.formats import FORMATS, OpenbTrace, read_openb
from gpu_pool.simulation.recorded import RecordedDays
from gpu_pool.simulation.report import waits

HOUR = 3600.0


def trace(*names: str) -> Path:
    """Return the file, under whichever of its names it is there; skip the test where it is not."""
    found = [path for name in names if (path := Path(os.environ.get("TRACES", "/none")) / name).is_file()]
    if not found:
        pytest.skip(f"TRACES names no folder with {names[0]}")
    return found[0]


def four(
    openb: OpenbTrace, day: int, count: int, order: str, lengths: Lengths
) -> tuple[float, float, float, float]:
    """Return what was in use, and waits in hours: mean, mean of those for four GPUs or more, longest."""
    devices = discover({"GPU_POOL_DEVICES": f"V100-SXM2-32GB:{count}"}).devices
    run = simulate(openb.window(day, 3), devices, ORDERS[order], lengths=lengths)
    found, large = figures(run), waits(each for each in run.outcomes if each.arrival.request.count >= 4)
    return found.utilisation, found.waits.mean / HOUR, large.mean / HOUR, found.waits.worst / HOUR


@pytest.fixture(scope="module")
def sensei() -> RecordedDays:
    with trace("sensei_june_60sec.csv", "notebookos_sensei_june.csv").open() as file:
        return FORMATS["sensei"](file)


@pytest.fixture(scope="module")
def openb() -> OpenbTrace:
    with trace("openb_pod_list_default.csv", "openb_gpu_pods.csv").open() as file:
        return read_openb(file)


def test_what_june_would_hold_without_a_queue(sensei: RecordedDays) -> None:
    sums = sensei.sums([300.0, 900.0])
    parts = [sums.used / sums.reserved, *(sums.held[limit] / sums.reserved for limit in (300.0, 900.0))]
    assert [round(100 * part, 1) for part in parts] == [25.0, 25.9, 26.4]
    assert [round(100 * sums.again[limit], 1) for limit in (300.0, 900.0)] == [30.0, 14.9]
    assert (len(sensei.sessions), sensei.bad) == (339, ())


def test_the_window_of_notebookos(sensei: RecordedDays) -> None:
    days = sensei.window(561.5 * HOUR, 17.5 * HOUR)
    assert (len(days.sessions), sum(len(each.cells) for each in days.sessions)) == (186, 1377)
    assert round(sum(each.gpu_seconds for each in days.sessions) / HOUR) == 17_580
    assert round(sum(each.used_gpu_seconds for each in days.sessions) / HOUR) == 6_001


def test_three_days_of_pods_under_the_orders_that_others_have(openb: OpenbTrace) -> None:
    strict, backfill = (four(openb, 125, 8, order, "learned") for order in ("strict order", "backfill"))
    assert len(openb.window(125, 3)) == 403
    assert [round(strict[0], 2), round(backfill[0], 2)] == [0.46, 0.49]
    assert strict[1] == pytest.approx(21.4, abs=0.1)
    assert backfill[1] == pytest.approx(2.1, abs=0.05)


@pytest.mark.long
def test_eighteen_windows_are_served_as_fairness_says(openb: OpenbTrace) -> None:
    runs: list[tuple[str, Lengths]] = [("fair", "learned"), ("fair", "known")]
    runs += [("backfill", "learned"), ("strict order", "learned")]
    windows = [(day, count) for day in range(116, 132, 3) for count in (8, 10, 12)]
    found = [[four(openb, *window, *run) for run in runs] for window in windows]
    nothing, known, backfill, _ = (
        [statistics.fmean(each[row][figure] for each in found) for figure in range(4)] for row in range(4)
    )
    assert nothing[0] >= 0.97 * backfill[0]
    assert nothing[1] <= 1.5 * backfill[1]
    assert nothing[2] <= 0.8 * backfill[2]
    assert known[0] >= 0.99 * backfill[0]
    assert known[1] <= 1.8 * backfill[1]
    assert known[2] <= 0.45 * backfill[2]
    assert known[3] <= 0.5 * backfill[3]
    for ours, _, others, strict in found:
        assert ours[0] >= 0.94 * max(others[0], strict[0])
        assert ours[1] <= strict[1] + 0.25
