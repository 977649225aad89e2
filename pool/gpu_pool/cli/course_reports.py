"""The course files that a command is given, read one by one: what came of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_pool.cli.formatting import safe
from gpu_pool_client import BadRequest

if TYPE_CHECKING:
    from gpu_pool.courses import CourseFile, FileProblem
    from gpu_pool.settings import PoolSettings


from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpu_pool.cli import screen
from gpu_pool_client import format_memory

if TYPE_CHECKING:
    from gpu_pool.courses.arithmetic import Rush, SliceFigures
    from gpu_pool.policy.queue_state import Rules
    from gpu_pool_client import Device


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """One file, and what came of reading it: a course, or problems."""

    path: Path
    course: CourseFile | None
    problems: tuple[FileProblem, ...]

    @property
    def name(self) -> str:
        """Of the course, as the file says it."""
        return self.path.stem


def read_files(paths: Sequence[Path], settings: PoolSettings) -> list[CheckedFile]:
    """Read files, and the course files of folders; without any, those of ``courses_dir``.

    Raises ``BadRequest`` for a path that is not there. What is wrong within a file is in its result.
    """
    return [_read(path, settings) for path in _files(paths, settings)]


def usable_courses(paths: Sequence[Path], settings: PoolSettings) -> dict[str, CourseFile]:
    """Return the courses of these files or folders, by name. Raises ``BadRequest`` if one has an error."""
    usable = {}
    for each in read_files(paths, settings):
        if each.course is None:
            raise BadRequest(
                f"{safe(each.path.name)} has an error.",
                f"To read it: gpu-pool courses check {safe(str(each.path))}",
            )
        usable[each.name] = each.course
    return usable


def _files(paths: Sequence[Path], settings: PoolSettings) -> Iterator[Path]:
    from gpu_pool.courses.folder import is_course_file

    for path in paths or [_configured(settings)]:
        try:
            names = sorted(each.name for each in path.iterdir()) if path.is_dir() else None
            path.stat()
        except OSError as error:
            raise BadRequest(f"{safe(str(path))!r} cannot be read: {error.strerror}.") from error
        yield from [path] if names is None else (path / name for name in names if is_course_file(name))


def _configured(settings: PoolSettings) -> Path:
    if not settings.courses_dir:
        raise BadRequest(
            "No folder of course files is set.", "Name files or a folder, or set c.PoolSettings.courses_dir."
        )
    return Path(settings.courses_dir).expanduser()


def _read(path: Path, settings: PoolSettings) -> CheckedFile:
    from gpu_pool.courses import BadCourseFile, course_name, parse_course, read_bytes
    from gpu_pool.courses.folder import described_twice

    try:
        name = course_name(path.name)
        course = parse_course(path.name, read_bytes(path.parent, path.name))
    except BadCourseFile as error:
        return CheckedFile(path, None, error.problems)
    folder = settings.courses_dir
    if name in settings.courses and folder and Path(folder).expanduser().resolve() == path.parent.resolve():
        return CheckedFile(path, None, (described_twice(path.name, name),))
    return CheckedFile(path, course, ())


@dataclasses.dataclass(frozen=True)
class CourseReport:
    """What ``check`` says of one file."""

    checked: CheckedFile
    slices: tuple[SliceFigures, ...] = ()
    rush: Rush | None = None

    @classmethod
    def of(
        cls,
        checked: CheckedFile,
        devices: Sequence[Device],
        rules: Rules,
        students: int | None,
        stay: float,
    ) -> CourseReport:
        """Do the arithmetic: with ``students`` also how long they wait, who stay so many seconds."""
        from gpu_pool.courses.arithmetic import rush, slice_figures

        course = checked.course
        if course is None or not devices:
            return cls(checked)
        slices = slice_figures(course, devices, rules)
        fits = next(each for each in slices if each.is_default).at_once > 0
        if students is None or not fits:
            return cls(checked, slices)
        return cls(checked, slices, rush(checked.name, course, students, stay, devices, rules))

    def is_good(self, *, strict: bool) -> bool:
        """Whether the file can be used and, if ``strict``, all its slices fit somewhere."""
        return self.checked.course is not None and not (strict and any(not s.at_once for s in self.slices))

    def show(self) -> None:
        """Print it for people."""
        from gpu_pool.courses.access import when_open
        from gpu_pool.courses.arithmetic import rush_words, slice_notes

        path, course = safe(str(self.checked.path), 200), self.checked.course
        if course is None:
            screen.show(
                f"{path}: cannot be used",
                *(f"  {safe(str(problem), 1_000)}" for problem in self.checked.problems),
            )
            return
        notes = [note for each in self.slices for note in slice_notes(each)]
        verdict = "no error, but not every slice can be had" if notes else "ok"
        screen.show(f"{path}: {verdict}", f"  {course.title}. Open: {when_open(course)}.")
        if self.slices:
            screen.show("", screen.table(_SLICE_COLUMNS, _slice_rows(self.slices)), *notes)
        if self.rush:
            screen.show("", rush_words(self.rush, course))
        screen.show("")

    def plain(self, *, strict: bool) -> dict[str, Any]:
        """Return it for programs; ``strict`` as for :meth:`is_good`."""
        return {
            "file": str(self.checked.path),
            "ok": self.is_good(strict=strict),
            "problems": [dataclasses.asdict(problem) for problem in self.checked.problems],
            "slices": [dataclasses.asdict(each) for each in self.slices],
            "rush": self.rush and dataclasses.asdict(self.rush),
        }


_SLICE_COLUMNS = ("Slice", "Request", "GPU", "Fit on each", "At once in all", "Memory", "Left after CUDA")
COURSE_COLUMNS = ("Course", "Title", "Open", "Now", "Slices")


def _slice_rows(slices: Sequence[SliceFigures]) -> Iterator[list[str]]:
    from gpu_pool.courses.arithmetic import at_once_words

    for each in slices:
        for fit in each.fits:
            yield [
                f"{each.name} (default)" if each.is_default else each.name,
                each.request,
                f"{fit.gpus} x {safe(fit.gpu)}",
                str(fit.each) if fit.each else "none",
                at_once_words(each),
                format_memory(fit.memory_mib) if fit.memory_mib else "0",
                format_memory(fit.left_mib) if fit.left_mib > 0 else "nothing",
            ]


def course_row(checked: CheckedFile, now: datetime) -> list[str]:
    """Return what ``list`` shows of a file under :data:`COURSE_COLUMNS`."""
    from gpu_pool.courses.access import open_now, when_open

    course = checked.course
    if course is None:
        return [safe(checked.name), "cannot be used", "-", safe(str(checked.problems[0]), 120), "-"]
    slices = ", ".join(f"{offer.name} {offer.request}" for offer in course.slices)
    return [checked.name, course.title, when_open(course), open_now(course, now), slices]


def plain_course(checked: CheckedFile, now: datetime) -> dict[str, Any]:
    """Return what ``list`` shows of a file, for programs. Times are seconds since the epoch."""
    course = checked.course
    if course is None:
        problems = [dataclasses.asdict(problem) for problem in checked.problems]
        return {"course": checked.name, "ok": False, "problems": problems}
    timetable = course.timetable
    until, opens = timetable.open_until(now), timetable.opens_next(now)
    return {
        "course": checked.name,
        "ok": True,
        "title": course.title,
        "open": timetable.is_open(now),
        "open_until": until and until.timestamp(),
        "opens_next": opens and opens.timestamp(),
        "slices": [
            {"name": offer.name, "request": str(offer.request), "default": offer is course.default_slice}
            for offer in course.slices
        ],
    }
