"""One course file: from its bytes to a course with its times in words, or to all that is wrong with it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpu_pool.courses.model import SAID_BEFORE, CourseFile
from gpu_pool.courses.text import (
    MOST_PROBLEMS,
    BadCourseFile,
    FileProblem,
    Place,
    Tree,
    UnreadableText,
    WrittenText,
    accepted,
    hidden,
    in_words,
    read_text,
)
from gpu_pool.policy.course_values import NEVER, given, nearest
from gpu_pool_client import BadRequest, SliceRequest, parse_duration

#: The fields that are times, by their places.
TIMES: Final[tuple[Place, ...]] = (
    ("longest_lease",),
    ("idle_limit",),
    ("yield_after",),
    ("warn_before",),
    ("keep_at_most",),
    ("hibernate_after",),
    ("kubernetes", "start_within"),
    ("slurm", "time"),
)
#: Those of which nothing is said by never, and not by being left out.
_NEVER: Final = ("yield_after",)
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


def longer_than_leases(file: str, written: WrittenText, course: CourseFile) -> Iterator[FileProblem]:
    """Yield what is offered for longer than the course's longest lease, at whose end it ends nevertheless."""
    longest = course.longest_lease
    offers: list[tuple[Place, SliceRequest | None]] = [
        *((("slices", place, "request"), offer.request) for place, offer in enumerate(course.slices)),
        (("any_up_to",), course.any_up_to),
    ]
    for place, request in offers:
        if longest is None or request is None or request.length is None or request.length <= longest:
            continue
        shorter, end = replace(request, length=int(longest) or None), spelled(longest)
        yield FileProblem(
            file,
            _line(written.lines, _as_written(written.tree, place)),
            in_words(place),
            f"{given(str(request))} is for longer than longest_lease ({end}): it ends with that.",
            f"Write {shorter}, or a longer longest_lease.",
        )


def _at(tree: Tree, place: Place) -> Tree:
    for part in place:
        tree = tree.get(str(part)) if isinstance(tree, dict) else None
    return tree


def read_back(course: CourseFile) -> dict[str, str]:
    """Return every time of a course in words, by its field."""
    found: dict[str, str] = {}
    for place in TIMES:
        group, name = place if len(place) > 1 else (None, place[0])
        part = getattr(course, str(group)) if group else course
        name = str(name)
        seconds: float | None = getattr(part, name)
        if seconds is not None or name in _NEVER:
            is_default = name not in part.model_fields_set
            said = NEVER if seconds is None else spelled(seconds)
            found[in_words(place)] = said + (" (default)" if is_default else "")
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


SUFFIX: Final = ".yaml"
#: Bytes of a file that are read: two thousand lines, or five thousand names.
MOST_BYTES: Final = 65_536
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?", re.ASCII)


def course_name(file: str) -> str:
    """Return the name of the course that a file describes. Raises ``BadCourseFile`` if it cannot be one."""
    stem, _, suffix = file.rpartition(".")
    if f".{suffix}" == SUFFIX and _NAME.fullmatch(stem):
        return stem
    better = re.sub(r"[^a-z0-9]+", "-", (stem or file).lower())[:50].strip("-") or "cs101"
    message = f"{given(file)} is not the name of a course file."
    remedy = f"Accepted: 1 to 50 of a-z, 0-9 and -, then {SUFFIX}. For example, name it {better}{SUFFIX}."
    raise BadCourseFile([FileProblem(file, None, "", message, remedy)])


@dataclass(frozen=True, slots=True)
class ReadCourse:
    """What a file says."""

    course: CourseFile
    #: What is accepted in a file that is there, and is not in one that is written now.
    warnings: tuple[FileProblem, ...] = ()


def parse_course(file: str, data: bytes) -> CourseFile:
    """Read the bytes of a file. Raises ``BadCourseFile`` with all that is wrong with them."""
    return read_course(file, data).course


def check_course(file: str, data: bytes) -> CourseFile:
    """Read the bytes of a file that is written now, in which nothing is accepted that needs a warning."""
    found = read_course(file, data)
    if found.warnings:
        raise BadCourseFile(found.warnings)
    return found.course


def read_course(file: str, data: bytes) -> ReadCourse:
    """Read the bytes of a file as it is. Raises as :func:`parse_course`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = FileProblem(file, line, "", "is not UTF-8.", "Save it as UTF-8 in your editor.")
        raise BadCourseFile([problem]) from None
    if not text.strip():
        raise BadCourseFile([FileProblem(file, None, "", "is empty.", "See gpu-pool courses new.")])
    try:
        written = read_text(file, text)
    except UnreadableText as error:
        # What is not seen may be why: YAML takes more for the end of a line than is seen as one.
        known = {problem.line: problem for problem in (error.problem, *hidden(file, text))}
        raise BadCourseFile(sorted(known.values(), key=lambda each: each.line or 0)) from None
    course = _course(file, written)
    warnings = (
        *hidden(file, text),
        *without_unit(file, written),
        *longer_than_leases(file, written, course),
    )
    return ReadCourse(course, tuple(sorted(warnings, key=lambda each: each.line or 0)))


def _course(file: str, written: WrittenText) -> CourseFile:
    problems = list(written.problems)
    try:
        course = CourseFile.read(written.tree)
    except ValidationError as error:
        problems += islice(_explain(file, written, error), MOST_PROBLEMS)
    if problems:
        raise BadCourseFile(sorted(problems, key=lambda each: each.line or 0))
    return course


def _explain(file: str, written: WrittenText, error: ValidationError) -> Iterator[FileProblem]:
    """Yield the library's findings in our words, those left out that follow from something refused before."""
    for found in error.errors(include_url=False):
        place = _as_written(written.tree, found["loc"])
        # By the few places around it: a file may have thousands that are refused.
        if any(place[:length] in written.refused for length in range(len(place) + 1)):
            continue
        message, remedy, field = _words(found, place, written.lines)
        yield FileProblem(file, _line(written.lines, place), in_words(field), message, remedy)


#: What is told of what an earlier slice has said, and what to do about it; by field.
_SAID_BEFORE: Final = {
    "name": ("{value} is already the name of {first}, on line {line}.", "Give it another name."),
    "request": ("{value} is already the request of {first}, on line {line}.", "Keep one."),
    "default": ("{first} is already the default, on line {line}.", "Keep one default: true."),
}


def _as_written(tree: Tree, place: Place) -> Place:
    """Return the place without the numbers of items in what was written without a list."""
    kept: list[str | int] = []
    for part in place:
        if isinstance(part, int) and not isinstance(tree, list):
            continue
        kept.append(part)
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        elif isinstance(tree, dict) and isinstance(part, str):
            tree = tree.get(part)
    return tuple(kept)


def _words(found: ErrorDetails, place: Place, lines: Mapping[Place, int]) -> tuple[str, str, Place]:
    """Return (message, remedy, the field that it is about)."""
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    if isinstance(error := context.get("error"), BadRequest):
        return error.message, error.remedy, place
    if kind == SAID_BEFORE:
        message, remedy = _SAID_BEFORE[str(place[-1])]
        first: Place = (*place[:-2], context["first"], place[-1])
        message = message.format(value=given(value), first=in_words(first[:-1]), line=lines[first])
        return message, remedy, place
    parent, fields = place[:-1], _fields(place[:-1])
    if kind == "extra_forbidden":
        name = str(place[-1])
        remedy = f"{nearest(name, fields)} {accepted(fields)}".strip()
        return f"there is no field {given(name)}.", remedy, parent
    if kind == "missing":
        return f"{place[-1]} is missing.", f"Add {place[-1]}: ...", parent
    wanted = "a list, each item on a line of its own after a dash"
    if kind != "tuple_type":
        wanted = f"a group of fields, each on a line of its own, indented: {', '.join(_fields(place))}"
    return f"is {given(value)}.", f"Accepted: {wanted}.", place


def _fields(place: Place) -> list[str]:
    """Return the names of the fields of the part of a course file at this place."""
    model: type[BaseModel] = CourseFile
    for key in place:
        if isinstance(key, str):
            model = _part(model, key)
    return [field.alias or name for name, field in model.model_fields.items()]


def _part(model: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the model of a field, or of its items."""
    annotation: Any = model.model_fields[name].annotation
    inner: type[BaseModel] = getattr(annotation, "__args__", (annotation,))[0]
    return inner


def _line(lines: Mapping[Place, int], place: Place) -> int | None:
    """Return the line of a place, or of the nearest part around it that was written."""
    ways: Iterable[Place] = (place[:length] for length in range(len(place), -1, -1))
    return next((lines[way] for way in ways if way in lines), None)


def read_bytes(folder: Path, file: str) -> bytes:
    """Return a file of a folder. Raises ``BadCourseFile`` for what is not a file in it, or is too large.

    A link within the folder is followed, as Kubernetes mounts its files; one
    that leads out of it is not, whoever changes it meanwhile.
    """
    try:
        descriptor = _open(folder, file)
    except OSError as error:
        raise _unusable(file, f"cannot be read: {error.strerror or error}.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _unusable(file, "is not an ordinary file.")
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise _unusable(file, f"is larger than {MOST_BYTES // 1024} KiB, the limit for a course file.")
    return data


def _open(folder: Path, file: str) -> int:
    """Open a file that really lies in the folder, going down by handles that cannot be led elsewhere."""
    top = folder.resolve()
    target = Path(os.path.realpath(top / file))
    if not target.is_relative_to(top):
        raise _unusable(file, "is a link that leads out of the folder.", "Copy the file here.")
    handle = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for part in target.relative_to(top).parts:
        above = handle
        try:
            # Without waiting for somebody to write into what may be a pipe.
            handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        finally:
            os.close(above)
    return handle


def _unusable(file: str, message: str, remedy: str = "") -> BadCourseFile:
    return BadCourseFile([FileProblem(file, None, "", message, remedy)])
