"""How a pool is shared between courses, groups and users: values, and the reader of their settings.

Pure: mappings in, values out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpu_pool.names import is_named
from gpu_pool.policy.course_values import (
    read_duration,
    read_memory,
    read_number,
    read_priority,
    read_share,
    read_when_idle,
    read_whole_number,
    read_yes_or_no,
    read_yield_after,
)
from gpu_pool.policy.queue import Policy
from gpu_pool.policy.yielding import YIELD_AFTER
from gpu_pool_client import BadRequest, NotAllowed, Slice, Terms, WhenIdle, format_duration


@dataclass(frozen=True, slots=True)
class Quota:
    """How much at most. None: no limit."""

    #: Leases at once; those that wait or are parked count.
    slices: int | None = None
    #: Compute in all, in thousandths of a GPU.
    milli: int | None = None
    #: Device memory in all, in MiB.
    memory_mib: int | None = None
    #: Share times time, since Monday and since the term began, in hours of a whole GPU.
    gpu_hours_per_week: float | None = None
    gpu_hours_per_term: float | None = None

    @property
    def limits_hours(self) -> bool:
        """Whether it limits anything that adds up over time."""
        return self.gpu_hours_per_week is not None or self.gpu_hours_per_term is not None


#: The quota that limits nothing.
UNLIMITED: Final = Quota()


@dataclass(frozen=True, slots=True)
class Course:
    """What one course gets, and on what terms. Durations are in seconds."""

    name: str = ""
    #: Its part of the pool when others want it too, in proportion; 0: only what others leave.
    weight: float = 1.0
    #: A higher one comes before all lower ones.
    priority: int = 0
    #: Whether all that is asked for in its name is batch work.
    batch: bool = False
    #: Of all its users together.
    quota: Quota = UNLIMITED
    #: Of each of its users.
    per_user: Quota = UNLIMITED
    longest_lease: float | None = None
    idle_limit: float | None = None
    when_idle: WhenIdle = WhenIdle.KEEP
    warn_before: float = 300.0
    keep_at_most: float = 7_200.0
    #: After how long an idle kernel's slice goes to somebody who waits; None for never.
    yield_after: float | None = YIELD_AFTER
    #: After how long an idle kernel goes to disk, where its server can do that; None for never.
    hibernate_after: float | None = None

    def terms(self, ends_at: float | None) -> Terms:
        """Return the terms of a lease that ends at ``ends_at`` (Unix seconds), but for those of pods."""
        limits = self.idle_limit, self.when_idle, self.warn_before, self.keep_at_most
        return Terms(ends_at, *limits, yield_after=self.yield_after, hibernate_after=self.hibernate_after)


@dataclass(frozen=True, slots=True)
class Group:
    """Users who share a quota, and perhaps a priority."""

    name: str
    users: frozenset[str]
    priority: int = 0
    quota: Quota = UNLIMITED


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the pool is shared."""

    courses: Mapping[str, Course] = field(default_factory=dict)
    #: The terms of those who name no course, or of all where there are none.
    default: Course = field(default_factory=Course)
    groups: tuple[Group, ...] = ()
    #: Of each user, over all courses.
    per_user: Quota = UNLIMITED
    #: Seconds that a request waits before devices are emptied for it.
    drain_after: float = 1_800.0
    #: Courses that cannot be used now, and why, in words for those who are in them.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Whether a name that is no course's is refused even where there are no courses.
    only_known: bool = False
    #: Whether kernels run in pods that the pool starts, and whether those go on without their slices.
    in_pods: bool = False
    pods_park: bool = False

    def course(self, name: str | None) -> Course:
        """Return the course of that name. Raises ``NotAllowed`` where there are courses, but not this one."""
        if not name:
            return self.default
        if name in self.refused:
            raise NotAllowed(self.refused[name])
        if name in self.courses:
            return self.courses[name]
        if self.courses or self.only_known:
            known = ", ".join(sorted(self.courses))
            listed = f"Its courses are: {known}." if known else "It has no course that can be used."
            raise NotAllowed(f"This pool has no course {name[:64]!a}.", listed)
        return self.default

    def course_or_default(self, name: str | None) -> Course:
        """Return the course of that name; where there is none now, what holds for who names none."""
        return self.courses.get(name or "", self.default)

    def where_kernels_run(self, terms: Terms, slices: Iterable[Slice] = ()) -> Terms:
        """Return the terms of a course with what follows from whether its kernels run in pods.

        Those with ``slices`` of a named machine's devices run there, and not beside their server.
        """
        if not (self.in_pods or any(part.device.node for part in slices)):
            return terms
        parks = self.pods_park
        after = terms.yield_after if parks else None
        return replace(terms, in_pod=True, parks_in_pod=parks, yield_after=after, hibernate_after=None)

    def priority(self, user: str, course: str | None) -> int:
        """Return the highest priority that the user has by course or group."""
        highest = self.course_or_default(course).priority
        for group in self.groups:
            if group.priority > highest and is_named(user, group.users):
                highest = group.priority
        return highest

    @property
    def has_quotas(self) -> bool:
        """Whether anybody is limited by a quota."""
        courses = self.default, *self.courses.values()
        quotas = {quota for course in courses for quota in (course.quota, course.per_user)}
        return bool(self.groups) or {self.per_user, *quotas} != {UNLIMITED}

    @property
    def policy(self) -> Policy:
        """What the queue needs to know of this."""
        weights = {name: course.weight for name, course in self.courses.items()}
        return Policy(weights={"": self.default.weight, **weights}, drain_after=self.drain_after)


@dataclass(frozen=True, slots=True)
class CourseVersion:
    """What a course file said from some time on."""

    #: Who saved it; empty for what was found in the file, changed by somebody elsewhere.
    user: str
    text: str
    #: Unix seconds.
    saved_at: float
    #: Later versions have greater numbers; 0 for one that is in no store yet.
    number: int = 0


def read_course(name: str, settings: object) -> Course:
    """Read one course's settings. Raises ``BadRequest`` that names what is wrong and what is accepted."""
    where = f"course {name!r}" if name else "default_course"
    values = _read(settings, _COURSE, where)
    try:
        check_yield_after(values.get("yield_after"), values.get("idle_limit"))
    except BadRequest as error:
        raise BadRequest(f"yield_after of {where}: {error.message}", error.remedy) from None
    return Course(name, **values)


def check_yield_after(yield_after: float | None, idle_limit: float | None) -> None:
    """Refuse a time after which kernels give way that comes to nothing: they are parked before it anyhow.

    Parameters
    ----------
    yield_after, idle_limit
        As they were given, in seconds; None for never, and for what was not given.

    Raises
    ------
    BadRequest
        The first is longer than the second.
    """
    if yield_after is not None and idle_limit is not None and yield_after > idle_limit:
        limit = format_duration(idle_limit)
        raise BadRequest(
            f"{format_duration(yield_after)} is longer than idle_limit ({limit}): "
            "by then the slice has been lent to others anyhow.",
            f"Accepted: at most {limit}, or never. Or a longer idle_limit.",
        )


def read_group(name: str, settings: object) -> Group:
    """Read one group's settings. Raises as :func:`read_course`."""
    return Group(name, **{"users": frozenset(), **_read(settings, _GROUP, f"group {name!r}")})


def read_quota(settings: object, where: str) -> Quota:
    """Read a quota. Raises as :func:`read_course`."""
    return Quota(**_read(settings, _QUOTA, where))


_Reader = Callable[[object], Any]


def _read_users(value: object) -> frozenset[str]:
    users = value if isinstance(value, Collection) and not isinstance(value, str) else None
    if users is None or not all(isinstance(user, str) for user in users):
        raise BadRequest(f"is {value!a}.", "Accepted: a list of user names.")
    return frozenset(users)


#: What may be set → (the attribute, its reader; None for a quota).
_QUOTA: Final[Mapping[str, tuple[str, _Reader | None]]] = {
    "slices": ("slices", read_whole_number),
    "share": ("milli", read_share),
    "memory": ("memory_mib", read_memory),
    "gpu_hours_per_week": ("gpu_hours_per_week", read_number),
    "gpu_hours_per_term": ("gpu_hours_per_term", read_number),
}
_COURSE: Final[Mapping[str, tuple[str, _Reader | None]]] = {
    "weight": ("weight", read_number),
    "priority": ("priority", read_priority),
    "batch": ("batch", read_yes_or_no),
    "quota": ("quota", None),
    "per_user": ("per_user", None),
    "longest_lease": ("longest_lease", read_duration),
    "idle_limit": ("idle_limit", read_duration),
    "when_idle": ("when_idle", read_when_idle),
    "warn_before": ("warn_before", read_duration),
    "keep_at_most": ("keep_at_most", read_duration),
    "yield_after": ("yield_after", read_yield_after),
    "hibernate_after": ("hibernate_after", read_duration),
}
_GROUP: Final[Mapping[str, tuple[str, _Reader | None]]] = {
    "users": ("users", _read_users),
    "priority": ("priority", read_priority),
    "quota": ("quota", None),
}


def _read(settings: object, known: Mapping[str, tuple[str, _Reader | None]], where: str) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise BadRequest(f"{where} is {str(settings)[:40]!a}.", "Accepted: a mapping of settings.")
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise BadRequest(f"{where} has a setting {str(key)[:40]!a}.", f"Known: {', '.join(known)}.")
        attribute, read = known[key]
        there = f"{key} of {where}"
        try:
            values[attribute] = read_quota(value, there) if read is None else read(value)
        except BadRequest as error:
            if read is None:
                raise
            raise BadRequest(f"{there}: {error.message}", error.remedy) from None
    return values
