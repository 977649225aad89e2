"""What may be chosen of a server on Kubernetes, and what was: a course and perhaps a slice. Pure.

As ``user_options`` it is ``{"course": "ml", "slice": "Small"}``, the slice being
one of the course's names or a request that the course allows. The form has one
field for both, ``course``, with ``ml/Small``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from gpu_pool.cluster.dialects import counted_as
from gpu_pool.courses import CourseFile, check_offered
from gpu_pool.courses.model import SliceOffer
from gpu_pool_client import BadRequest, GpuPoolError, SliceRequest, parse_request
from gpu_pool_client._durations import format_duration
from gpu_pool_spawner import choices
from gpu_pool_spawner.kube_cluster import UNBOUNDED, ClusterSupply, capacity, next_capacity
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
    return f"; more is free in at most {format_duration(60 * -(-seconds // 60))}"


def _choice(
    name: str,
    course: CourseFile,
    offer: SliceOffer,
    supply: ClusterSupply | None,
    now: datetime,
    may_wait: bool,
) -> ServerChoice:
    words, usable = "the cluster does not show its GPUs at the moment", False
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
        return f"not available on this cluster: {error}", False
    number = capacity(profile, supply)
    if number >= UNBOUNDED:
        return "the cluster does not show how many are free", True
    if number:
        return f"{number} free now", True
    return f"none free now{say_next(profile, supply, now)}", may_wait


#: Which of its course's slices a server gets, in ``user_options`` and in links.
SLICE: Final = "slice"


def options_of_form(form: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the ``user_options`` that a filled-in form means. Raises ``BadRequest`` for anything else."""
    return _split(choices.options_of_form(form))


def options_of_link(query: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return those of a link such as ``/hub/spawn?course=ml&slice=2%25``.

    Raises ``BadRequest`` where it chooses nothing: the form is shown then.
    """
    rest = {name: values for name, values in query.items() if name != SLICE}
    options = _split(choices.options_of_link(rest))
    given = list(query.get(SLICE, ()))
    if len(given) > 1:
        raise BadRequest("Several slices were chosen.", "Choose one.")
    if given:
        options[SLICE] = str(given[0])
    return options


def chosen(options: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the names of the course and of the slice in ``user_options``. Raises ``BadRequest``."""
    name = choices.chosen({key: value for key, value in options.items() if key != SLICE})
    slice_name = options.get(SLICE)
    if slice_name is not None and not isinstance(slice_name, str):
        raise BadRequest("The chosen slice is not text.", f'Accepted: {{"{SLICE}": "NAME"}}.')
    return name, slice_name or None


def request_of(course: CourseFile, slice_name: str | None) -> SliceRequest | None:
    """Return the slice that a server of this course gets; None where its kernels have theirs.

    Raises ``BadRequest`` or ``NotAllowed`` for what the course does not offer.
    """
    if course.kubernetes.kernels == "pods":
        if slice_name is not None:
            raise BadRequest(
                f"A server of {course.title} has no slice: each of its kernels gets one.",
                "Leave the slice out, and choose it when you start a kernel.",
            )
        return None
    if slice_name is None:
        return course.default_slice.request
    named = next((offer.request for offer in course.slices if offer.name == slice_name), None)
    request = named or parse_request(slice_name)
    check_offered(course, request)
    return request


def _split(options: Mapping[str, str]) -> dict[str, str]:
    name, slash, slice_name = options.get(choices.COURSE, "").partition("/")
    found = {choices.COURSE: name, SLICE: slice_name if slash else ""}
    return {key: value for key, value in found.items() if value}
