"""A colour and a pattern for every course, so that no two look alike to anybody. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

#: The colours and patterns that the style sheet and the page's definitions know.
HUES: Final = 8
PATTERNS: Final = 4
#: What the leases of no course are called.
NO_COURSE: Final = "no course"


class Mark(NamedTuple):
    """How a course is drawn."""

    hue: int
    pattern: int


def course_label(name: str | None) -> str:
    """Return a course's name for people."""
    return name or NO_COURSE


def marks(configured: Iterable[str], found: Iterable[str | None]) -> Mapping[str, Mark]:
    """Give every course its mark, by its place among all: neighbours differ in colour and in pattern.

    Those that are only found somewhere come last, so the configured ones always look the same.
    """
    first = sorted(configured)
    more = sorted({course_label(name) for name in found} - {*first})
    return {
        label: Mark(place % HUES, (place + place // HUES) % PATTERNS)
        for place, label in enumerate((*first, *more))
    }
