"""A course: what it offers, who holds what of it, and what its file says. Pure: the time is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from gpu_pool.courses import CourseFile, Courses, access, is_member
from gpu_pool.courses.access import open_now, when_open
from gpu_pool.courses.model import CourseLimits
from gpu_pool.courses.reading import SUFFIX
from gpu_pool.policy.course_values import NEVER
from gpu_pool.service.dashboard.pool_view import Mark, Viewer, count, gpus, memory
from gpu_pool_client import PoolStatus, SliceRequest, format_duration


@dataclass(frozen=True, slots=True)
class CourseLink:
    """A course in a list of them."""

    name: str
    title: str
    mark: Mark | None
    state: str


@dataclass(frozen=True, slots=True)
class OfferRow:
    """A slice that may be picked."""

    name: str
    request: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the course file, by its field's name, in words."""

    name: str
    value: str
    #: What the field means.
    meaning: str


@dataclass(frozen=True, slots=True)
class CourseView:
    """A course, for somebody who is in it."""

    name: str
    title: str
    state: str
    when: str
    offers: tuple[OfferRow, ...]
    any_up_to: str
    instructors: str
    per_user: tuple[str, ...]
    #: How much of it is held and waited for now, as counts.
    held: str
    waiting: str


def may_see(course: CourseFile, viewer: Viewer) -> bool:
    """Whether a course's page is a viewer's business."""
    return viewer.is_admin or is_member(course, viewer.user, viewer.groups)


def teaches(course: CourseFile, viewer: Viewer) -> bool:
    """Whether a viewer may read the course's settings, and see who holds its slices."""
    return viewer.is_admin or access.teaches(course, viewer.user)


def course_links(
    courses: Courses, viewer: Viewer, marks: Mapping[str, Mark], now: datetime
) -> tuple[CourseLink, ...]:
    """Return the courses that a viewer is in."""
    return tuple(
        CourseLink(name, course.title, marks.get(name), open_now(course, now))
        for name, course in sorted(courses.usable.items())
        if may_see(course, viewer)
    )


def course_view(name: str, course: CourseFile, status: PoolStatus, now: datetime) -> CourseView:
    """Return a course's page."""
    held = [lease for lease in status.leases if lease.holder.course == name and lease.slices]
    waiting = sum(lease.holder.course == name for lease in status.queue)
    milli = sum(part.milli for lease in held for part in lease.slices)
    return CourseView(
        name=name,
        title=course.title,
        state=open_now(course, now),
        when=when_open(course),
        offers=tuple(
            OfferRow(each.name, _offered(each.request), each is course.default_slice)
            for each in course.slices
        ),
        any_up_to=str(course.any_up_to) if course.any_up_to else "",
        instructors=", ".join(course.instructors),
        per_user=tuple(limit_texts(course.per_user)),
        held=f"{count(len(held), 'slice')}, {gpus(milli)}" if held else "nothing",
        waiting=count(waiting, "request") if waiting else "nobody",
    )


def _offered(request: SliceRequest) -> str:
    limit = f", up to {request.limit} while that is free" if request.has_limit else ""
    return f"{request.guarantee.named}{limit}"


def limit_texts(limits: CourseLimits) -> Iterable[str]:
    """Yield what some limits allow, one after the other."""
    if limits.slices is not None:
        yield f"{count(limits.slices, 'slice')} at once"
    if limits.share is not None:
        yield f"{gpus(limits.share)} in all"
    if limits.memory is not None:
        yield f"{memory(limits.memory)} of GPU memory in all"
    if limits.gpu_hours_per_week is not None:
        yield f"{limits.gpu_hours_per_week:g} GPU-hours a week"
    if limits.gpu_hours_per_term is not None:
        yield f"{limits.gpu_hours_per_term:g} GPU-hours a term"


def settings(course: CourseFile) -> tuple[Setting, ...]:
    """Return what the course file says, defaults included, in the file's order."""
    said = {
        "title": course.title,
        "who": _who(course),
        "instructors": ", ".join(course.instructors) or "nobody",
        "slices": "; ".join(f"{each.name}: {each.request}" for each in course.slices),
        "any_up_to": str(course.any_up_to or "only what is offered"),
        "per_user": "; ".join(limit_texts(course.per_user)) or "no limit",
        "quota": "; ".join(limit_texts(course.quota)) or "no limit",
        "weight": f"{course.weight:g}",
        "priority": str(course.priority),
        "batch": "true" if course.batch else "false",
        "longest_lease": _duration(course.longest_lease),
        "idle_limit": _duration(course.idle_limit),
        "yield_after": NEVER if course.yield_after is None else format_duration(course.yield_after),
        "when_idle": course.when_idle.value,
        "warn_before": format_duration(course.warn_before),
        "keep_at_most": format_duration(course.keep_at_most),
        "hibernate_after": _duration(course.hibernate_after),
        "preload": _preload(course),
        "preload_with_server": "true" if course.preload_with_server else "false",
        "weeks": " and ".join(f"{each.first} to {each.last}" for each in course.weeks) or "always",
        "hours": "; ".join(map(str, course.hours)) or "at all hours",
        "time_zone": course.time_zone or "none",
    }
    fields = CourseFile.model_fields
    return tuple(Setting(name, value, fields[name].description or "") for name, value in said.items())


def _preload(course: CourseFile) -> str:
    if course.preload is None:
        return "nothing"
    return ", ".join(course.preload) or "what every Python kernel imports"


def _who(course: CourseFile) -> str:
    if course.who.is_everybody:
        return "everybody"
    groups, users = ", ".join(course.who.groups), ", ".join(course.who.users)
    return "; ".join(filter(None, (f"groups {groups}" if groups else "", f"users {users}" if users else "")))


def _duration(seconds: float | None) -> str:
    return "no limit" if seconds is None else format_duration(seconds)


def problems_by_course(courses: Courses) -> tuple[tuple[str, str], ...]:
    """Return what is wrong with the files, each with its course, or with an empty text if it is none's."""
    named = ((problem, problem.file.removesuffix(SUFFIX)) for problem in courses.problems)
    known = {*courses.usable, *courses.refused}
    return tuple((str(problem), name if name in known else "") for problem, name in named)


def problems_of(name: str, courses: Courses) -> tuple[str, ...]:
    """Return what is wrong with a course's file as it is now, a line each."""
    return tuple(str(problem) for problem in courses.problems if problem.file.partition(".")[0] == name)
