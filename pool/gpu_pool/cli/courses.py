"""``courses check``, ``list``, ``new`` and ``schema``: the files that teachers write."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_pool.cli import screen
from gpu_pool.cli.course_reports import COURSE_COLUMNS, CourseReport, course_row, plain_course, read_files
from gpu_pool.cli.session import CommandSession, Duration, json_option, pool_options, verb

if TYPE_CHECKING:
    from gpu_pool_client import Device


from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gpu_pool.cli.course_reports import usable_courses
from gpu_pool_client import BadRequest

if TYPE_CHECKING:
    from gpu_pool.courses import CourseFile


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
    "--students", type=click.IntRange(1, 2_000), metavar="N", help="Simulate that so many come at once."
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
    """Check course files, and do their arithmetic.

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
            screen.note('no GPU is known here; name one for the arithmetic: --device "V100-SXM2-32GB:1".')
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
    """Print a commented course file to begin with."""
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
    from gpu_pool.devices.simulated import parse_devices

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
    """Print quotas and queues of courses for a cluster to keep, or their images for it to fetch.

    PATHS are as for check. For quotas and queues the cluster is looked at, and nothing of it is
    changed; what cannot be said in its objects is named on standard error. Images are fetched
    beforehand by Zero to JupyterHub: give its chart what is printed, as one more --values.
    """
    import yaml

    from gpu_pool.cluster.export import pulled
    from gpu_pool.settings import load_settings

    if kubernetes == images:
        what = "Both were asked for" if images else "It was not said what to export"
        raise BadRequest(f"{what}.", "Accepted: --kubernetes, or --images.")
    courses = usable_courses(paths, load_settings())
    if images:
        click.echo(yaml.safe_dump(pulled(courses), sort_keys=False), nl=False)
        return 0
    return _export_objects(courses, dialect, namespace, kubeconfig, kueue=kueue)


def _export_objects(
    courses: Mapping[str, CourseFile], dialect: str, namespace: str, kubeconfig: str, *, kueue: bool | None
) -> int:
    import yaml

    from gpu_pool.cli.cluster import read_cluster
    from gpu_pool.cluster.dialects import DEFAULTS, choose
    from gpu_pool.cluster.export import documents, has_kueue

    choice = choose(read_cluster(kubeconfig), DEFAULTS, dialect)
    if choice.dialect is None:
        raise BadRequest(str(choice), "Name the dialect: --dialect hami, say.")
    wanted = has_kueue(choice.dialect) if kueue is None else kueue
    made, notes = documents(courses, choice.dialect, namespace, kueue=wanted)
    click.echo(yaml.safe_dump_all(made, sort_keys=False, explicit_start=True), nl=False)
    for note in (*choice.reasons, *notes):
        screen.note(note)
    return 0
