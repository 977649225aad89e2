"""What a checked course file comes to, and the history of its changes. Pure: texts and figures in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gpu_pool.courses.arithmetic import SliceFigures
from gpu_pool.courses.descriptions import at_once_words, rush_words, slice_notes
from gpu_pool.courses.editing import difference, how_much
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.service.course_editor import CheckedCourseFile
from gpu_pool.service.dashboard.labels import PageTime, memory, moment

#: Whoever changed a file by other means than the page, of whom nothing is known.
ELSEWHERE = "changed outside of this page"


@dataclass(frozen=True, slots=True)
class FitRow:
    """A slice on one model of GPU."""

    name: str
    request: str
    gpu: str
    each: str
    at_once: str
    memory: str
    left: str


@dataclass(frozen=True, slots=True)
class Sums:
    """The arithmetic of a course file."""

    rows: tuple[FitRow, ...]
    notes: tuple[str, ...]
    #: What happens when all come at once; empty where that was not asked for.
    rush: str


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a difference: ``kind`` is the name of its style."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a course file."""

    #: That of the version it led to; 0 for the file as it is, if no version is like it.
    number: int
    who: str
    #: None where it is not known.
    when: PageTime | None
    #: Empty for the oldest version that is known.
    size: str
    lines: tuple[DiffLine, ...]
    is_now: bool


def sums(checked: CheckedCourseFile) -> Sums | None:
    """Return the arithmetic of what was checked; None where there is none."""
    if checked.course is None or not checked.slices:
        return None
    return Sums(
        rows=tuple(row for each in checked.slices for row in _fit_rows(each)),
        notes=tuple(note for each in checked.slices for note in slice_notes(each)),
        rush=rush_words(checked.rush, checked.course) if checked.rush else "",
    )


def _fit_rows(each: SliceFigures) -> Iterator[FitRow]:
    for fit in each.fits:
        yield FitRow(
            name=f"{each.name} (default)" if each.is_default else each.name,
            request=each.request,
            gpu=f"{fit.gpus} x {fit.gpu}",
            each=str(fit.each) if fit.each else "none",
            at_once=at_once_words(each),
            memory=memory(fit.memory_mib),
            left=memory(fit.left_mib) if fit.left_mib > 0 else "nothing",
        )


def changes(versions: Sequence[CourseVersion], now: str | None) -> tuple[Change, ...]:
    """Return what led to each version but the last given, which is the oldest, the latest first.

    ``now`` is the file as it is; None if these are not the latest versions.
    """
    found = []
    if now is not None and versions and versions[0].text != now:
        found.append(_change(CourseVersion("", now, 0.0), versions[0], is_now=True))
    for newer, older in zip_longest(versions, versions[1:]):
        found.append(_change(newer, older, is_now=now is not None and not found))
    return tuple(found)


def _change(newer: CourseVersion, older: CourseVersion | None, *, is_now: bool) -> Change:
    lines = difference(older.text, newer.text) if older else ()
    return Change(
        number=newer.number,
        who=newer.user or (ELSEWHERE if older else "as it was found"),
        when=moment(newer.saved_at) if newer.number and newer.user else None,
        size=how_much(lines) if older else "",
        lines=tuple(diff_lines(lines)),
        is_now=is_now,
    )


def diff_lines(lines: Sequence[str]) -> Iterator[DiffLine]:
    """Yield the lines of a difference by kind."""
    kinds = {"+": "added", "-": "removed", "@": "where"}
    for line in lines:
        yield DiffLine(kinds.get(line[:1], "same"), line)
