"""Sums over leases: every row is counted once, and nothing is made up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_pool.policy.usage_report import LIVING, PeriodParts, line, living, report, round_up, use_over_time
from gpu_pool_client import Device, EndedLease, Holder, Lease, LeaseState, Slice, parse_request


def ended(**facts: Any) -> EndedLease:
    """Return a row of the history."""
    plain = {
        "id": "1-a",
        "request": "2%",
        "milli": 20,
        "held_seconds": 95.0,
        "user": "ada",
        "course": "",
        "kernel": None,
        "requested_at": 0.0,
        "held_at": 5.0,
        "ended_at": 100.0,
    }
    measured = {"peak_mib": None, "mean_mib": None, "device_seconds": None, "touched": None}
    return EndedLease(**{**plain, "gpu_seconds": 36.0, "reason": "released", **measured, **facts})


seconds = st.floats(0, 1e9, allow_nan=False)
rows = st.builds(
    ended,
    user=st.sampled_from(["ada", "grace", ""]),
    course=st.sampled_from(["ml101", ""]),
    requested_at=seconds,
    held_at=st.none() | seconds,
    gpu_seconds=seconds,
    reason=st.sampled_from(["released", "process-gone"]),
    peak_mib=st.none() | st.integers(0, 100_000),
    mean_mib=st.none() | seconds,
    device_seconds=st.none() | seconds,
    touched=st.none() | st.booleans(),
).filter(lambda row: row.mean_mib is None or row.device_seconds is not None)


@given(st.lists(rows), st.sampled_from(["user", "course", "reason"]))
def test_the_rows_add_up_to_the_total(history: list[EndedLease], by: str) -> None:
    lines, total = report(history, lambda row: str(getattr(row, by))), line("total", history)
    for name in ("leases", "measured", "untouched"):
        assert sum(getattr(each, name) for each in lines) == getattr(total, name)
    assert math.isclose(sum(each.gpu_hours for each in lines), total.gpu_hours, rel_tol=1e-9)
    for reason, count in total.reasons.items():
        assert sum(each.reasons.get(reason, 0) for each in lines) == count
    peaks = [each.peak_mib for each in lines if each.peak_mib is not None]
    assert max(peaks, default=None) == total.peak_mib
    assert max((each.people for each in lines), default=0) <= total.people <= sum(e.people for e in lines)
    assert [each.key for each in lines] == sorted({str(getattr(row, by)) for row in history})


def test_what_a_line_says() -> None:
    found = line(
        "ml101",
        [
            ended(held_at=10.0, peak_mib=4000, mean_mib=1000.0, device_seconds=30.0, touched=1),
            ended(held_at=20.0, peak_mib=900, mean_mib=400.0, device_seconds=90.0, touched=1, user="grace"),
            ended(held_at=90.0, device_seconds=0.0, touched=0, reason="idle"),
            ended(held_at=None, gpu_seconds=0.0, reason="withdrawn"),
        ],
    )
    assert (found.leases, found.people, found.gpu_hours) == (4, 2, 0.03)
    assert (found.peak_mib, found.mean_mib) == (4000, 550.0)
    assert (found.measured, found.untouched, found.median_wait) == (3, 1, 20.0)
    assert list(found.reasons.items()) == [("released", 2), ("idle", 1), ("withdrawn", 1)]


def test_what_was_not_measured_is_not_made_up() -> None:
    found = line("", [ended(held_at=None)])
    assert (found.peak_mib, found.mean_mib, found.measured, found.median_wait) == (None, None, 0, None)


@pytest.mark.parametrize(("held_at", "gpu_seconds"), [(40.0, 30.0), (100.0, 0.0), (200.0, 0.0)])
def test_a_lease_that_lives_counts_up_to_now(held_at: float, gpu_seconds: float) -> None:
    parts = tuple(Slice(Device(f"GPU-{n}", n, "V100", 32768), 250, 8192) for n in range(2))
    lease = Lease(
        "1-a", "key", parse_request("2x25%"), Holder("ada"), LeaseState.HELD, 0.0, held_at, slices=parts
    )
    row = living(lease, now=100.0)
    assert (row.gpu_seconds, row.reason) == (gpu_seconds, LIVING)
    assert line("", [row]).median_wait is None


HOUR = 3600.0
#: Four parts of an hour.
PERIOD = PeriodParts(began=10 * HOUR, seconds=HOUR, parts=4)


def past_lease(**facts: Any) -> EndedLease:
    """Return a lease of half a GPU that was held in the second and third hour."""
    row = {
        "milli": 500, "id": "1-a", "user": "ada", "course": "ml", "kernel": None, "request": "50%",
        "reason": "released", "requested_at": 10 * HOUR, "held_at": 11 * HOUR, "ended_at": 13 * HOUR,
        "held_seconds": 2 * HOUR, "gpu_seconds": HOUR, "peak_mib": None,
    }  # fmt: skip
    return EndedLease(**{**row, **facts})


def use_of(*rows: EndedLease, **busy: tuple[tuple[float, float], ...]) -> Any:
    """Return what these used, with when those of that name worked."""
    told = {name.replace("lease_", "1-"): times for name, times in busy.items()}
    return use_over_time(rows, lambda row: row.course, PERIOD, told)


def test_what_was_held_is_where_it_was_held() -> None:
    assert use_of(past_lease()).held == {"ml": [0, HOUR / 2, HOUR / 2, 0]}


def test_what_was_held_is_grouped_and_added_up() -> None:
    use = use_of(past_lease(), past_lease(id="1-b"), past_lease(id="1-c", course="nlp", gpu_seconds=2 * HOUR))
    assert use.held == {"ml": [0, HOUR, HOUR, 0], "nlp": [0, HOUR, HOUR, 0]}
    assert use.held_by_all == [0, 2 * HOUR, 2 * HOUR, 0]


def test_a_life_is_cut_where_the_period_is() -> None:
    use = use_of(past_lease(held_at=0.0, ended_at=20 * HOUR, gpu_seconds=10 * HOUR))
    assert use.held["ml"] == [HOUR / 2] * 4


def test_what_was_lent_is_beside_what_was_held() -> None:
    assert use_of(past_lease(lent_gpu_seconds=HOUR / 2)).lent == [0, HOUR / 4, HOUR / 4, 0]


def test_what_could_be_used_on_top_is_where_it_was_held() -> None:
    use = use_of(past_lease(burst_mib_seconds=2 * HOUR), past_lease(id="1-b", burst_mib_seconds=HOUR))
    assert use.burst == [0, 1.5 * HOUR, 1.5 * HOUR, 0]


def test_sums_of_old_leases_are_passed_over() -> None:
    use = use_of(past_lease(id="", held_at=None))
    assert use.held_by_all == [0, 0, 0, 0]


def test_cells_are_where_they_ran_and_count_with_what_was_held() -> None:
    use = use_of(past_lease(), lease_a=((11.5 * HOUR, HOUR),))
    assert use.busy == [0, HOUR / 4, HOUR / 4, 0]


def test_a_cell_that_is_said_to_outlast_its_lease_ends_with_it() -> None:
    assert use_of(past_lease(), lease_a=((12.5 * HOUR, 100 * HOUR),)).busy == [0, 0, HOUR / 4, 0]


def test_nothing_is_said_of_cells_where_that_is_not_to_be_told() -> None:
    assert use_over_time([past_lease()], lambda row: row.user, PERIOD).busy == []


@given(st.floats(0, 20), st.floats(0, 20), st.floats(0.1, 5), st.integers(1, 40))
@example(3.0, 2.5, 0.1, 6)
def test_a_time_is_divided_without_loss(first: float, last: float, seconds: float, parts: int) -> None:
    began, ended_at = sorted((first, last))
    period = PeriodParts(2.0, seconds, parts)
    inside = max(0.0, min(ended_at, 2.0 + seconds * parts) - max(began, 2.0))
    assert sum(each for _, each in period.overlaps(began, ended_at)) == pytest.approx(inside, abs=1e-6)


@pytest.mark.parametrize(
    ("gpus", "rounded"), [(0.0, 0.01), (0.3, 0.5), (1.0, 1.0), (1.01, 2.0), (12.0, 20.0)]
)
def test_a_scale_ends_at_a_round_number(gpus: float, rounded: float) -> None:
    assert round_up(gpus) == pytest.approx(rounded)
