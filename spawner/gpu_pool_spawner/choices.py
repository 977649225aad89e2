"""Which courses somebody may use now, and what they chose. Pure: the time is given.

What comes from a form, from a link or by the REST API is read here and nowhere
else, and held to the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from gpu_pool.courses import CourseFile, Courses, is_member, may_use
from gpu_pool_client import BadRequest, NotAllowed

#: The one thing that may be chosen: the field of the form, and of ``user_options``.
COURSE: Final = "course"
#: What the Hub adds to the addresses of its forms, and so to a link to a page with one.
HUBS_OWN: Final = frozenset(("_xsrf",))


@dataclass(frozen=True, slots=True)
class OwnCourses:
    """The courses that somebody is in, by name."""

    #: Those that may be used now.
    open: Mapping[str, CourseFile] = field(default_factory=dict)
    #: The others: they open later, or are over.
    closed: Mapping[str, CourseFile] = field(default_factory=dict)


def courses_of(user: str, groups: Collection[str], courses: Courses, at: datetime) -> OwnCourses:
    """Return the courses that this user, who is in these groups, is in. ``at`` is an aware time."""
    found = {name: each for name, each in courses.usable.items() if is_member(each, user, groups)}
    usable = {name for name, each in found.items() if _may_use(each, user, groups, at)}
    return OwnCourses(
        {name: each for name, each in found.items() if name in usable},
        {name: each for name, each in found.items() if name not in usable},
    )


def options_of_form(form: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the ``user_options`` that a filled-in form means. Raises ``BadRequest`` for anything else."""
    _check_names(form)
    given = list(form.get(COURSE, ()))
    if len(given) > 1:
        raise BadRequest("Several courses were chosen.", "Choose one: a server is for one course.")
    name = chosen({COURSE: given[0]} if given else {})
    return {COURSE: name} if name else {}


def options_of_link(query: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the ``user_options`` that a link such as ``/hub/spawn?course=NAME`` means.

    Raises ``BadRequest`` where it chooses nothing: the form is shown then. The
    address of a form that was refused is such a link.
    """
    options = options_of_form({name: values for name, values in query.items() if name not in HUBS_OWN})
    if not options:
        raise BadRequest("Nothing is chosen yet.")
    return options


def chosen(options: Mapping[str, object]) -> str | None:
    """Return the name of the course in ``user_options``; None for none. Raises ``BadRequest``."""
    _check_names(options)
    name = options.get(COURSE)
    if name is not None and not isinstance(name, str):
        raise BadRequest("The chosen course is not text.", f'Accepted: {{"{COURSE}": "NAME"}}.')
    return name or None


def check(
    name: str | None, user: str, groups: Collection[str], courses: Courses, at: datetime, *, required: bool
) -> CourseFile | None:
    """Return the course of a server that is about to start; None for a server without one.

    Raises ``NotAllowed``, or ``BadRequest`` where a course is required and none was chosen.
    """
    if name is None:
        if required:
            raise BadRequest("No course was chosen.", _which(courses_of(user, groups, courses, at)))
        return None
    course = courses.course(name)
    may_use(course, user, groups, at)
    return course


def _which(mine: OwnCourses) -> str:
    if mine.open:
        return f"Choose one of yours: {', '.join(mine.open)}."
    return "You are in no course that is open now."


def _check_names(given: Mapping[str, object]) -> None:
    unknown = next((name for name in given if name != COURSE), None)
    if unknown is not None:
        raise BadRequest(
            f"A server has no option {str(unknown)[:40]!a}.", f"Only the {COURSE} can be chosen."
        )


def _may_use(course: CourseFile, user: str, groups: Collection[str], at: datetime) -> bool:
    try:
        may_use(course, user, groups, at)
    except NotAllowed:
        return False
    return True
