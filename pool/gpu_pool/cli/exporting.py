"""``courses export``: courses as what a cluster itself understands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpu_pool.cli import screen
from gpu_pool.cli.coursefiles import usable_courses
from gpu_pool.cli.session import Session, verb
from gpu_pool_client import BadRequest

if TYPE_CHECKING:
    from gpu_pool.coursefiles import CourseFile

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
    _session: Session,
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

    from gpu_pool.exporting import pulled
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
    from gpu_pool.dialects import DEFAULTS, choose
    from gpu_pool.exporting import documents, has_kueue

    choice = choose(read_cluster(kubeconfig), DEFAULTS, dialect)
    if choice.dialect is None:
        raise BadRequest(str(choice), "Name the dialect: --dialect hami, say.")
    wanted = has_kueue(choice.dialect) if kueue is None else kueue
    made, notes = documents(courses, choice.dialect, namespace, kueue=wanted)
    click.echo(yaml.safe_dump_all(made, sort_keys=False, explicit_start=True), nl=False)
    for note in (*choice.reasons, *notes):
        screen.note(note)
    return 0
