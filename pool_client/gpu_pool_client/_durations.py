"""Durations as people write them: ``90s``, ``15min``, ``2h``, ``1.5h``, ``1h30min``, ``3d``."""

from __future__ import annotations

import re
from typing import Final

from gpu_pool_client._errors import BadRequest

ACCEPTED: Final = "Accepted: 90s, 15min, 2h, 1h30min, 3d, or a number of seconds."
#: The longest duration that is read anywhere, in seconds: ten years.
LONGEST: Final = 3_650 * 86_400.0

_SECONDS: Final = {"d": 86_400, "h": 3_600, "min": 60, "m": 60, "s": 1}
_PART: Final = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)(d|h|min|m|s)", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?", re.ASCII)


def parse_duration(text: str) -> float:
    """Read a duration from what a person wrote.

    Parameters
    ----------
    text
        Such as ``90s``, ``15min``, ``1h30min``, ``3d``, or a plain number of seconds.

    Returns
    -------
    float
        The duration in seconds.

    Raises
    ------
    BadRequest
        It is not a duration, or a longer one than ten years. The remedy names what is accepted.
    """
    plain = text.replace(" ", "")
    parts = _PART.findall(plain)
    if parts and "".join(number + unit for number, unit in parts) == plain:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    elif _NUMBER.fullmatch(plain):
        seconds = float(plain)
    else:
        raise BadRequest(f"{text[:40]!a} is not a duration.", ACCEPTED)
    if seconds > LONGEST:
        raise BadRequest(
            f"{text[:40]!a} is longer than ten years.", f"Accepted: at most {format_duration(LONGEST)}."
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Write a duration in at most two units: 5400 → ``1h30min``, 59.6 → ``1min``, -1 → ``0s``.

    Parameters
    ----------
    seconds
        The duration in seconds; less than none counts as none, and of more than ten years that is said.
    """
    if seconds > LONGEST:
        return f"more than {format_duration(LONGEST)}"
    left = round(seconds) if seconds > 0 else 0  # which NaN is not
    words: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            words.append(f"{count}{unit}")
        elif words:
            break
    return "".join(words[:2]) or "0s"
