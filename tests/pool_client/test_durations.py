"""Durations as people write them, and what can be said to those who wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool_client import BadRequest, Outlook, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15min", 900), ("2 h", 7200), ("1h30min", 5400), ("3d", 259_200), ("5m", 300), ("42", 42)],
)
def test_what_is_accepted(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-1s", "1h!", "nan", "inf", "1e9", "2w", "\u0661s", "h", "9" * 100]
)
def test_nonsense_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(BadRequest, match="15min, 2h"):
        parse_duration(text)


@given(st.integers(0, 10**6))
def test_what_is_written_is_read_back_within_its_smaller_unit(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=max(60, seconds / 20))


def test_what_somebody_who_waits_is_told() -> None:
    why = "You need 2%, and nothing is free."
    assert str(Outlook(1, why)) == f"You are next in line. {why}"
    assert str(Outlook(3, why, (240, 540))) == f"You are number 3 in line, about 4 to 9 min. {why}"
    assert Outlook(2, why, (5, 20)).expected == "less than a minute"
    assert Outlook(2, why, (5, 120)).expected == "at most about 2 min"
    assert Outlook(2, why, (3_600, 21_700)).expected == "about 1 to 6 h"
