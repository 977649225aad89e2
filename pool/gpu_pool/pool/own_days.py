"""What a pool has recorded of its own days, and what other ways of giving slices would have done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gpu_pool.policy import admission
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Course, Sharing
from gpu_pool.simulation.history import read_recorded
from gpu_pool.simulation.recorded import RecordedDays
from gpu_pool.simulation.replay import PER_CELL, RESERVATION, Way, replay
from gpu_pool.simulation.report import replay_figures
from gpu_pool_client import Device, EndedLease

#: What is told of a lease, beside when it was busy. Nothing that a person wrote.
_KEYS: Final = ("requested_at", "held_at", "ended_at", "held_seconds", "request", "milli", "course", "user")
#: What is compared, whatever the courses say.
WAYS: Final = (
    RESERVATION,
    Way("idle limit 15 min", idle_limit=900.0),
    Way("yield after 1 min, when somebody waits", yield_after=60.0),
    PER_CELL,
)
AS_NOW: Final = "as your courses are now"


@dataclass(frozen=True, slots=True)
class WayFigures:
    """What one way would have been like."""

    name: str
    #: GPU-hours, in all and while cells ran.
    held: float
    used: float
    #: The part of the cells that would have begun at once, and what one in a hundred waits for at least,
    #: in seconds.
    at_once: float
    late: float
    #: How many slices were asked back; None where kernels are not asked.
    asked_back: int | None


class ReplayGivenUp(Exception):
    """A replay took longer than it may."""


def recorded_leases(
    ended: Iterable[EndedLease], busy: Mapping[str, Sequence[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """Return leases that were held, with when they were busy, as ``simulate --format history`` reads them.

    ``busy`` is None of a lease of which no server has said when its kernel worked. Sums of old leases
    are left out: they do not say when each was held.
    """
    rows = []
    for each in ended:
        if each.id and each.held_at is not None:
            spans = busy.get(each.id)
            told = None if spans is None else _within(spans, each.held_at, each.ended_at)
            rows.append({**{key: getattr(each, key) for key in _KEYS}, "busy": told})
    return rows


def _within(spans: Iterable[Sequence[float]], begin: float, end: float) -> list[list[float]]:
    """Return the spans as far as they are between two times, one after the other."""
    found = []
    for at, seconds in spans:
        first, last = max(at, begin), min(at + seconds, end)
        if last > first:
            found.append([round(first, 3), round(last - first, 3)])
            begin = last
    return found


def own_days(rows: Iterable[Mapping[str, Any]]) -> RecordedDays:
    """Return what has been recorded. Raises ``BadRequest`` where no lease was held."""
    return read_recorded(json.dumps(row) for row in rows)


def with_more(own: Sequence[Device], added: Iterable[Device]) -> tuple[Device, ...]:
    """Return a pool's devices and others, which may be of the same kind as one that it has."""
    first = 1 + max((device.index for device in own), default=-1)
    more = (
        replace(device, uuid=f"{device.uuid}-more-{place}", index=first + place, nvlink=())
        for place, device in enumerate(added)
    )
    return (*own, *more)


def as_now(sharing: Sharing) -> Way | None:
    """Return what the courses say, each for its kernels; None where that is one of :data:`WAYS` for all."""
    courses = {name: _way(course, sharing) for name, course in sharing.courses.items()}
    now = replace(_way(sharing.default, sharing), of_course=courses)
    said = {(each.idle_limit, each.yield_after) for each in (now, *courses.values())}
    if len(said) == 1 and said <= {(each.idle_limit, each.yield_after) for each in WAYS}:
        return None
    return now


def _way(course: Course, sharing: Sharing) -> Way:
    terms = sharing.where_kernels_run(course.terms(None))
    return Way(AS_NOW, terms.idle_limit if terms.acts_when_idle else None, terms.yield_after)


def compare(
    days: RecordedDays, devices: Sequence[Device], goes_on: Callable[[], bool], sharing: Sharing
) -> tuple[WayFigures, ...]:
    """Return what each way, and what the courses say now, would have been like on these devices.

    Raises ``ReplayGivenUp`` once ``goes_on`` says that it must not go on, and ``NeverFits`` where
    a lease would not fit.
    """
    for request in {session.request for session in days.sessions}:
        admission.check(request, devices, Rules())

    def check(_part: float) -> None:
        if not goes_on():
            raise ReplayGivenUp

    now = as_now(sharing)
    ways = WAYS if now is None else (*WAYS[:-1], now, WAYS[-1])
    return tuple(_figures(days, devices, way, check) for way in ways)


def _figures(
    days: RecordedDays, devices: Sequence[Device], way: Way, tell: Callable[[float], None]
) -> WayFigures:
    found = replay_figures(days.sessions, replay(days.sessions, devices, way, tell=tell))
    hours, cells = found.gpu_hours, found.cells
    asked = found.asked_back if way.asks_back else None
    return WayFigures(way.name, hours.held, hours.used, cells.at_once, cells.delay.p99, asked)
