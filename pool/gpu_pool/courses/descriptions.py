"""A course in a sentence or two: when it is open, and how it fares when all come at once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from gpu_pool.courses.access import say_when
from gpu_pool.courses.arithmetic import Rush, SliceFigures
from gpu_pool.courses.model import CourseFile
from gpu_pool_client import format_duration


def rush_words(rush: Rush, course: CourseFile) -> str:
    """Say what happens when all come at once."""
    stays = f"each keeps {course.default_slice.name} for {format_duration(rush.stay)}"
    said = [
        f"If {rush.students} come at once ({stays}; simulated): "
        f"{rush.at_once} ({rush.at_once / rush.students:.0%}) have a slice at once."
    ]
    waiting = rush.waits.count - rush.at_once
    if waiting:
        waits = rush.waits
        median, p95, worst = map(format_duration, (waits.median, waits.p95, waits.worst))
        said.append(f"{waiting} wait. Waits of all: median {median}, 95th percentile {p95}, worst {worst}.")
    if rush.refused:
        said.append(f"{rush.refused} are turned away by a quota.")
    return " ".join(said)


def at_once_words(each: SliceFigures) -> str:
    """Say how many of a slice there are at once in all: ``50``, or ``10 by quota, of 50``."""
    if each.quota is not None and each.quota < each.at_once:
        return f"{each.quota} by quota, of {each.at_once}"
    return str(each.at_once)


def slice_notes(each: SliceFigures) -> Iterator[str]:
    """Yield why nobody can have a slice, if that is so."""
    if not each.at_once:
        yield f"{each.name} fits on no GPU here."
    if each.per_user == 0:
        yield f"Nobody can have {each.name}: it is more than per_user allows."
    if each.quota == 0:
        yield f"Nobody can have {each.name}: it is more than the quota allows."


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
