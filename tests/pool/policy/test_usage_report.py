"""Sums over leases: every row is counted once, and nothing is made up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy.usage_report import LIVING, line, living, report
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
