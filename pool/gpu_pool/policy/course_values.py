"""The values of a course as people write them, in its file and in the administrator's settings. Pure.

Each reader takes what was written: text, or a number where the settings are Python. It raises
``BadRequest``: what was given and why that is wrong, then what is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from gpu_pool_client import (
    WHOLE,
    BadRequest,
    SliceRequest,
    WhenIdle,
    _durations,
    parse_duration,
    parse_request,
)

_NUMBER: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,20})?", re.ASCII)
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,12}", re.ASCII)
#: Spaces at which no line is broken, as word processors and web pages put them before %, h or a dash.
_SPACES: Final = str.maketrans(dict.fromkeys("\u00a0\u2007\u202f", " "))
_YES_OR_NO: Final = {"true": True, "yes": True, "false": False, "no": False}
#: Written in place of the time after which idle kernels give way, where they never do.
NEVER: Final = "never"
#: The lowest priority, and the highest.
LEAST_PRIORITY: Final = -WHOLE
MOST_PRIORITY: Final = 1_000_000
#: The largest of all other whole numbers, and of all numbers: as many hours are a thousand centuries.
MOST: Final = 1_000_000_000
#: Characters of a value that are repeated.
_MOST_GIVEN: Final = 60


def given(value: object) -> str:
    """Repeat what was given: text in quotes and not too long, lists and groups by their kind."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a group of fields"
    text = value if isinstance(value, str) else str(value)
    return ascii(text if len(text) <= _MOST_GIVEN else text[: _MOST_GIVEN - 3] + "...")


def nearest(name: str, names: Iterable[str]) -> str:
    """Ask whether the most similar of the names was meant, if one is similar."""
    import difflib  # which takes longer to load than all else here, and is needed in refusals alone

    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"Did you mean {by_lower[close[0]]}?" if close else ""


def read_text(value: object) -> str:
    """Return the text that stands where one value is expected, with each space as keyboards have it."""
    if isinstance(value, str):
        return value.translate(_SPACES)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError:  # Python writes no number of thousands of digits
            raise BadRequest("is a number of thousands of digits.", "Accepted: a shorter one.") from None
    raise BadRequest(f"is {given(value)}.", "Accepted: one value.")


def read_whole_number(value: object, least: int = 0, most: int = MOST) -> int:
    """Read a whole number from ``least`` to ``most``."""
    text = read_text(value)
    if not _WHOLE_NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise BadRequest(
            f"{given(text)} is not a valid number.", f"Accepted: a whole number from {least} to {most}."
        )
    return int(text)


def read_priority(value: object) -> int:
    """Read a priority."""
    return read_whole_number(value, LEAST_PRIORITY, MOST_PRIORITY)


def read_yes_or_no(value: object) -> bool:
    """Read yes or no."""
    if isinstance(value, bool):
        return value
    text = read_text(value)
    if text.lower() not in _YES_OR_NO:
        raise BadRequest(f"{given(text)} is neither true nor false.", "Accepted: true, false.")
    return _YES_OR_NO[text.lower()]


def read_number(value: object, most: float = MOST) -> float:
    """Read a number from 0 to ``most``."""
    text = read_text(value)
    if not _NUMBER.fullmatch(text) or float(text) > most:
        raise BadRequest(
            f"{given(text)} is not a valid number.", f"Accepted: a number from 0 to {most}, such as 2 or 0.5."
        )
    return float(text)


def read_duration(value: object) -> float:
    """Read a duration; return seconds."""
    text = read_text(value)
    seconds = parse_duration(text)
    if not seconds:
        raise BadRequest(
            f"{given(text)} is not longer than zero.", f"Leave it out for no limit. {_durations.ACCEPTED}"
        )
    return seconds


def read_yield_after(value: object) -> float | None:
    """Read after how long an idle kernel's slice goes to somebody who waits; None for ``never``."""
    text = read_text(value).strip()
    if text.lower() == NEVER:
        return None
    try:
        seconds = parse_duration(text)
    except BadRequest as error:
        raise BadRequest(error.message, f"{error.remedy} Or {NEVER}.") from None
    if not seconds:
        raise BadRequest(
            f"{given(text)} is not longer than zero.", f"Accepted: a time, such as 60s, or {NEVER}."
        )
    return seconds


def read_request(value: object) -> SliceRequest:
    """Read a slice request."""
    return parse_request(read_text(value))


def read_share(value: object) -> int:
    """Read a share of GPUs: ``50%``, ``4`` (whole GPUs), ``2x50%``; return thousandths."""
    request = read_request(value)
    if request.milli is None or str(request) != request.guarantee.size:
        raise BadRequest(
            f"{given(value)} is not a share.", "Accepted: a share, such as 50% or 4 (whole GPUs)."
        )
    return request.count * request.milli


def read_memory(value: object) -> int:
    """Read an amount of memory; return MiB."""
    request = read_request(value)
    if request.memory_mib is None or str(request) != request.guarantee.size:
        raise BadRequest(
            f"{given(value)} is not an amount of memory.", "Accepted: an amount such as 16GiB or 655MiB."
        )
    return request.count * request.memory_mib


def read_when_idle(value: object) -> WhenIdle:
    """Read what becomes of the slice of an idle kernel that cannot be parked."""
    text = read_text(value)
    names = [each.value for each in WhenIdle]
    if text not in names:
        raise BadRequest(
            f"{given(text)} is not known.", f"Accepted: {', '.join(names)}. {nearest(text, names)}".strip()
        )
    return WhenIdle(text)
