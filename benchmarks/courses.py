"""Reading a folder of 500 course files, and looking whether one of them has changed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from benchmarks.report import Line, compared
from benchmarks.sizes import sized
from gpu_pool.clock import Clock
from gpu_pool.courses import CourseFolder
from gpu_pool.courses.editing import template

FILES = sized(500, 20)
ROUNDS = sized(7, 2)


def taken(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def parse(folder: Path) -> None:
    """Read the files as plain YAML, without anything that course files need: the yardstick."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in folder.iterdir():
        yaml.load(path.read_bytes(), loader)


def stat(folder: Path) -> None:
    """Look at the files' times only: the yardstick."""
    for entry in os.scandir(folder):
        entry.stat()


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(FILES):
            (folder / f"course-{number}.yaml").write_text(template(f"course-{number}"))
        # Far from the time at which the files were written, and a look whenever asked.
        hours = iter(range(1, 10**6))
        clock = Clock(lambda: time.time() + 3600, lambda: 3600.0 * next(hours))
        loads, looks = [], []
        for _ in range(ROUNDS):
            courses = CourseFolder(folder, (), clock)
            loads.append((taken(courses.current), taken(lambda: parse(folder))))
            looks.append((taken(courses.current), taken(lambda: stat(folder))))
            assert len(courses.current().usable) == FILES
    yield _line(f"reading {FILES} course files, to parsing their YAML", loads)
    yield _line(f"looking at {FILES} files of which none has changed, to stat", looks)


def _line(what: str, pairs: list[tuple[float, float]]) -> Line:
    return compared(what, [(1000 * ours, 1000 * bare) for ours, bare in pairs], "medians", unit="ms")
