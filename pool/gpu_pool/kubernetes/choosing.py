"""What a kernel's pod gets besides its slice, and what stands in its way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_pool import placement
from gpu_pool.coursefiles import CourseFile, Courses
from gpu_pool.kubernetes.manifests import Body
from gpu_pool.kubernetes.notebooks import Notebook
from gpu_pool.kubernetes.settings import KubernetesSettings
from gpu_pool.rules import Rules
from gpu_pool_client import Device, NotAllowed, SliceRequest


def chosen_body(settings: KubernetesSettings, course: CourseFile | None, notebook: Notebook) -> Body:
    """Return a kernel's image, size and home: the course's, or else the administrator's.

    Raises ``NotAllowed`` where a home is expected and the notebook server has none.
    """
    said = None if course is None else course.kubernetes
    image, cpu, memory = settings.image or notebook.image, settings.cpu, settings.memory_mib
    if said is not None:
        image = said.kernel_image or said.image or image
        cpu = said.kernel_cpu or said.cpu or cpu
        memory = said.kernel_memory or said.memory or memory
    if not (said is not None and said.home == 0) and notebook.home is None:
        raise NotAllowed(
            f"Your notebook server has no volume at {settings.home}, "
            "so a kernel elsewhere would not see your files.",
            "Ask the administrator; a course that needs no files can say home: none.",
        )
    home = None if said is not None and said.home == 0 else notebook.home
    return Body(
        image, cpu, memory, settings.home, home, settings.uid, settings.gid, tuple(settings.tolerations)
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
