"""What a kernel's container is besides its slice, and what keeps one from being made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_pool.cluster.notebooks import HomeVolume, Identity, Notebook
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import CourseFile, Courses
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import Device, NotAllowed, SliceRequest


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """What a kernel's container is besides its slice."""

    image: str
    #: Cores and MiB at most; 0 for no limit.
    cpu: float
    memory_mib: int
    #: Where the home is mounted, and what; None for an empty folder that goes with the pod.
    home_path: str
    home: HomeVolume | None
    #: As whom it runs, which is known then; never as root.
    run_as: Identity
    tolerations: tuple[str, ...] = ()
    #: Seconds for which its machine may not answer, after which the cluster gives it up.
    lost_after: int = 60


def chosen_body(
    settings: KubernetesSettings, course: CourseFile | None, notebook: Notebook
) -> ContainerSettings:
    """Return a kernel's image, size and home: the course's, or else the administrator's.

    It touches the files of its home as the notebook server does, so that nothing there changes its
    group, and no group comes in that the server is not in.

    Raises ``NotAllowed`` where a home is expected and the notebook server has none.
    """
    said = None if course is None else course.kubernetes
    image, cpu, memory = settings.image or notebook.image, settings.cpu, settings.memory_mib
    if said is not None:
        image = said.kernel_image or said.image or image
        cpu = said.kernel_cpu or said.cpu or cpu
        memory = said.kernel_memory or said.memory or memory
    home = None if said is not None and said.home == 0 else _home(settings.home, notebook)
    identity = Identity() if home is None else notebook.identity
    run_as = replace(
        identity,
        # Never root, nor root's group, whatever the notebook server starts as.
        uid=identity.uid or settings.uid,
        gid=identity.gid or settings.gid,
        fs_group=settings.gid if home is None else identity.fs_group,
    )
    tolerations = tuple(settings.tolerations)
    return ContainerSettings(
        image, cpu, memory, settings.home, home, run_as, tolerations, settings.lost_after
    )


def _home(path: str, notebook: Notebook) -> HomeVolume:
    """Return the home of a notebook server. Raises ``NotAllowed`` where a kernel cannot have the same."""
    if notebook.home is not None:
        return notebook.home
    advice = "Ask the administrator; a course that needs no files can say home: none."
    if notebook.home_problem:
        raise NotAllowed(
            f"A kernel elsewhere cannot have your home folder ({path}) as your notebook server has it: "
            f"{notebook.home_problem}.",
            advice,
        )
    raise NotAllowed(
        f"Your notebook server has no volume at {path}, so a kernel elsewhere would not see your files.",
        advice,
    )


def refuse_beside_server(name: str | None, courses: Courses) -> None:
    """Raise ``NotAllowed`` if the course's notebook servers have the slice, for all their kernels."""
    course = courses.usable.get(name or "")
    if course is not None and course.kubernetes.kernels == "server":
        # Its title is for those who are in it, which is not looked at yet.
        raise NotAllowed(
            f"Kernels of course {name} use the slice of their notebook server, and get none of their own.",
            "Start them there as ordinary kernels, such as Python 3.",
        )


def refuse_other_nodes(request: SliceRequest, devices: Sequence[Device], node: str, rules: Rules) -> None:
    """Raise ``NotAllowed`` if the only machine that a home can be used on could never grant the request."""
    able = placement.candidates(request, devices, rules)
    if placement.most_together(able) < request.count:
        there = "no GPU" if not devices else f"no GPU for {request}"
        raise NotAllowed(
            f"Your home folder can be used on one machine at a time (ReadWriteOnce), your server runs on "
            f"{node or 'none yet'}, and that machine has {there}.",
            "Ask the administrator for home folders that several machines can use (ReadWriteMany), "
            "or for a course with home: none.",
        )


def with_indexes(request: SliceRequest, indexes: tuple[int, ...]) -> SliceRequest:
    """Return the request for the GPUs with these numbers; none mean any."""
    return replace(request, filters=replace(request.filters, index=indexes))
