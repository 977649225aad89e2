"""How MPS shows limits, in both of its versions."""

from __future__ import annotations

import re
from typing import Final

_MEMORY: Final = re.compile(r"([0-9]+)([MG])", re.ASCII)


def is_memory(answer: str, mib: int) -> bool:
    """Whether an answer such as ``655M`` or ``3G`` means that much.

    The daemon keeps the limit to the byte and shows it rounded down to whole
    GiB from 1 GiB on: 1,621 MiB are ``1G`` (driver 580.159.04, H100).
    """
    match = _MEMORY.fullmatch(answer.strip())
    if match is None:
        return False
    return int(match[1]) == (mib // 1024 if match[2] == "G" else mib)


def is_percentage(answer: str, percent: int) -> bool:
    """Whether an answer such as ``2.0`` is that much."""
    try:
        return float(answer) == percent
    except ValueError:
        return False
