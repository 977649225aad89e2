"""``courses check``, ``list``, ``new``, ``schema`` and ``export``: the files that teachers write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpu_pool.cli import screen
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.session import CommandSession, Duration, json_option, pool_options, verb
from gpu_pool_client import BadRequest, format_memory
from gpu_pool_client._home import expanded

if TYPE_CHECKING:
    from gpu_pool.courses import CourseFile, FileProblem
    from gpu_pool.courses.arithmetic import Rush, SliceFigures
    from gpu_pool.policy.queue_state import Rules
    from gpu_pool.settings import PoolSettings
    from gpu_pool_client import Device


@click.group("courses", no_args_is_help=False)
@pool_options
def courses() -> None:
    """Write, check and list course files."""


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
    "--students",
    type=click.IntRange(1, 2_000),
    metavar="N",
    help="Simulate that this many students come at the same time.",
)
@click.option(
    "--stay",
    type=Duration(),
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How long each of them keeps a slice.",
)
@json_option
def check(
    session: CommandSession, paths: tuple[Path, ...], device: str | None, students: int | None, stay: float
) -> int:
    """Check course files, and show how many slices fit.

    PATHS are files or folders, by default the folder of courses_dir. For each
    slice: how many fit on a GPU, what is left of its memory once CUDA has
    taken its part, and with --students how long a class would wait. Exit
    status 1 if a file has an error, or if a slice fits on none of the GPUs
    that --device names.
    """
    from gpu_pool.settings import load_settings

    settings = load_settings()
    found, devices = read_files(paths, settings), _devices(device)
    reports = [CourseReport.of(each, devices, settings.rules, students, stay) for each in found]
    strict = device is not None
    is_good = all(report.is_good(strict=strict) for report in reports)
    if session.as_json:
        files = [report.plain(strict=strict) for report in reports]
        screen.show_json({"ok": is_good, "files": files})
    else:
        for report in reports:
            report.show()
        if not devices:
            screen.note(
                'this machine has no GPU; name one to see how many slices fit: --device "V100-SXM2-32GB:1".'
            )
    return 0 if is_good else 1


@verb("list", "gpu-pool courses list", "gpu-pool courses list examples/courses --json")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@json_option
def list_(session: CommandSession, paths: tuple[Path, ...]) -> int:
    """List courses: their title, when they are open, and what they offer.

    PATHS are as for check. Exit status 1 if a file has an error.
    """
    from gpu_pool.settings import load_settings

    found = read_files(paths, load_settings())
    now = datetime.now(timezone.utc)
    if session.as_json:
        screen.show_json({"courses": [plain_course(each, now) for each in found]})
    else:
        screen.show(
            screen.table(COURSE_COLUMNS, [course_row(each, now) for each in found]) if found else "No course."
        )
    return 0 if all(each.course for each in found) else 1


@verb("new", "gpu-pool courses new cs101 | tee cs101.yaml")
@click.argument("name")
def new(_session: CommandSession, name: str) -> int:
    """Print a commented course file to start from."""
    from gpu_pool.courses.editing import template
    from gpu_pool.courses.reading import SUFFIX, course_name

    click.echo(template(course_name(name.removesuffix(SUFFIX) + SUFFIX)), nl=False)
    return 0


@verb("schema", "gpu-pool courses schema | tee course.schema.json")
def schema(_session: CommandSession) -> int:
    """Print the JSON Schema by which editors check and complete course files."""
    from gpu_pool.courses import json_schema

    screen.show_json(json_schema())
    return 0


for _command in (check, list_, new, schema):
    courses.add_command(_command)


def _devices(text: str | None) -> tuple[Device, ...]:
    from gpu_pool.devices import discover
    from gpu_pool.devices.inventory import parse_devices

    return discover().devices if text is None else parse_devices(text, "--device")


_NAMESPACE: Final = "course-{course}"


@verb(
    "export",
    "gpu-pool courses export --kubernetes | kubectl apply -f -",
    "gpu-pool courses export --kubernetes --dialect hami --kueue /etc/gpu-pool/courses",
    "gpu-pool courses export --images courses/ > images.yaml",
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--kubernetes", is_flag=True, help="Quotas and queues, as objects of Kubernetes, in YAML.")
@click.option(
    "--images", is_flag=True, help="The images of courses, as values of Zero to JupyterHub, in YAML."
)
@click.option(
    "--dialect", default="auto", show_default=True, metavar="NAME", help="How the cluster shares its GPUs."
)
@click.option(
    "--namespace",
    default=_NAMESPACE,
    show_default=True,
    metavar="NAME",
    help="Where a course's servers and kernels are; {course} is its name.",
)
@click.option("--kueue/--no-kueue", default=None, help="Queues of Kueue; by default if the cluster has it.")
@click.option("--kubeconfig", default="", metavar="FILE", help="By default $KUBECONFIG, or the pod's own.")
def export(
    _session: CommandSession,
    paths: tuple[Path, ...],
    kubernetes: bool,
    images: bool,
    dialect: str,
    namespace: str,
    kueue: bool | None,
    kubeconfig: str,
) -> int:
    """Print the quotas and queues of courses as objects for a cluster, or the images to pull in advance.

    PATHS are as for check. For quotas and queues the cluster is read, but not changed; what its
    objects cannot express is reported on standard error. Zero to JupyterHub pulls the images in
    advance: pass the output to its chart as one more --values.
    """
    import yaml

    from gpu_pool.cluster.export import pulled
    from gpu_pool.settings import load_settings

    if kubernetes == images:
        what = "Both exports were requested" if images else "No export was requested"
        raise BadRequest(f"{what}.", "Accepted: --kubernetes, or --images.")
    courses = usable_courses(paths, load_settings())
    if images:
        click.echo(yaml.safe_dump(pulled(courses), sort_keys=False), nl=False)
        return 0
    return _export_objects(courses, dialect, namespace, kubeconfig, kueue=kueue)


courses.add_command(export)


def _export_objects(
    courses: Mapping[str, CourseFile], dialect: str, namespace: str, kubeconfig: str, *, kueue: bool | None
) -> int:
    import yaml

    from gpu_pool.cli.cluster import read_snapshot
    from gpu_pool.cluster.dialects import DEFAULTS, choose
    from gpu_pool.cluster.export import documents, has_kueue
    from gpu_pool.cluster.kueue import VERSIONS, version_of

    snapshot = read_snapshot(kubeconfig)
    choice = choose(snapshot.cluster, DEFAULTS, dialect)
    if choice.dialect is None:
        raise BadRequest(str(choice), "Set the dialect, for example: --dialect hami.")
    wanted = has_kueue(choice.dialect) if kueue is None else kueue
    # For a cluster that is to get Kueue, as its newest version has them.
    version = version_of(snapshot.kueue) if wanted and snapshot.kueue else VERSIONS[0]
    made, notes = documents(courses, choice.dialect, namespace, kueue=wanted, kueue_version=version)
    click.echo(yaml.safe_dump_all(made, sort_keys=False, explicit_start=True), nl=False)
    for note in (*choice.reasons, *notes):
        screen.note(note)
    return 0


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """One file, and what came of reading it: a course, or problems."""

    path: Path
    course: CourseFile | None
    problems: tuple[FileProblem, ...]
    #: What is accepted in it as it is there, and is not in a file that is written now.
    warnings: tuple[FileProblem, ...] = ()

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
            raise BadRequest(f"{safe(str(path), 300)!r} cannot be read: {error.strerror}.") from error
        yield from [path] if names is None else (path / name for name in names if is_course_file(name))


def _configured(settings: PoolSettings) -> Path:
    if not settings.courses_dir:
        raise BadRequest(
            "No folder of course files is set.", "Name files or a folder, or set c.PoolSettings.courses_dir."
        )
    return expanded(settings.courses_dir)


def _read(path: Path, settings: PoolSettings) -> CheckedFile:
    from gpu_pool.courses import BadCourseFile, course_name, read_bytes, read_course
    from gpu_pool.courses.folder import described_twice

    try:
        name = course_name(path.name)
        found = read_course(path.name, read_bytes(path.parent, path.name))
    except BadCourseFile as error:
        return CheckedFile(path, None, error.problems)
    folder = settings.courses_dir
    if name in settings.courses and folder and expanded(folder).resolve() == path.parent.resolve():
        return CheckedFile(path, None, (described_twice(path.name, name),))
    return CheckedFile(path, found.course, (), found.warnings)


@dataclasses.dataclass(frozen=True)
class CourseReport:
    """What ``check`` says of one file."""

    checked: CheckedFile
    slices: tuple[SliceFigures, ...] = ()
    rush: Rush | None = None

    @classmethod
    def of(
        cls, checked: CheckedFile, devices: Sequence[Device], rules: Rules, students: int | None, stay: float
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
        """Whether the file is as it should be and, if ``strict``, all its slices fit somewhere."""
        is_read = self.checked.course is not None and not self.checked.warnings
        return is_read and not (strict and any(not s.at_once for s in self.slices))

    def show(self) -> None:
        """Print it for people."""
        from gpu_pool.courses.access import when_open
        from gpu_pool.courses.arithmetic import job_note, limit_notes, prepared_note, rush_text, slice_notes
        from gpu_pool.courses.reading import read_back

        path, course = safe(str(self.checked.path), 200), self.checked.course
        if course is None:
            screen.show(
                f"{path}: cannot be used",
                *(f"  {safe(str(problem), 1_000)}" for problem in self.checked.problems),
            )
            return
        notes = [note for each in self.slices for note in slice_notes(each)]
        verdict = "no error, but not every slice can be granted" if notes else "ok"
        if self.checked.warnings:
            verdict = "can be used as it is, but is to be corrected"
        screen.show(
            f"{path}: {verdict}",
            *(f"  {safe(str(warning), 1_000)}" for warning in self.checked.warnings),
            f"  {course.title}. Open: {when_open(course)}.",
            f"  Times: {'; '.join(f'{name}: {words}' for name, words in read_back(course).items())}.",
            *(f"  {safe(note, 1_000)}" for note in filter(None, [prepared_note(course), job_note(course)])),
        )
        if self.slices:
            limits = [safe(note, 400) for each in self.slices for note in limit_notes(each)]
            screen.show("", screen.table(_SLICE_COLUMNS, _slice_rows(self.slices)), *notes, *limits)
        if self.rush:
            screen.show("", rush_text(self.rush, course))
        screen.show("")

    def plain(self, *, strict: bool) -> dict[str, Any]:
        """Return it for programs; ``strict`` as for :meth:`is_good`."""
        return {
            "file": str(self.checked.path),
            "ok": self.is_good(strict=strict),
            "problems": [
                dataclasses.asdict(problem) for problem in (*self.checked.problems, *self.checked.warnings)
            ],
            "times": self._times(),
            "slices": [dataclasses.asdict(each) for each in self.slices],
            "rush": self.rush and dataclasses.asdict(self.rush),
        }

    def _times(self) -> list[dict[str, str]]:
        from gpu_pool.courses.reading import read_back

        course = self.checked.course
        read = {} if course is None else read_back(course)
        return [{"field": field, "words": words} for field, words in read.items()]


_SLICE_COLUMNS = ("Slice", "Request", "GPU", "Fit on each", "At once in all", "Memory", "Left after CUDA")
COURSE_COLUMNS = ("Course", "Title", "Open", "Now", "Slices")


def _slice_rows(slices: Sequence[SliceFigures]) -> Iterator[list[str]]:
    from gpu_pool.courses.arithmetic import at_once_text, memory_text

    for each in slices:
        for fit in each.fits:
            yield [
                f"{each.name} (default)" if each.is_default else each.name,
                each.request,
                f"{fit.gpus} x {safe(fit.gpu)}",
                str(fit.each) if fit.each else "none",
                at_once_text(each),
                memory_text(fit, format_memory),
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
