"""Durations as people write them, and what can be said to those who wait."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets import HasTraits, TraitError
from traitlets.config import Application

from gpu_pool_client import BadRequest, Outlook, format_duration, parse_duration
from gpu_pool_client._traits import Seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("15min", 900), ("2 h", 7200), ("1h30min", 5400), ("3d", 259_200), ("5m", 300)),
        *(("42", 42), ("1.5h", 5400), ("0.2s", 0.2)),
    ],
)
def test_what_is_accepted(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-1s", "1h!", "nan", "inf", "1e9", "2w", "\u0661s", "h", ".s", "1.h", "9" * 100]
)
def test_nonsense_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(BadRequest, match="15min, 2h"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["3650d1s", "3000000d", "9999999d" * 9, "999999999", "365d" * 11])
def test_what_is_longer_than_ten_years_is_refused_with_the_longest(text: str) -> None:
    assert parse_duration("3650d") == 3650 * 86_400
    with pytest.raises(BadRequest, match="longer than ten years. Accepted: at most 3650d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3650 * 86_400, "3650d"),
        *((each, "more than 3650d") for each in (3650 * 86_400 + 1, 1e18, 1e308, inf)),
    ],
)
def test_a_time_too_long_to_be_written_is_said_to_be_so(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert format_duration(-seconds) == format_duration(nan) == "0s"


class Settings(HasTraits):
    patience = Seconds(5.0, min=1, max=3600)
    pause = Seconds(5.0, min=0.5, where="It is set in the file.").tag(config=True)


@pytest.mark.parametrize(("given", "seconds"), [(3, 3), (1.5, 1.5), ("2s", 2), ("15min", 900), ("42", 42)])
def test_a_setting_of_seconds_takes_durations(given: object, seconds: float) -> None:
    assert Settings(patience=given).patience == seconds


@pytest.mark.parametrize("given", ["soon", "2h", "0s", 0, 3601, float("nan"), float("inf"), True, None, [1]])
def test_a_setting_of_seconds_says_what_it_accepts(given: object) -> None:
    accepted = "must be a number of seconds from 1 to 3600,\nor a duration such as 90s, 15min or 2h."
    with pytest.raises(TraitError, match=f"patience is .*; it {accepted}$"):
        Settings(patience=given)


def test_a_setting_without_a_greatest_value_says_where_it_is_set() -> None:
    assert Settings(pause="3d").pause == 259_200
    with pytest.raises(TraitError, match=r"from 0.5 on, at most ten years,\n.* 2h. It is set in the file.$"):
        Settings(pause="0.1s")


def test_a_setting_of_seconds_is_read_from_a_command_line() -> None:
    class Program(Application, Settings):
        pass

    program = Program()
    program.parse_command_line(["--Program.pause=2min"])
    assert program.pause == 120


@given(st.integers(0, 10**6))
def test_what_is_written_is_read_back_within_its_smaller_unit(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=max(60, seconds / 20))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"), (0, "0s"), (59.4, "59s"), (59.9, "1min"), (60, "1min"), (3_600, "1h"),
        (7_500, "2h5min"), (86_400, "1d"), (280_000, "3d5h"),
    ],
)  # fmt: skip
def test_a_duration_is_written_in_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_what_somebody_who_waits_is_told() -> None:
    why = "You need 2%, and nothing is free."
    assert str(Outlook(1, why)) == f"You are next in the queue. {why}"
    assert (
        str(Outlook(3, why, (240, 540))) == f"You are number 3 in the queue, perhaps about 4 to 9 min. {why}"
    )
    assert Outlook(2, why, (5, 20)).expected == "perhaps less than a minute"
    assert Outlook(2, why, (5, 120)).expected == "perhaps up to 2 min"
    assert Outlook(2, why, (0, 2_160)).expected == "perhaps up to 36 min"
    assert Outlook(2, why, (29, 21_700)).expected == "perhaps up to 6 h"
    assert Outlook(2, why, (31, 2_160)).expected == "perhaps about 1 to 36 min"
    assert Outlook(2, why, (230, 250)).expected == "perhaps about 4 min"
    assert Outlook(2, why, (1_800, 21_700)).expected == "perhaps about 30 min to 6 h"
    assert Outlook(2, why, (3_600, 21_700)).expected == "perhaps about 1 to 6 h"
