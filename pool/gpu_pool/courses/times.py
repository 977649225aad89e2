"""The times in a course file: each read back in words, and those that were written without a unit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_pool.courses.model import CourseFile
from gpu_pool.courses.text import FileProblem, Place, Tree, WrittenText, in_words
from gpu_pool.policy.course_values import given
from gpu_pool_client import BadRequest, parse_duration

#: The fields that are times, by their places.
TIMES: Final[tuple[Place, ...]] = (
    ("longest_lease",),
    ("idle_limit",),
    ("warn_before",),
    ("keep_at_most",),
    ("kubernetes", "start_within"),
)
_UNITS: Final = (("day", 86_400), ("hour", 3_600), ("minute", 60))


def without_unit(file: str, written: WrittenText) -> Iterator[FileProblem]:
    """Yield the times of a file that are plain numbers, with what they are taken for."""
    for place in TIMES:
        text = _at(written.tree, place)
        if not isinstance(text, str) or not text.strip()[-1:].isdecimal():
            continue
        try:
            seconds = parse_duration(text)
        except BadRequest:
            continue  # which is told where the field is read
        number = text.strip()
        yield FileProblem(
            file,
            written.lines.get(place),
            in_words(place),
            f"{given(text)} has no unit, and is read as {spelled(seconds)}.",
            f"Write {number}s, {number}min or {number}h.",
        )


def _at(tree: Tree, place: Place) -> Tree:
    for part in place:
        tree = tree.get(str(part)) if isinstance(tree, dict) else None
    return tree


def read_back(course: CourseFile) -> dict[str, str]:
    """Return every time of a course in words, by its field."""
    found: dict[str, str] = {}
    for place in TIMES:
        part = course.kubernetes if len(place) > 1 else course
        name = str(place[-1])
        seconds: float | None = getattr(part, name)
        if seconds is not None:
            is_default = name not in part.model_fields_set
            found[in_words(place)] = spelled(seconds) + (" (default)" if is_default else "")
    return found


def spelled(seconds: float) -> str:
    """Write a duration in words, exactly: 5400 → ``1 hour 30 minutes``, 0.5 → ``0.5 seconds``."""
    words = []
    for unit, size in _UNITS:
        count, seconds = divmod(seconds, size)
        if count:
            words.append(f"{count:g} {unit}{'s' * (count != 1)}")
    seconds = round(seconds, 3)
    if seconds or not words:
        words.append(f"{seconds:g} second{'s' * (seconds != 1)}")
    return " ".join(words)
