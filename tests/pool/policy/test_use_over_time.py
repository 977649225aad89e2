"""What was used, part by part of a period."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_pool.policy.use_over_time import PeriodParts, round_up, use_over_time
from gpu_pool_client import EndedLease

HOUR = 3600.0
#: Four parts of an hour.
PERIOD = PeriodParts(began=10 * HOUR, seconds=HOUR, parts=4)


def ended(**facts: Any) -> EndedLease:
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
    assert use_of(ended()).held == {"ml": [0, HOUR / 2, HOUR / 2, 0]}


def test_what_was_held_is_grouped_and_added_up() -> None:
    use = use_of(ended(), ended(id="1-b"), ended(id="1-c", course="nlp", gpu_seconds=2 * HOUR))
    assert use.held == {"ml": [0, HOUR, HOUR, 0], "nlp": [0, HOUR, HOUR, 0]}
    assert use.held_by_all == [0, 2 * HOUR, 2 * HOUR, 0]


def test_a_life_is_cut_where_the_period_is() -> None:
    use = use_of(ended(held_at=0.0, ended_at=20 * HOUR, gpu_seconds=10 * HOUR))
    assert use.held["ml"] == [HOUR / 2] * 4


def test_what_was_lent_is_beside_what_was_held() -> None:
    assert use_of(ended(lent_gpu_seconds=HOUR / 2)).lent == [0, HOUR / 4, HOUR / 4, 0]


def test_what_could_be_used_on_top_is_where_it_was_held() -> None:
    use = use_of(ended(burst_mib_seconds=2 * HOUR), ended(id="1-b", burst_mib_seconds=HOUR))
    assert use.burst == [0, 1.5 * HOUR, 1.5 * HOUR, 0]


def test_sums_of_old_leases_are_passed_over() -> None:
    use = use_of(ended(id="", held_at=None))
    assert use.held_by_all == [0, 0, 0, 0]


def test_cells_are_where_they_ran_and_count_with_what_was_held() -> None:
    use = use_of(ended(), lease_a=((11.5 * HOUR, HOUR),))
    assert use.busy == [0, HOUR / 4, HOUR / 4, 0]


def test_a_cell_that_is_said_to_outlast_its_lease_ends_with_it() -> None:
    assert use_of(ended(), lease_a=((12.5 * HOUR, 100 * HOUR),)).busy == [0, 0, HOUR / 4, 0]


def test_nothing_is_said_of_cells_where_that_is_not_to_be_told() -> None:
    assert use_over_time([ended()], lambda row: row.user, PERIOD).busy == []


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
