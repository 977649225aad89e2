"""What is wrong with the course files, in the service's log: once each, with what holds meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from gpu_pool.courses import Courses, FileProblem
from gpu_pool.courses.reading import SUFFIX
from gpu_pool.names import visible

#: Seconds between two looks.
_READ_EVERY: Final = 2.0
#: Lines about one change of the files.
_MOST_LINES: Final = 50


class CourseLog:
    """Follows the course files for the log. ``read`` returns what they say now."""

    def __init__(self, read: Callable[[], Courses], log: logging.Logger) -> None:
        self._read = read
        self._log = log
        self._told: Courses | None = None

    async def run(self) -> None:
        """Log changes as they come, until cancelled."""
        while True:
            await asyncio.sleep(_READ_EVERY)
            await asyncio.to_thread(self.log_changes)

    def log_changes(self) -> None:
        """Log what has changed since the last time."""
        now = self._read()
        if now is self._told:
            return
        before, self._told = self._told or Courses(), now
        lines = [*changes(before, now)]
        for level, line in lines[:_MOST_LINES]:
            self._log.log(level, "%s", line)
        if len(lines) > _MOST_LINES:
            self._log.warning(
                "Courses: and %d lines more; see gpu-pool courses check", len(lines) - _MOST_LINES
            )


def changes(before: Courses, now: Courses) -> Iterator[tuple[int, str]]:
    """Yield (level, line) for the log about what has become of the course files."""
    added, gone = (
        sorted(now.usable.keys() - before.usable.keys()),
        sorted(before.usable.keys() - now.usable.keys()),
    )
    if added:
        yield logging.INFO, f"Courses: offered from now on: {', '.join(added)}"
    if vanished := [name for name in gone if name not in now.refused]:
        yield logging.WARNING, f"Courses: no longer offered, since its file is gone: {', '.join(vanished)}"
    for problem in now.problems:
        if problem not in before.problems:
            yield logging.ERROR, f"Courses: {visible(str(problem))} {_meanwhile(problem, now)}".strip()
    for warning in now.warnings:
        if warning not in before.warnings:
            yield logging.WARNING, f"Courses: {visible(str(warning))}"
    bad = {problem.file for problem in now.problems}
    mended = sorted({problem.file for problem in before.problems} - bad)
    if mended := [file for file in mended if file.removesuffix(SUFFIX) in now.usable]:
        yield logging.INFO, f"Courses: corrected, and in force: {visible(', '.join(mended))}"


def _meanwhile(problem: FileProblem, now: Courses) -> str:
    """Say what holds until a file is corrected."""
    if problem.file.removesuffix(SUFFIX) in now.usable:
        return "Its last good version stays in force, until this service ends."
    is_course = problem.file.removesuffix(SUFFIX) in now.refused
    return "The course is not offered until this is corrected." if is_course else ""
