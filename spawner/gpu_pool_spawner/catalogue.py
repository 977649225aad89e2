"""The courses that the Hub's spawners share: one look at the files, and one word in the log, for all."""

from __future__ import annotations

import functools
from pathlib import Path

from traitlets.log import get_logger

from gpu_pool.courses import CourseFolder, Courses


class Catalogue:
    """A folder of course files."""

    def __init__(self, folder: Path) -> None:
        self._folder = CourseFolder(folder)
        self._told: frozenset[str] = frozenset()

    def look(self) -> Courses:
        """Return the courses as they are now; log what is newly wrong with their files."""
        courses = self._folder.look()
        problems = frozenset(map(str, courses.problems))
        for problem in sorted(problems - self._told):
            get_logger().warning("Course files: %s", problem)
        self._told = problems
        return courses


@functools.cache
def catalogue_of(folder: str) -> Catalogue:
    """Return this process's catalogue of a folder."""
    return Catalogue(Path(folder))
