"""How MPS shows limits, in both of its versions."""

from __future__ import annotations

import re
from typing import Final

_MEMORY: Final = re.compile(r"([0-9]+)([MG])", re.ASCII)


def is_memory(answer: str, mib: int) -> bool:
    """Whether an answer such as ``655M`` or ``3G`` is that much; whole GiB are shown as such."""
    match = _MEMORY.fullmatch(answer.strip())
    return match is not None and int(match[1]) * (1024 if match[2] == "G" else 1) == mib


def is_percentage(answer: str, percent: int) -> bool:
    """Whether an answer such as ``2.0`` is that much."""
    try:
        return float(answer) == percent
    except ValueError:
        return False
