"""KubeSpawner's profiles beside courses: which there are, and which server a choice means. Pure.

A profile of ``c.KubeSpawner.profile_list`` may be for a course, which is named beside its
``display_name``, and for one of the course's slices, which a choice may name, too::

    {
        "display_name": "Machine learning",
        "course": "ml",
        "profile_options": {"size": {"display_name": "GPU", "choices": {
            "small": {"display_name": "A little", "slice": "Small"},
        }}},
    }

A course that no profile is for may be a profile of its own, ``course-NAME``. What
somebody may start is not decided here but by the course that a choice means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from gpu_pool.courses import CourseFile, Courses
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed
from gpu_pool_spawner.choices import COURSE
from gpu_pool_spawner.kube_choices import SLICE, request_of
from gpu_pool_spawner.page import ServerChoice, SpawnPage, say_slice, say_until

#: KubeSpawner's names: of what is chosen, of what was filled in instead of a choice, and of what either sets.
PROFILE: Final = "profile"
_UNLISTED: Final = "{}--unlisted-choice"
_OVERRIDE: Final = "kubespawner_override"
#: The slugs of the profiles that courses are, and of a server without a course.
SLUG: Final = "course-{}"
WITHOUT: Final = "no-course"
#: What a profile's options cannot be called, since ``user_options`` has these already.
_RESERVED: Final = frozenset((PROFILE, COURSE, SLICE))

#: A profile as KubeSpawner has it, with its slug and its default choices.
Listed = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a server is to be."""

    course: str | None = None
    #: The slice's name or size.
    slice_name: str | None = None
    #: The administrator's profile whose settings it gets.
    profile: Listed | None = None
    #: Seconds that the profile, or a choice in it, gives the start; None where neither says. KubeSpawner sets
    #: them only after the Hub has read its own.
    start_timeout: int | None = None


#: Characters of HTML, and others that look like them.
_HARMLESS: Final = str.maketrans("<>\"'", "\u2039\u203a\u201d\u2019")


class HtmlText(str):
    """What a teacher wrote, for KubeSpawner's templates.

    Its own template takes texts as HTML, and that of jupyterhub-fancy-profiles takes the
    same texts as JSON: this is the HTML in the one, and the text in the other. A template
    that cuts or strips it makes plain text of it, so it has no character that HTML would take
    for a tag or for the end of an attribute.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> HtmlText:  # noqa: D102 - as the class says
        return super().__new__(cls, text.translate(_HARMLESS))

    def __str__(self) -> str:
        return escape(str.__str__(self))

    def __html__(self) -> str:
        return str(self)


def choose(
    options: Mapping[str, object],
    listed: Sequence[Listed],
    courses: Courses,
    usable: Collection[str],
    *,
    each_course: bool,
) -> Choice:
    """Return what ``user_options`` mean.

    Parameters
    ----------
    options
        Whatever somebody has sent.
    listed
        The administrator's profiles.
    courses
        All that there are.
    usable
        The names of those that the user may use now. They decide what is meant where nothing is
        chosen, and nothing else.
    each_course
        Whether every course is a profile, too.

    Raises
    ------
    BadRequest
        For what there is not, or what contradicts itself.
    NotAllowed
        For a profile that is not set up as it should be.
    """
    slug, course, slice_name = (_text(options, name) for name in (PROFILE, COURSE, SLICE))
    free = courses.usable.keys() - _named(listed) if each_course else ()
    if slug:
        profile = next((each for each in listed if each["slug"] == slug), None)
        own = {SLUG.format(name): name for name in free} | ({WITHOUT: None} if each_course else {})
        if profile is None and slug in own:
            _agree(slug, "course", own[slug], course)
            course = own[slug]
        elif profile is None:
            raise BadRequest(
                f"This JupyterHub has no profile {slug[:60]!a}.", "Choose one of those on the spawn page."
            )
    elif course:
        fitting = (each for each in listed if each.get(COURSE) == course)
        profile = next(
            (each for each in fitting if _may_have(each.get(SLICE), slice_name, course, courses)), None
        )
        if profile is None and (not each_course or course in _named(listed)):
            raise BadRequest(
                f"No profile of this JupyterHub is for {course[:60]!a} with what you chose.",
                "Choose one of those on the spawn page.",
            )
    else:
        profile = _default([each for each in listed if each.get(COURSE) in (None, *usable)])
    if not slug:
        _check_known(options, profile)
    return Choice(course, slice_name) if profile is None else _of_profile(profile, options, courses)


def resolved(options: Mapping[str, object], choice: Choice) -> dict[str, object]:
    """Return ``user_options`` with the course and the profile that are meant.

    KubeSpawner checks the other options of a profile only where the profile is named.
    """
    found = {name: each for name, each in options.items() if name != COURSE}
    profile = {} if choice.profile is None else {PROFILE: choice.profile["slug"]}
    return {**found, **profile, **({COURSE: choice.course} if choice.course else {})}


def offered(listed: Sequence[Listed], courses: Courses, usable: Collection[str]) -> list[Listed]:
    """Return those of the administrator's profiles that somebody may use who may use these courses."""
    return [
        each for each in listed if each.get(COURSE) in (None, *usable) and not _fault(each, listed, courses)
    ]


def course_profiles(page: SpawnPage, listed: Sequence[Listed]) -> list[dict[str, Any]]:
    """Return the courses of the spawn page that no profile is for as profiles, in the page's order."""
    taken = _named(listed)
    made = [_of_course(name, each, page) for name, each in page.mine.open.items() if name not in taken]
    if page.without:
        made.append({"display_name": "No course", "description": "A server without a GPU.", "slug": WITHOUT})
    slugs = {each["slug"] for each in listed}
    return [each for each in made if each["slug"] not in slugs]


def faults(listed: Sequence[Listed], courses: Courses, *, each_course: bool) -> Iterator[str]:
    """Yield what is wrong with the profiles, as an administrator reads it in the log."""
    for profile in listed:
        if words := _fault(profile, listed, courses):
            yield f"The profile {profile['slug']!a} is not offered: {words}"
            if each_course and courses.usable.keys() & _named([profile]):
                yield (
                    f"The course {profile[COURSE]!a} is not offered as a profile of its own, since "
                    f"{profile['slug']!a} names it."
                )
    if listed and courses.usable and not each_course and not _named(listed):
        yield (
            "No server can be started in a course: profile_list is set, and no profile names a course. Write "
            '"course": "NAME" in one, or set c.GPUPoolKubeSpawner.courses_as_profiles = True.'
        )
    slugs = {each["slug"] for each in listed}
    for name in courses.usable.keys() - _named(listed) if each_course else ():
        if SLUG.format(name) in slugs:
            yield (
                f"The course {name!a} is not offered as a profile: profile_list has one with the slug "
                f"{SLUG.format(name)!a}, which is not for this course. Give that one another slug, or name "
                f'the course in it: "course": "{name}".'
            )


def overridden(profile: Listed) -> set[str]:
    """Return the names of the spawner's settings that a profile may set, whatever is chosen in it."""
    return {name for each in _overrides(profile) for name in each}


def _of_profile(profile: Listed, options: Mapping[str, object], courses: Courses) -> Choice:
    slug, course = profile["slug"], profile.get(COURSE)
    if _fault(profile, [profile], courses):
        raise NotAllowed(
            f"The profile {slug!a} is not set up as it should be.",
            "Tell the administrator: the log of JupyterHub has the reason.",
        )
    own = profile.get("profile_options") or {}
    # As KubeSpawner applies them: what comes later holds.
    parts = [profile, *(_chosen_of(name, option, options) for name, option in own.items())]
    slice_name = _last([each.get(SLICE) for each in parts])
    within = _last([_override(each).get("start_timeout") for each in parts])
    asked = _text(options, SLICE)
    if not course or not _may_have(slice_name, asked, course, courses):
        _agree(slug, "slice", slice_name, asked)
    return Choice(course, slice_name or asked, profile, within if isinstance(within, int) else None)


def _last(found: Sequence[Any]) -> Any:
    return next((each for each in reversed(found) if each is not None), None)


def _may_have(slice_name: object, asked: str | None, course: str, courses: Courses) -> bool:
    """Whether a profile for this slice, or for any, gives what was asked for by name or size."""
    if not asked or slice_name in (None, asked):
        return True
    with suppress(GpuPoolError):
        found = courses.course(course)
        return request_of(found, str(slice_name)) == request_of(found, asked)
    return False


def _chosen_of(name: str, option: Mapping[str, Any], options: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the choice that was made of a profile's option, or its default. Raises ``BadRequest``."""
    choice, unlisted = _text(options, name), _text(options, _UNLISTED.format(name))
    choices = option.get("choices") or {}
    if unlisted:
        if not (option.get("unlisted_choice") or {}).get("enabled"):
            raise BadRequest(f"Of {name!a} only what is listed can be chosen.", _which(choices))
        return {_OVERRIDE: _override(option["unlisted_choice"])}
    if choice and choice not in choices:
        raise BadRequest(f"There is no choice {choice[:60]!a} of {name!a}.", _which(choices))
    if not choices:
        raise BadRequest(f"Nothing was chosen of {name!a}.")
    return _default([choices[choice]] if choice else list(choices.values())) or {}


def _which(choices: Collection[str]) -> str:
    return f"Choose one of {', '.join(map(ascii, choices))}." if choices else ""


def _agree(slug: str, what: str, given: str | None, asked: str | None) -> None:
    if asked and asked != given:
        said = f"for the {what} {given!a}" if given else f"for no {what}"
        raise BadRequest(
            f"The profile {slug!a} is {said}, and you chose the {what} {asked[:60]!a}.",
            f"Leave the {what} out, or choose another profile.",
        )


def _check_known(options: Mapping[str, object], profile: Listed | None) -> None:
    own = list((profile or {}).get("profile_options") or {})
    known = [PROFILE, *own, *(_UNLISTED.format(name) for name in own)]
    unknown = next((name for name in options if name not in (COURSE, SLICE, *known)), None)
    if unknown is not None:
        raise BadRequest(
            f"A server has no option {str(unknown)[:40]!a} here.", f"There are: {', '.join(known)}."
        )


def _text(options: Mapping[str, object], name: str) -> str | None:
    found = options.get(name)
    if found is not None and not isinstance(found, str):
        raise BadRequest(f"What was chosen of {name[:40]!a} is not text.")
    return found or None


def _default(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return what KubeSpawner takes where nothing is chosen: what is marked so, or the first."""
    return next((each for each in found if each.get("default")), found[0] if found else None)


def _named(listed: Sequence[Listed]) -> set[str]:
    """Return the courses that profiles are for, whether or not these are set up as they should be."""
    return {name for each in listed if (name := each.get(COURSE)) and isinstance(name, str)}


def _override(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a profile sets whatever is chosen in it, or what a choice sets."""
    return part.get(_OVERRIDE) or {}


def _overrides(profile: Listed) -> Iterator[Mapping[str, Any]]:
    yield _override(profile)
    for option in (profile.get("profile_options") or {}).values():
        for each in (*(option.get("choices") or {}).values(), option.get("unlisted_choice") or {}):
            yield _override(each)


def _fault(profile: Listed, listed: Sequence[Listed], courses: Courses) -> str:
    """Say what is wrong with a profile; empty if nothing is."""
    if next(each for each in listed if each["slug"] == profile["slug"]) is not profile:
        return "another one has the same slug. Give each a slug of its own."
    for name in (COURSE, SLICE):
        if name in overridden(profile):
            return f'"{name}" is no setting of KubeSpawner. Write it beside display_name.'
    own = profile.get("profile_options") or {}
    if taken := _RESERVED & own.keys():
        return f"an option cannot be called {min(taken)!a}. Give it another name."
    choices = [each for option in own.values() for each in (option.get("choices") or {}).values()]
    if any(COURSE in each for each in choices):
        return "a choice names a course. Make a profile for each course; a choice may name a slice."
    slices = [each[SLICE] for each in (profile, *choices) if SLICE in each]
    return _course_fault(profile.get(COURSE), slices, courses)


def _course_fault(name: object, slices: Sequence[object], courses: Courses) -> str:
    if name is None:
        return "it names a slice, and no course." if slices else ""
    if not isinstance(name, str) or not all(isinstance(each, str) for each in slices):
        return "course and slice are names, in quotation marks."
    try:
        course = courses.course(name)
        for each in slices:
            request_of(course, str(each))
    except GpuPoolError as error:
        return str(error)
    return ""


def _of_course(name: str, course: CourseFile, page: SpawnPage) -> dict[str, Any]:
    """Return a course as a profile."""
    servers = page.servers.get(name, ())
    words = [say_until(course, page.now), page.notes.get(name, "")]
    if not servers:
        words[1:1] = [", ".join(filter(None, say_slice(name, offer, page))) for offer in course.slices]
    made: dict[str, Any] = {
        "display_name": HtmlText(course.title),
        "description": HtmlText("; ".join(filter(None, words))),
        "slug": SLUG.format(name),
    }
    if servers:
        made["profile_options"] = {SLICE: {"display_name": "GPU", "choices": _slices(course, servers)}}
    return made


def _slices(course: CourseFile, servers: Sequence[ServerChoice]) -> dict[str, Any]:
    """Return the slices of a course's servers as choices: a server without room says so, and is refused."""
    found = {each.value.partition("/")[2]: each for each in servers}
    usable = [name for name, each in found.items() if each.usable]
    first = course.default_slice.name
    default = first if first in usable or not usable else usable[0]
    requests = {offer.name: str(offer.request) for offer in course.slices}
    return {
        # A name that HtmlText changes could not be chosen by it.
        HtmlText(name if HtmlText(name) == name else requests[name]): {
            "display_name": HtmlText(f"{name}: {each.about}"),
            "default": name == default,
        }
        for name, each in found.items()
    }
