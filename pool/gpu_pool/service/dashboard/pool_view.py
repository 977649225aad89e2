"""The pool as a viewer may see it: GPUs as bars, the queue, leases and quotas. Pure.

What a viewer may not see is taken out here (:func:`as_seen_by`, :func:`without_names`), before any template.
Every course has a colour and a pattern, so that no two look alike to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Final, NamedTuple

from gpu_pool.names import is_named
from gpu_pool.policy.sharing import Quota, Sharing
from gpu_pool_client import (
    WHOLE,
    DeviceStatus,
    Failure,
    Holder,
    Lease,
    LeaseState,
    Outlook,
    Place,
    PoolStatus,
    Slice,
    format_share,
    parse_request,
)
from gpu_pool_client._leases import memory_on_top

#: The colours and patterns that the style sheet and the page's definitions know.
HUES: Final = 8
PATTERNS: Final = 4
#: What the leases of no course are called.
NO_COURSE: Final = "no course"


class Mark(NamedTuple):
    """How a course is drawn."""

    hue: int
    pattern: int


def course_label(name: str | None) -> str:
    """Return a course's name for people."""
    return name or NO_COURSE


def marks(configured: Iterable[str], found: Iterable[str | None]) -> Mapping[str, Mark]:
    """Give every course its mark, by its place among all: neighbours differ in colour and in pattern.

    Those that are only found somewhere come last, so the configured ones always look the same.
    """
    first = sorted(configured)
    more = sorted({course_label(name) for name in found} - {*first})
    return {
        label: Mark(place % HUES, (place + place // HUES) % PATTERNS)
        for place, label in enumerate((*first, *more))
    }


_STATES: Final = {
    LeaseState.HELD: "held",
    LeaseState.PARKED: "parked: lent to others while its kernel is idle",
    LeaseState.ENDED: "ended",
}


#: The Unix seconds of the years 1 and 9999.
_FIRST: Final = datetime(1, 1, 1, tzinfo=timezone.utc).timestamp()
_LAST: Final = datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp()


class PageTime(NamedTuple):
    """A time: for programs, and for people before a script writes it by their own clock."""

    iso: str
    text: str


def moment(at: float) -> PageTime:
    """Write Unix seconds; those beyond the years that calendars have as the nearest that they have."""
    utc = datetime.fromtimestamp(min(max(at, _FIRST), _LAST), timezone.utc)
    return PageTime(f"{utc:%Y-%m-%dT%H:%M:%SZ}", f"{utc:%Y-%m-%d %H:%M} UTC")


def state_text(lease: Lease) -> str:
    """Say where a lease is in its life."""
    if lease.state is LeaseState.WAITING:
        return "next in the queue" if lease.position == 1 else f"position {lease.position} in the queue"
    return "in the cluster's queue" if lease.is_queued else _STATES[lease.state]


def where_text(lease: Lease) -> str:
    """Name the GPUs that a lease has, and whether they are simulated; empty if it has none."""
    indexes = sorted(part.device.index for part in lease.slices)
    if not indexes:
        return ""
    gpus = ("GPU " if len(indexes) == 1 else "GPUs ") + ", ".join(map(str, indexes))
    return f"{gpus} (simulated)" if lease.simulated else gpus


def size_text(lease: Lease) -> str:
    """Say how much a lease asks for, or has."""
    if not lease.slices:
        return lease.request.named
    each = " on each" if len(lease.slices) > 1 else ""
    return f"{lease.slices[0].share}, {memory(lease.memory_mib)}{each}{memory_on_top(lease.slices, memory)}"


def request_text(request: str) -> str:
    """Say a request as it is recorded: of whole GPUs, which a bare number asks for, ``a whole GPU``."""
    return parse_request(request).named if request.split(" ")[0].isdigit() else request


def memory(mib: int) -> str:
    """Write device memory to three digits: ``640 MiB``, ``6.4 GiB``, ``32 GiB``."""
    return f"{mib} MiB" if mib < 1000 else f"{mib / 1024:.3g} GiB"


def gpus(milli: float) -> str:
    """Write thousandths of GPUs: ``35%``, ``1 GPU``, ``2.5 GPUs``."""
    if milli < WHOLE:
        return format_share(round(milli))
    return f"{milli / WHOLE:.3g} GPU" + ("" if milli == WHOLE else "s")


def count(number: int, one: str, many: str = "") -> str:
    """Write a number of things: ``1 slice``, ``3 slices``."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A quota, and whose it is."""

    whose: str
    allowed: str
    #: What of it is held and waited for now.
    now: str


def quota_rows(sharing: Sharing, status: PoolStatus) -> tuple[QuotaRow, ...]:
    """Return every quota that limits anything, with what is held and waited for of it now."""
    return tuple(_rows(sharing, [*status.leases, *status.queue]))


def _rows(sharing: Sharing, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    yield from _of_each("each user, over all courses", sharing.per_user, leases)
    courses = [*sorted(sharing.courses.items()), ("", sharing.default)]
    for name, course in courses:
        whose = name or "those without a course"
        of_course = [lease for lease in leases if (lease.holder.course or "") == name]
        yield from _together(f"{whose}, together", course.quota, of_course)
        yield from _of_each(f"{whose}, each user", course.per_user, of_course)
    for group in sharing.groups:
        of_group = [lease for lease in leases if is_named(lease.holder.user, group.users)]
        yield from _together(f"group {group.name} ({count(len(group.users), 'user')})", group.quota, of_group)


def _together(whose: str, quota: Quota, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    if allowed := "; ".join(_allowed(quota)):
        yield QuotaRow(whose, allowed, _amount(leases))


def _of_each(whose: str, quota: Quota, leases: Sequence[Lease]) -> Iterable[QuotaRow]:
    """Say of a quota of each user's who has most."""
    if not (allowed := "; ".join(_allowed(quota))):
        return
    by_user: dict[str, list[Lease]] = {}
    for lease in leases:
        by_user.setdefault(lease.holder.user, []).append(lease)
    most = max(by_user, key=lambda user: (_milli(by_user[user]), len(by_user[user])), default=None)
    now = "nobody has any" if most is None else f"most: {most}, {_amount(by_user[most])}"
    yield QuotaRow(whose, allowed, now)


def _amount(leases: Sequence[Lease]) -> str:
    """Say how much is held, with how many slices, those included that are waited for."""
    mib = sum(part.memory_mib for lease in leases for part in lease.slices)
    return f"{count(len(leases), 'slice')}, {gpus(_milli(leases))}, {memory(mib)}"


def _milli(leases: Sequence[Lease]) -> int:
    return sum(part.milli for lease in leases for part in lease.slices)


def _allowed(quota: Quota) -> Iterable[str]:
    if quota.slices is not None:
        yield count(quota.slices, "slice")
    if quota.milli is not None:
        yield gpus(quota.milli)
    if quota.memory_mib is not None:
        yield memory(quota.memory_mib)
    if quota.gpu_hours_per_week is not None:
        yield f"{quota.gpu_hours_per_week:g} GPU-hours a week"
    if quota.gpu_hours_per_term is not None:
        yield f"{quota.gpu_hours_per_term:g} GPU-hours a term"


#: Percent of a bar from which on a text fits into its part.
_ROOM_FOR_TEXT: Final = 9.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one course holds of one device. Places and widths are in percent of the bar."""

    course: str
    mark: Mark
    x: float
    width: float
    memory_x: float
    memory_width: float
    #: For people: ``20%``, ``6.4GiB``, ``10 slices``.
    share: str
    memory: str
    slices: str

    @property
    def has_room(self) -> bool:
        """Whether its name may stand in the bar. It stands beside it in any case."""
        return self.width >= _ROOM_FOR_TEXT


@dataclass(frozen=True, slots=True)
class DeviceBar:
    """One device."""

    index: int
    uuid: str
    model: str
    is_simulated: bool
    is_drained: bool
    #: Why nothing new can run on it, whoever wants it drained; empty where nothing is wrong.
    fault: str
    parts: tuple[Part, ...]
    #: When an administrator drained it; None where it is not drained, or by something else.
    drained_since: PageTime | None
    #: What nobody holds: free, unless it is drained.
    free_share: str
    free_memory: str
    #: ``of 31GiB``: everything there is.
    memory: str


def device_bars(status: PoolStatus, marks: Mapping[str, Mark]) -> tuple[DeviceBar, ...]:
    """Return all devices, each with what every course holds of it, in the courses' order."""
    held: dict[str, dict[str, list[Slice]]] = {}
    for lease in status.leases:
        for part in lease.slices:
            of_device = held.setdefault(part.device.uuid, {})
            of_device.setdefault(course_label(lease.holder.course), []).append(part)
    return tuple(_bar(device, held.get(device.device.uuid, {}), marks) for device in status.devices)


def _bar(status: DeviceStatus, held: Mapping[str, Sequence[Slice]], marks: Mapping[str, Mark]) -> DeviceBar:
    device = status.device
    return DeviceBar(
        index=device.index,
        uuid=device.uuid,
        model=f"{device.model} MIG {device.mig_profile}" if device.mig_profile else device.model,
        is_simulated=device.simulated,
        is_drained=status.drained,
        fault=device.fault,
        parts=tuple(_parts(status, held, marks)),
        drained_since=None if status.drained_at is None else moment(status.drained_at),
        free_share=format_share(status.unheld_milli),
        free_memory=memory(status.unheld_memory_mib),
        memory=memory(device.memory_mib),
    )


def _parts(
    status: DeviceStatus, held: Mapping[str, Sequence[Slice]], marks: Mapping[str, Mark]
) -> Iterable[Part]:
    x = memory_x = 0.0
    for course in sorted(held):
        milli = sum(part.milli for part in held[course])
        memory_mib = sum(part.memory_mib for part in held[course])
        width = _percent(milli, max(status.milli, status.held_milli))
        memory_width = _percent(memory_mib, status.device.memory_mib)
        yield Part(
            course=course,
            mark=marks[course],
            x=x,
            width=width,
            memory_x=memory_x,
            memory_width=memory_width,
            share=format_share(milli),
            memory=memory(memory_mib),
            slices=count(len(held[course]), "slice"),
        )
        x, memory_x = x + width, memory_x + memory_width


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many wait for one course."""

    course: str
    mark: Mark
    number: int


def queue_by_course(status: PoolStatus, marks: Mapping[str, Mark]) -> tuple[Waiting, ...]:
    """Return how many wait, by course."""
    courses = [course_label(lease.holder.course) for lease in status.queue]
    return tuple(Waiting(course, marks[course], courses.count(course)) for course in sorted(set(courses)))


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease that lives, for whoever may see it."""

    id: str
    user: str
    course: str
    mark: Mark
    #: What it is for; empty where nobody said.
    purpose: str
    size: str
    where: str
    state: str
    is_waiting: bool
    #: Since when it is held; otherwise when it was asked for.
    since: PageTime
    ends: PageTime | None
    limits: str
    notice: str
    #: How its kernel has failed, in its pod, the last time that one did.
    failure: Failure | None
    #: How long it may wait still, and why; empty unless it waits and that was asked.
    outlook: str


def lease_rows(
    status: PoolStatus,
    marks: Mapping[str, Mark],
    is_wanted: Callable[[Lease], bool],
    outlooks: Mapping[str, Outlook] | None = None,
) -> tuple[LeaseRow, ...]:
    """Return the wanted leases: those held and parked, oldest first, then the queue in its order."""
    known = outlooks or {}
    every = (*status.leases, *status.queue)
    return tuple(_row(lease, marks, known.get(lease.id)) for lease in every if is_wanted(lease))


def _row(lease: Lease, marks: Mapping[str, Mark], outlook: Outlook | None) -> LeaseRow:
    course = course_label(lease.holder.course)
    is_held = lease.state is LeaseState.HELD
    return LeaseRow(
        id=lease.id,
        user=lease.holder.user,
        course=course,
        mark=marks[course],
        purpose=", ".join(filter(None, (lease.holder.kernel, "batch" if lease.holder.batch else ""))),
        size=size_text(lease),
        where=where_text(lease),
        state=state_text(lease),
        is_waiting=lease.state is LeaseState.WAITING,
        since=moment(lease.held_at if is_held and lease.held_at else lease.requested_at),
        ends=moment(lease.terms.ends_at) if lease.terms.ends_at else None,
        limits=_limits(lease) if is_held else "",
        notice=lease.message,
        failure=lease.failure,
        outlook=" ".join(filter(None, (f"{outlook.expected}." if outlook.expected else "", outlook.reason)))
        if outlook
        else "",
    )


def _limits(lease: Lease) -> str:
    """Say what is enforced of a slice, with amounts as all of the page has them."""
    share = format_share(lease.slices[0].milli) if lease.slices else "nothing"
    enforced = lease.enforcement
    return f"memory: {memory(lease.memory_mib)}, {enforced.memory}; compute: {share}, {enforced.compute}"


def describe_changes(before: PoolStatus, now: PoolStatus, viewer: Viewer, ends: Mapping[str, str]) -> str:
    """Say what has become of the viewer's own leases, for those who do not see the page change.

    ``ends`` says why leases ended, by id, where that is worth saying.
    """
    old, new = _own(before, viewer), _own(now, viewer)
    said = [
        f"Your slice of {lease.request.named} has ended{f': {ends[each]}' if each in ends else ''}."
        for each, lease in old.items()
        if each not in new
    ]
    for lease_id, lease in new.items():
        known = old.get(lease_id)
        if known is None or (known.state, known.position) != (lease.state, lease.position):
            where = where_text(lease)
            said.append(
                f"Your slice of {lease.request.named}: {state_text(lease)}{f' on {where}' if where else ''}."
            )
        elif lease.notice and lease.notice != known.notice:
            said.append(lease.notice)
    return " ".join(said)


def _own(status: PoolStatus, viewer: Viewer) -> dict[str, Lease]:
    return {lease.id: lease for lease in (*status.leases, *status.queue) if viewer.owns(lease)}


#: Stands where a user is not to be seen. No user is called so.
NOBODY = ""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person before the dashboard."""

    user: str
    is_admin: bool = False
    groups: frozenset[str] = frozenset()

    def owns(self, lease: Lease) -> bool:
        """Whether a lease is theirs."""
        return lease.holder.user == self.user


def without_names(status: PoolStatus) -> PoolStatus:
    """Return the pool as everybody may see it: which course holds how much, and nothing of any person."""
    return _shown(status, lambda _: False)


def as_seen_by(status: PoolStatus, viewer: Viewer, teaches: Iterable[str] = ()) -> PoolStatus:
    """Return the pool as a viewer may see it: all of their own leases, and of courses they teach."""
    courses = frozenset(teaches)

    def is_open(lease: Lease) -> bool:
        return viewer.is_admin or viewer.owns(lease) or lease.holder.course in courses

    return _shown(status, is_open)


def _shown(status: PoolStatus, is_open: Callable[[Lease], bool]) -> PoolStatus:
    def shown(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        return tuple(lease if is_open(lease) else _anonymous(lease) for lease in leases)

    return replace(status, leases=shown(status.leases), queue=shown(status.queue))


def _anonymous(lease: Lease) -> Lease:
    """Return what may be known of anybody's lease: its course, its size, and where it is."""
    holder = Holder(NOBODY, lease.holder.course)
    place = Place() if lease.place else None
    return replace(
        lease, id="", key="", holder=holder, process=None, variables={}, notice="", failure=None, place=place
    )
