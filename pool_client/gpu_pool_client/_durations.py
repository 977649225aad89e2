"""Durations as people write them: ``90s``, ``15min``, ``2h``, ``1.5h``, ``1h30min``, ``3d``."""

from __future__ import annotations

import re
from typing import Final

from gpu_pool_client._errors import BadRequest

ACCEPTED: Final = "Accepted: 90s, 15min, 2h, 1h30min, 3d, or a number of seconds."

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
        It is not a duration. The remedy names the accepted forms.
    """
    plain = text.replace(" ", "")
    parts = _PART.findall(plain)
    if parts and "".join(number + unit for number, unit in parts) == plain:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if _NUMBER.fullmatch(plain):
        return float(plain)
    raise BadRequest(f"{text[:40]!a} is not a duration.", ACCEPTED)


def format_duration(seconds: float) -> str:
    """Write a duration in at most two units: 5400 → ``1h30min``, 59.6 → ``1min``, -1 → ``0s``.

    Parameters
    ----------
    seconds
        The duration in seconds; less than none counts as none.
    """
    left = max(0, round(seconds))
    words: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            words.append(f"{count}{unit}")
        elif words:
            break
    return "".join(words[:2]) or "0s"
