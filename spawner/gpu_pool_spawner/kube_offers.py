"""What the spawn page offers of courses whose servers have the slice themselves. Pure: the time is given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from gpu_pool.cluster.dialects import counted_as
from gpu_pool.courses import CourseFile
from gpu_pool.courses.model import SliceOffer
from gpu_pool_client import GpuPoolError, SliceRequest
from gpu_pool_client.durations import format_duration
from gpu_pool_spawner.kube_capacity import UNBOUNDED, ClusterSupply, capacity, next_capacity
from gpu_pool_spawner.kube_profiles import Profile, profile_of
from gpu_pool_spawner.page import ServerChoice, say_granted


def server_choices(
    courses: Mapping[str, CourseFile], supply: ClusterSupply | None, now: datetime, *, may_wait: bool
) -> dict[str, list[ServerChoice]]:
    """Return what can be chosen of each of these courses.

    ``may_wait`` is whether a server is started where there is no room, too.
    """
    return {
        name: [_choice(name, course, offer, supply, now, may_wait) for offer in course.slices]
        for name, course in courses.items()
        if course.kubernetes.kernels == "server"
    }


def granted_instead(
    courses: Mapping[str, CourseFile], supply: ClusterSupply | None
) -> dict[SliceRequest, SliceRequest]:
    """Return what is granted instead, of those slices that the cluster rounds up."""
    found: dict[SliceRequest, SliceRequest] = {}
    if supply is None:
        return found
    for request in {each for course in courses.values() for each in course.requests}:
        with suppress(GpuPoolError):
            counted = counted_as(request, supply.dialect)
            if counted != request:
                found[request] = counted
    return found


def say_next(profile: Profile, supply: ClusterSupply, now: datetime) -> str:
    """Say when there will be room, if that is known."""
    at = next_capacity(profile, supply)
    if at is None:
        return ""
    seconds = max(60.0, (at - now).total_seconds())
    return f"; there is room again in at most {format_duration(60 * -(-seconds // 60))}"


def _choice(
    name: str,
    course: CourseFile,
    offer: SliceOffer,
    supply: ClusterSupply | None,
    now: datetime,
    may_wait: bool,
) -> ServerChoice:
    words, usable = "the GPUs cannot be seen at the moment", False
    if supply is not None:
        words, usable = _say_room(name, course, offer, supply, now, may_wait)
    granted = granted_instead({name: course}, supply).get(offer.request, offer.request)
    value, title = f"{name}/{offer.name}", f"{course.title}: {offer.name}"
    return ServerChoice(value, title, f"{say_granted(offer.request, granted)}, {words}", usable)


def _say_room(
    name: str, course: CourseFile, offer: SliceOffer, supply: ClusterSupply, now: datetime, may_wait: bool
) -> tuple[str, bool]:
    """Say how many there is room for, and whether one may be chosen."""
    try:
        profile = profile_of(name, course, offer.request, supply.dialect)
    except GpuPoolError as error:
        return f"not to be had on this cluster. Who asks for it is told: {error}", False
    number = capacity(profile, supply)
    if number >= UNBOUNDED:
        return "of which the cluster does not show how many are free", True
    if number:
        return f"{number} free now", True
    return f"none free now{say_next(profile, supply, now)}", may_wait
