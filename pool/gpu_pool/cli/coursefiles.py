"""The course files that a command is given, read one by one: what came of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_pool.cli.words import safe
from gpu_pool_client import BadRequest

if TYPE_CHECKING:
    from gpu_pool.coursefiles import CourseFile, Problem
    from gpu_pool.settings import PoolSettings


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """One file, and what came of reading it: a course, or problems."""

    path: Path
    course: CourseFile | None
    problems: tuple[Problem, ...]

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
    from gpu_pool.coursefiles.folder import is_course_file

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
    from gpu_pool.coursefiles import BadCourseFile, course_name, parse_course, read_bytes
    from gpu_pool.coursefiles.folder import described_twice

    try:
        name = course_name(path.name)
        course = parse_course(path.name, read_bytes(path.parent, path.name))
    except BadCourseFile as error:
        return CheckedFile(path, None, error.problems)
    folder = settings.courses_dir
    if name in settings.courses and folder and Path(folder).expanduser().resolve() == path.parent.resolve():
        return CheckedFile(path, None, (described_twice(path.name, name),))
    return CheckedFile(path, course, ())
