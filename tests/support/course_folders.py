"""A folder of course files, and somebody who writes in it."""

from __future__ import annotations

import time
from pathlib import Path

from gpu_pool.clock import Clock
from gpu_pool.courses import CourseFolder, Courses


class CourseFiles:
    """A folder with somebody who writes in it, and clocks that run ahead when they are told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waited = 0.0
        #: Since the last change, whose time is the system's.
        self.left_alone = 0.0
        self.folder = self.opened()

    def opened(self, *taken: str) -> CourseFolder:
        """Return the folder as a process that begins now opens it."""
        clock = Clock(lambda: time.time() + self.left_alone, lambda: time.monotonic() + self.waited)
        return CourseFolder(self.path, taken, clock)

    def write(self, name: str, text: str) -> None:
        """Write a file as editors do that write into the file."""
        self.left_alone = 0.0
        (self.path / f"{name}.yaml").write_text(text)

    def replace(self, name: str, text: str) -> None:
        """Write a file as editors do that put another in its place."""
        self.write(f".{name}", text)
        (self.path / f".{name}.yaml").replace(self.path / f"{name}.yaml")

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.left_alone += seconds

    def look_later(self) -> Courses:
        """Look when everything written until now has been left alone."""
        self.wait(2)
        return self.folder.current()

    def titles(self) -> dict[str, str]:
        return titles(self.look_later())


def course(title: str) -> str:
    return f"title: {title}\nslices: [{{name: Small, request: 2%}}]\n"


def titles(courses: Courses) -> dict[str, str]:
    return {name: file.title for name, file in courses.usable.items()}
