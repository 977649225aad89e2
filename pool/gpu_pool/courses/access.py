"""Who may use a course, when, and what they may ask for. The time is given; only groups ask the system."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Final

from gpu_pool.courses.hours import DAYS
from gpu_pool.courses.model import CourseFile
from gpu_pool.names import is_named
from gpu_pool_client import NotAllowed, SliceRequest

#: Tells nothing of a course to whoever is not in it, but that there is one.
NOT_IN_COURSE: Final = "You are not in this course."


def is_member(course: CourseFile, user: str, groups: Collection[str]) -> bool:
    """Whether somebody is in a course, at whatever time; its instructors are."""
    who = course.who
    return (
        who.is_everybody
        or is_named(user, who.users)
        or teaches(course, user)
        or any(group in who.groups for group in groups)
    )


def teaches(course: CourseFile, user: str) -> bool:
    """Whether somebody may see a course's leases, and change what of its file is its instructors'."""
    return is_named(user, course.instructors)


def may_use(course: CourseFile, user: str, groups: Collection[str], at: datetime) -> None:
    """Refuse, with ``NotAllowed``, who is not in the course, and whoever comes when it is closed.

    ``at`` is an aware time. Instructors may come at any time, to prepare.
    """
    if not is_member(course, user, groups):
        raise NotAllowed(NOT_IN_COURSE, "Ask its instructor to add you.")
    timetable = course.timetable
    if teaches(course, user) or timetable.is_open(at):
        return
    opens = timetable.opens_next(at)
    if opens is None:
        raise NotAllowed(f"{course.title} is over: it does not open again.", "Ask its instructor.")
    raise NotAllowed(f"{course.title} is not open now.", f"It opens on {say_when(opens, course)}.")


def check_offered(course: CourseFile, request: SliceRequest) -> None:
    """Refuse, with ``NotAllowed``, what the course does not offer; say what it offers."""
    if any(_is_offer(request, offer) for offer in course.requests) or _is_below(request, course.any_up_to):
        return
    offers = ", ".join(f"{offer.request} ({offer.name})" for offer in course.slices)
    more = f", and whatever is not more than {course.any_up_to}" if course.any_up_to else ""
    raise NotAllowed(
        f"You asked for {request.named}; {course.title} offers {offers}{more}.",
        "Ask for one of these. If Jupyter shows you others, the course has changed: reload the page, "
        "or else stop your server and start it again.",
    )


def say_when(at: datetime, course: CourseFile) -> str:
    """Write a time on the course's own clock: ``Mon 2026-10-12 at 10:00 (Europe/Berlin)``."""
    local = at.astimezone(course.timetable.zone)
    return f"{DAYS[local.weekday()]} {local:%Y-%m-%d} at {local:%H:%M} ({course.time_zone})"


def when_open(course: CourseFile) -> str:
    """Say in which weeks and at which hours a course is open."""
    if course.timetable.is_always_open:
        return "always"
    weeks = " and ".join(f"{period.first} to {period.last}" for period in course.weeks)
    hours = "; ".join(map(str, course.hours))
    return f"{', '.join(filter(None, (weeks, hours)))} ({course.time_zone})"


def open_now(course: CourseFile, now: datetime) -> str:
    """Say whether a course is open, and when that changes."""
    timetable = course.timetable
    if timetable.is_open(now):
        until = timetable.open_until(now)
        return f"open until {say_when(until, course)}" if until else "open"
    opens = timetable.opens_next(now)
    return f"opens {say_when(opens, course)}" if opens else "over"


def _is_offer(request: SliceRequest, offer: SliceRequest) -> bool:
    """Whether a request asks for what is offered, for no longer than that and up to no more."""
    same = replace(request.guarantee, length=offer.length) == offer.guarantee
    return same and _is_as_short(request, offer) and _uses_at_most(request) <= _uses_at_most(offer)


def _is_as_short(request: SliceRequest, most: SliceRequest) -> bool:
    return most.length is None or (request.length is not None and request.length <= most.length)


def _is_below(request: SliceRequest, most: SliceRequest | None) -> bool:
    """Whether a request asks for no more than another, in the same unit, on the same devices, for as long.

    What a share is in memory depends on the device, so one is never compared with the other.
    """
    if most is None or request.count > most.count or str(most.filters) not in ("", str(request.filters)):
        return False
    if not _is_as_short(request, most):
        return False
    if (request.milli is None) != (most.milli is None):
        return False
    is_less = (request.milli or request.memory_mib or 0) <= (most.milli or most.memory_mib or 0)
    return is_less and _uses_at_most(request) <= _uses_at_most(most)


def _uses_at_most(request: SliceRequest) -> int:
    """Return what it may use of a device at most, in the unit in which it is asked for."""
    return request.limit_milli or request.limit_mib or request.milli or request.memory_mib or 0


def system_groups(user: str) -> frozenset[str]:
    """Return the names of a user's groups; none for a user whom the system does not know."""
    try:
        numbers = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return frozenset()
    return frozenset(name for number in numbers if (name := _name(number)))


def _name(number: int) -> str | None:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return None
