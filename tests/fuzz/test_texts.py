"""What people and variables say: read as something, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.corpus import kept
from gpu_pool.devices.inventory import parse_devices
from gpu_pool_client import BadRequest, parse_duration, parse_request
from gpu_pool_client._errors import MAX_MESSAGE
from gpu_pool_client._requests import MAX_MIB

T = TypeVar("T")

_PIECES = st.sampled_from([
    "2%", "0.5", "1.5GiB", "655MiB", "2x", "x", "4", "100.0000%", "%", ".", "..", "-1", "+1", "1e3", "inf",
    "nan",
    "\u0664", "\u00b2", " ", "\t", "\0", "model=V100", "model=", "memory>=16GiB", "memory=1",
    "driver>=550.54.14",
    "driver>=", "index=0,1", "index=,", ">=", "=", "9" * 20, "0" * 40, "gib", "GIB", "MiB,", "\ud800",
])  # fmt: skip
TEXTS = st.one_of(st.text(max_size=300), st.lists(_PIECES, max_size=12).map("".join))


def _read(parse: Callable[[str], T], text: str) -> T | None:
    """Return what is read, or None for a refusal, which must be fit to be read by a person."""
    try:
        return parse(text)
    except BadRequest as error:
        refusal = error
    assert 0 < len(refusal.message) <= MAX_MESSAGE
    assert refusal.message.isprintable()
    assert refusal.remedy
    return None


@kept("requests", lambda content: content.decode(errors="surrogateescape"))
@given(TEXTS)
def test_a_slice_request_is_read_and_reads_back_or_is_refused_in_words(text: str) -> None:
    request = _read(parse_request, text)
    if request is None:
        return
    assert parse_request(str(request)) == request
    assert 1 <= request.count <= 1024
    assert (request.milli is None) is not (request.memory_mib is None)
    assert 1 <= (request.milli or request.memory_mib or 0) <= MAX_MIB


@pytest.mark.parametrize("parse", [parse_devices, parse_duration])
@given(text=TEXTS)
def test_devices_and_durations_are_read_or_refused_in_words(
    parse: Callable[[str], object], text: str
) -> None:
    _read(parse, text)
