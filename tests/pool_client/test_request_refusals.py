"""What is no slice request, and what a person is told about it: every sentence, as it is."""

from __future__ import annotations

import pytest

from gpu_pool_client import BadRequest, parse_request
from gpu_pool_client._requests import ACCEPTED

_COUNT = "the number of GPUs is between 1 and 1024"
_UNIT = "memory is written in GiB or MiB"
_SHARE = "a share is between 0.1% and 100%"
_FINEST = "the smallest share is 0.1% (0.001)"
_MOST = "a share of one GPU is at most 1; for more write, say, 2x75%"
_EITHER = "write either the number of whole GPUs or NxSHARE"
_SIGNS = "write model=, memory>=, driver>= and index="
_AMOUNT = "memory is between 1MiB and 999999999MiB"

_KINDS = "write both as shares, 2%..10%, or both as memory, 1GiB..4GiB"
_ABOVE = "its limit is to be above what it has for certain, as in 2%..10%"
_WHOLE = "of a whole GPU there is no more to have: leave its limit away"
_ONE_GPU = "its limit is at most a whole GPU; for several GPUs write, say, 2x2%..10%"

_DURATIONS = "Accepted: 90s, 15min, 2h, 1h30min, 3d, or a number of seconds"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("\u00e4", "only plain ASCII digits, letters and signs are accepted"),
        ("2g", _UNIT),
        ("1.5gb", _UNIT),
        ("3MI", _UNIT),
        ("0x50%", _COUNT),
        ("1025x2%", _COUNT),
        ("1025", _COUNT),
        ("1.5", _MOST),
        ("2x1.5", _MOST),
        ("2x2", _EITHER),
        ("3x1000", _EITHER),
        ("0%", _SHARE),
        ("0", _SHARE),
        ("100.1%", _SHARE),
        ("0.0001", _FINEST),
        ("0.05%", _FINEST),
        ("0GiB", _AMOUNT),
        ("976563GiB", _AMOUNT),
        ("2% a", "'a' is not a filter"),
        (f"2% {'a' * 60}", f"'{'a' * 40}' is not a filter"),
        ("2% model>=x", _SIGNS),
        ("2% memory=4GiB", _SIGNS),
        ("2% driver=5", _SIGNS),
        ("2% index>=1", _SIGNS),
        ("2% model=x MODEL=y", "the filter model is given twice"),
        ("2% model=-", "the filter value '-' is not understood"),
        ("2% driver>=x", "the filter value 'x' is not understood"),
        ("2% index=a", "the filter value 'a' is not understood"),
        (f"2% model={'-' * 60}", f"the filter value '{'-' * 40}' is not understood"),
        ("2% memory>=0MiB", _AMOUNT),
        ("2% memory>=976563GiB", _AMOUNT),
        ("2% memory>=x1GiB", "the filter value 'x1GiB' is not an amount of memory"),
        ("2% memory>=1GiBx", "the filter value '1GiBx' is not an amount of memory"),
        ("2% driver>=5.5.5.5.5", "the filter value '5.5.5.5.5' is not understood"),
        ("2% index=,1", "the filter value ',1' is not understood"),
        ("2% memory>=4", "the filter value '4' is not an amount of memory"),
        ("2% for", "after for a duration follows, such as 20min, 2h or 1h30min"),
        ("2% for 1h for 2h", "its length is given twice"),
        ("2% for 0min", "its length is not longer than zero"),
        ("2% for soon", f"'soon' is not a duration. {_DURATIONS}"),
        ("2% for -1h", f"'-1h' is not a duration. {_DURATIONS}"),
        ("2% for 20 min", "'min' is not a filter"),
        ("2% for 3651d", "'3651d' is longer than ten years. Accepted: at most 3650d"),
        ("2% for model=V100", f"'model=V100' is not a duration. {_DURATIONS}"),
        ("2%..", "behind .. its limit follows, as in 2%..10%"),
        ("2%.. 10%", "behind .. its limit follows, as in 2%..10%"),
        ("2%..4GiB", _KINDS),
        ("1GiB..10%", _KINDS),
        ("1..4GiB", _KINDS),
        ("10%..10%", _ABOVE),
        ("10%..2%", _ABOVE),
        ("0.1..10%", _ABOVE),
        ("1024MiB..1GiB", _ABOVE),
        ("1..2", _WHOLE),
        ("4..8", _WHOLE),
        ("100%..100%", _WHOLE),
        ("50%..2", _ONE_GPU),
        ("2%..2x10%", _ONE_GPU),
        ("2%..150%", _SHARE),
        ("2%..1.5", _MOST),
        ("2%..0.05%", _FINEST),
        ("1GiB..4gb", _UNIT),
        ("1GiB..976563GiB", _AMOUNT),
        (f"2% memory>={'4' * 60}", f"the filter value '{'4' * 40}' is not an amount of memory"),
    ],
)
def test_a_refusal_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(text)
    shown = ascii(text if len(text) <= 40 else text[:37] + "...")
    assert caught.value.message == f"{shown} is not a GPU slice: {why}."
    assert caught.value.remedy == ACCEPTED


@pytest.mark.parametrize(
    "text",
    [
        "abc",
        "2x",
        "x2%",
        ".",
        "%",
        "0.0000001GiB",
        "1000000000MiB",
        "12345x1%",
        "..",
        "..2%",
        "2%...",
        "2%..x",
        "2%..5%..9%",
    ],
)
def test_what_is_nothing_like_a_request_is_shown_what_is(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(text)
    assert (caught.value.message, caught.value.remedy) == (f"'{text}' is not a GPU slice.", ACCEPTED)


def test_what_is_too_long_is_not_read() -> None:
    with pytest.raises(
        BadRequest,
        match=r"^'x{37}\.\.\.' is not a GPU slice: it has 257 characters; at most 256 are accepted",
    ):
        parse_request("x" * 257)
    assert parse_request("2%" + " " * 254).milli == 20
    indexes = ",".join(str(1000 + number) for number in range(32))
    assert len(str(parse_request(f"2% model={'a' * 60} index={indexes} for 9999999"))) == 255
    for size in ("2%", "0.1..0.2"):
        with pytest.raises(BadRequest, match="written in full it has more than 256 characters"):
            parse_request(f"{size} model={'a' * 63} index={indexes} for 9999999")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1024", "1024"),
        ("1024x0.1%", "1024x0.1%"),
        ("1x1", "1"),
        ("3x100%", "3"),
        ("1000.000", "1000"),
        ("0.999", "99.9%"),
        ("999999999MiB", "999999999MiB"),
        ("0.0009GiB", "1MiB"),
        (".5", "50%"),
        ("2% index=1,0,1 driver>=550.54.14 memory>=1.50GiB model=a100", None),
    ],
)
def test_what_is_just_within_the_limits(text: str, said: str | None) -> None:
    written = str(parse_request(text))
    assert written == (said or "2% model=a100 memory>=1.5GiB driver>=550.54.14 index=0,1")


@pytest.mark.parametrize(
    ("written", "mib"),
    [
        ("1GiB", 1024),
        ("1gib", 1024),
        ("1.25GiB", 1280),
        ("1.0001GiB", 1025),
        ("0.5MiB", 1),
        ("1.5MiB", 2),
        ("700MiB", 700),
        ("0.25GiB", 256),
        ("999999999MiB", 999999999),
    ],
)
def test_memory_is_read_alike_in_a_size_and_in_a_filter(written: str, mib: int) -> None:
    assert parse_request(written).memory_mib == mib
    assert parse_request(f"2% memory>={written}").filters.memory_mib == mib


def test_filters_are_read_as_they_are() -> None:
    filters = parse_request("2% INDEX=3,1,3 Driver>=550.54 MODEL=RTX-A6000").filters
    assert (filters.index, filters.driver, filters.model) == ((1, 3), (550, 54), "RTX-A6000")
    nothing = parse_request("2%").filters
    assert (nothing.index, nothing.driver, nothing.model, nothing.memory_mib) == ((), None, None, None)


@pytest.mark.parametrize(
    ("text", "milli"),
    [("0.1%", 1), ("0.001", 1), ("2.50%", 25), ("0.0250", 25), ("100%", 1000), ("99.9%", 999)],
)
def test_shares_are_exact(text: str, milli: int) -> None:
    assert parse_request(text).milli == milli
