"""``courses check``, ``list``, ``new`` and ``schema``: the files that teachers write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_pool.cli import screen
from gpu_pool.cli.session import Session, json_option, pool_options, verb
from gpu_pool.cli.words import safe
from gpu_pool_client import BadRequest, format_memory, parse_duration

if TYPE_CHECKING:
    from gpu_pool.coursefiles import CourseFile, Problem
    from gpu_pool.coursefiles.figures import Rush, SliceFigures
    from gpu_pool.rules import Rules
    from gpu_pool.settings import PoolSettings
    from gpu_pool_client import Device


@click.group("courses", no_args_is_help=False)
@pool_options
def courses() -> None:
    """Write, check and list course files."""


@dataclasses.dataclass(frozen=True)
class _Checked:
    """One file, and what came of reading it."""

    path: Path
    course: CourseFile | None
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        return self.path.stem


@verb(
    "check",
    "gpu-pool courses check cs101.yaml",
    "gpu-pool courses check --device V100-SXM2-32GB:1 --students 60 cs101.yaml",
    "gpu-pool courses check /etc/gpu-pool/courses && echo all is well",
    "gpu-pool courses check cs101.yaml --json | jq '.files[].slices'",
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--device", metavar="DEVICES", help="The GPUs, as in GPU_POOL_DEVICES; by default those of this machine."
)
@click.option(
    "--students", type=click.IntRange(1, 2_000), metavar="N", help="Simulate that so many come at once."
)
@click.option(
    "--stay", default="1h", show_default=True, metavar="TIME", help="How long each of them keeps a slice."
)
@json_option
def check(
    session: Session, paths: tuple[Path, ...], device: str | None, students: int | None, stay: str
) -> int:
    """Check course files, and do their arithmetic.

    PATHS are files or folders, by default the folder of courses_dir. For each
    slice: how many fit on a GPU, what is left of its memory once CUDA has
    taken its part, and with --students how long a class would wait. Exit
    status 1 if a file has an error, or if a slice fits on none of the GPUs
    that --device names.
    """
    settings, seconds = _settings(), parse_duration(stay)
    found = [_read(path, settings) for path in _files(paths, settings)]
    devices, rules = _devices(device), settings.rules
    reports = [_Report.of(each, devices, rules, students, seconds) for each in found]
    is_good = all(report.is_good(strict=device is not None) for report in reports)
    if session.as_json:
        screen.show_json({"ok": is_good, "files": [report.plain() for report in reports]})
    else:
        for report in reports:
            report.show()
        if not devices:
            screen.note('no GPU is known here; name one for the arithmetic: --device "V100-SXM2-32GB:1".')
    return 0 if is_good else 1


@verb("list", "gpu-pool courses list", "gpu-pool courses list examples/courses --json")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@json_option
def list_(session: Session, paths: tuple[Path, ...]) -> int:
    """List courses: their title, when they are open, and what they offer.

    PATHS are as for check. Exit status 1 if a file has an error.
    """
    settings = _settings()
    found = [_read(path, settings) for path in _files(paths, settings)]
    now = datetime.now(timezone.utc)
    if session.as_json:
        screen.show_json({"courses": [_plain_course(each, now) for each in found]})
    else:
        screen.show(screen.table(_COLUMNS, [_row(each, now) for each in found]) if found else "No course.")
    return 0 if all(each.course for each in found) else 1


@verb("new", "gpu-pool courses new cs101 | tee cs101.yaml")
@click.argument("name")
def new(_session: Session, name: str) -> int:
    """Print a commented course file to begin with."""
    from gpu_pool.coursefiles.reading import SUFFIX, course_name
    from gpu_pool.coursefiles.template import template

    click.echo(template(course_name(name.removesuffix(SUFFIX) + SUFFIX)), nl=False)
    return 0


@verb("schema", "gpu-pool courses schema | tee course.schema.json")
def schema(_session: Session) -> int:
    """Print the JSON Schema by which editors check and complete course files."""
    from gpu_pool.coursefiles import json_schema

    screen.show_json(json_schema())
    return 0


for _command in (check, list_, new, schema):
    courses.add_command(_command)


# -- Reading -----------------------------------------------------------------


def usable_courses(paths: Sequence[Path]) -> dict[str, CourseFile]:
    """Return the courses of these files or folders, by name. Raises ``BadRequest`` if one has an error."""
    settings = _settings()
    found = [_read(path, settings) for path in _files(paths, settings)]
    bad = next((each for each in found if each.course is None), None)
    if bad is not None:
        raise BadRequest(f"{bad.path.name} has an error.", "See gpu-pool courses check.")
    return {each.name: each.course for each in found if each.course is not None}


def _files(paths: Sequence[Path], settings: PoolSettings) -> Iterator[Path]:
    """Yield the files that are meant. Raises ``BadRequest`` for a path that is not there."""
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


def _read(path: Path, settings: PoolSettings) -> _Checked:
    from gpu_pool.coursefiles import BadCourseFile, course_name, parse_course, read_bytes
    from gpu_pool.coursefiles.folder import described_twice

    try:
        name = course_name(path.name)
        course = parse_course(path.name, read_bytes(path.parent, path.name))
    except BadCourseFile as error:
        return _Checked(path, None, error.problems)
    folder = settings.courses_dir
    if name in settings.courses and folder and Path(folder).expanduser().resolve() == path.parent.resolve():
        return _Checked(path, None, (described_twice(path.name, name),))
    return _Checked(path, course, ())


def _settings() -> PoolSettings:
    from gpu_pool.settings import load_settings

    return load_settings()


def _devices(text: str | None) -> tuple[Device, ...]:
    from gpu_pool.inventory import discover
    from gpu_pool.inventory.simulated import parse_devices

    return discover().devices if text is None else parse_devices(text)


# -- Showing -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Report:
    """What ``check`` says of one file."""

    checked: _Checked
    slices: tuple[SliceFigures, ...] = ()
    rush: Rush | None = None

    @classmethod
    def of(
        cls,
        checked: _Checked,
        devices: Sequence[Device],
        rules: Rules,
        students: int | None,
        stay: float,
    ) -> _Report:
        from gpu_pool.coursefiles.figures import rush, slice_figures

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
        from gpu_pool.coursefiles.words import rush_words, slice_notes, when_open

        path, course = safe(str(self.checked.path), 200), self.checked.course
        if course is None:
            screen.show(
                f"{path}: cannot be used",
                *(f"  {safe(str(problem), 1_000)}" for problem in self.checked.problems),
            )
            return
        screen.show(f"{path}: ok", f"  {course.title}. Open: {when_open(course)}.")
        if self.slices:
            screen.show("", screen.table(_SLICE_COLUMNS, _slice_rows(self.slices)))
            screen.show(*(note for each in self.slices for note in slice_notes(each)))
        if self.rush:
            screen.show("", rush_words(self.rush, course))
        screen.show("")

    def plain(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "file": str(self.checked.path),
            "ok": self.checked.course is not None,
            "problems": [dataclasses.asdict(problem) for problem in self.checked.problems],
            "slices": [dataclasses.asdict(each) for each in self.slices],
            "rush": self.rush and dataclasses.asdict(self.rush),
        }


_SLICE_COLUMNS = ("Slice", "Request", "GPU", "Fit on each", "At once in all", "Memory", "Left after CUDA")
_COLUMNS = ("Course", "Title", "Open", "Now", "Slices")


def _slice_rows(slices: Sequence[SliceFigures]) -> Iterator[list[str]]:
    from gpu_pool.coursefiles.words import at_once_words

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


def _row(checked: _Checked, now: datetime) -> list[str]:
    from gpu_pool.coursefiles.words import open_now, when_open

    course = checked.course
    if course is None:
        return [safe(checked.name), "cannot be used", "-", safe(str(checked.problems[0]), 120), "-"]
    slices = ", ".join(f"{offer.name} {offer.request}" for offer in course.slices)
    return [checked.name, course.title, when_open(course), open_now(course, now), slices]


def _plain_course(checked: _Checked, now: datetime) -> dict[str, Any]:
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
