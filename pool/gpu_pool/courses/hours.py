"""When a course is open: weeks of the year and hours of the week, on the clock of one place.

Pure. An hour that the clock skips when summer time begins counts as the hour
after it; one that it shows twice when summer time ends is open both times. So
hours that follow each other never leave a hole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Final, TypeVar

from gpu_pool.policy.course_values import given
from gpu_pool_client import BadRequest

ACCEPTED: Final = (
    "Accepted: Mon 10:00-12:00; Mon,Wed 14:00-15:30; Mon-Fri 08:00-18:00; "
    "Sat 00:00-24:00; Fri 22:00-02:00 (into the next day)."
)
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

T = TypeVar("T", int, date, datetime)

_DAY: Final = timedelta(days=1)
_DAY_MINUTES: Final = 1_440
_FULL: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORM: Final = re.compile(
    r"(?P<days>[a-z]{3,9}(?: ?[-–,] ?[a-z]{3,9}){0,6}) +"  # noqa: RUF001 - as word processors write it
    r"(?P<start>[0-9]{1,2}:[0-9]{2}) ?[-–] ?(?P<end>[0-9]{1,2}:[0-9]{2})",  # noqa: RUF001 - the same
    re.IGNORECASE,
)
#: Whole days in which the next opening, and the end of one, are looked for: a week, and the days around it.
_LOOK_AHEAD: Final = 9


@dataclass(frozen=True, slots=True)
class WeeklyHours:
    """The same hours on some days of every week."""

    #: In order; 0 is Monday.
    days: tuple[int, ...]
    #: Minutes since midnight; the end may lie in the next day.
    start: int
    end: int

    def __str__(self) -> str:
        end = self.end if self.end <= _DAY_MINUTES else self.end - _DAY_MINUTES
        return f"{self._days()} {_clock(self.start)}-{_clock(end)}"

    def _days(self) -> str:
        first, last = self.days[0], self.days[-1]
        if len(self.days) > 2 and last - first == len(self.days) - 1:
            return f"{DAYS[first]}-{DAYS[last]}"
        return ",".join(DAYS[day] for day in self.days)


_ALL_DAY: Final = WeeklyHours(tuple(range(7)), 0, _DAY_MINUTES)


def parse_hours(text: str) -> WeeklyHours:
    """Read weekly hours such as ``Mon 10:00-12:00``. Raises ``BadRequest``, naming the accepted forms."""
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise _refusal(text)
    start, end = _minutes(form["start"], text), _minutes(form["end"], text)
    if start in (end, _DAY_MINUTES):
        raise _refusal(
            text,
            "it ends when it begins" if start == end else "a day ends at 24:00, so nothing can begin then",
        )
    days = tuple(sorted(set(_days(form["days"], text))))
    return WeeklyHours(days, start, end if end > start else end + _DAY_MINUTES)


def _days(text: str, whole: str) -> Iterator[int]:
    for part in text.replace("–", "-").split(","):  # noqa: RUF001 - as word processors write it
        ends = [_day(name.strip(), whole) for name in part.split("-")]
        if len(ends) > 2:
            raise _refusal(whole)
        first, last = ends[0], ends[-1]
        yield from (day % 7 for day in range(first, last + 1 + (7 if last < first else 0)))


def _day(name: str, whole: str) -> int:
    for day, full in enumerate(_FULL):
        if name.lower() in (full, full[:3]):
            return day
    raise _refusal(whole, f"{given(name)} is not a day; the days are {', '.join(DAYS)}")


def _minutes(text: str, whole: str) -> int:
    hour, minute = map(int, text.split(":"))
    if minute > 59 or 60 * hour + minute > _DAY_MINUTES:
        raise _refusal(whole, f"{text} is not a time of day")
    return 60 * hour + minute


def _refusal(text: str, why: str = "") -> BadRequest:
    return BadRequest(f"{given(text)} is not a valid time of the week{': ' + why if why else ''}.", ACCEPTED)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _joined(spans: Iterable[tuple[T, T]]) -> tuple[tuple[T, T], ...]:
    """Return spans in order, those that overlap or adjoin as one, and those that are empty left out."""
    found: list[tuple[T, T]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Timetable:
    """When something is open. Without weeks in all of them, without hours all day. Times are aware.

    A question costs as much as there are hours and weeks, and no more: hours that adjoin are one.
    """

    zone: tzinfo
    #: First and last days, both included, in order.
    weeks: tuple[tuple[date, date], ...] = ()
    hours: tuple[WeeklyHours, ...] = ()
    #: The hours of each day of the week, from Monday, in minutes since its midnight; each once, in order.
    _of_day: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    #: The same, joined.
    _joined_of_day: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    #: The weeks, joined: first days, and the last ones that belong to them.
    _firsts: tuple[date, ...] = field(init=False, repr=False, compare=False)
    _lasts: tuple[date, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort and join what is looked at for every question."""
        hours = self.hours or (_ALL_DAY,)
        of_day = [sorted({(each.start, each.end) for each in hours if day in each.days}) for day in range(7)]
        weeks = _joined((first, last + _DAY) for first, last in self.weeks)
        object.__setattr__(self, "_of_day", tuple(map(tuple, of_day)))
        object.__setattr__(self, "_joined_of_day", tuple(map(_joined, of_day)))
        object.__setattr__(self, "_firsts", tuple(first for first, _ in weeks))
        object.__setattr__(self, "_lasts", tuple(after - _DAY for _, after in weeks))

    @property
    def is_always_open(self) -> bool:
        """Whether there is no time at which it is closed."""
        return not self.weeks and not self.hours

    def open_until(self, at: datetime) -> datetime | None:
        """Return when it closes next; None if it is closed, or does not close in the next days."""
        if self.is_always_open:
            return None
        until, horizon = at, at + timedelta(days=_LOOK_AHEAD)
        # Joined, the hours of one day have holes between them: each step leads to another day.
        while until < horizon:
            ends = [end for start, end in self._around(until) if start <= until < end]
            if not ends:
                break
            until = max(ends)
        return until.astimezone(self.zone) if at < until < horizon else None

    def is_open(self, at: datetime) -> bool:
        """Whether it is open at that time."""
        return self.is_always_open or any(start <= at < end for start, end in self._around(at))

    def opens_next(self, at: datetime) -> datetime | None:
        """Return the first time after this at which it opens, or None if it never does again."""
        today = at.astimezone(self.zone).date()
        firsts = [today - _DAY, *(first for first in self._firsts if first > today)]
        for first in firsts:
            days = (first + timedelta(days=n) for n in range(_LOOK_AHEAD))
            starts = [start for day in days for start in self._starts(day) if start > at]
            if starts:
                return min(starts).astimezone(self.zone)
        return None

    def _around(self, at: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yield the openings of the day of ``at`` and of the days beside it, which may reach into it."""
        today = at.astimezone(self.zone).date()
        for days in (-1, 0, 1):
            yield from self._spans(today + timedelta(days=days))

    def _spans(self, day: date) -> Iterable[tuple[datetime, datetime]]:
        """Return when it is open on a day, in UTC, joined."""
        if not self._runs_on(day):
            return ()
        weekday, midnight = day.weekday(), self._calm_midnight(day)
        if midnight is None:
            return _joined(self._changed_spans(day))
        return [
            (midnight + timedelta(minutes=start), midnight + timedelta(minutes=end))
            for start, end in self._joined_of_day[weekday]
        ]

    def _starts(self, day: date) -> Iterable[datetime]:
        """Return when each of a day's hours begins, in UTC."""
        hours = self._of_day[day.weekday()]
        if not hours or not self._runs_on(day):
            return ()
        midnight = self._calm_midnight(day)
        if midnight is None:
            return [start for start, _ in self._changed_spans(day)]
        return [midnight + timedelta(minutes=start) for start, _ in hours]

    def _changed_spans(self, day: date) -> Iterator[tuple[datetime, datetime]]:
        """Yield when it is open on a day whose clock is put forward or back, in UTC, not joined.

        Of hours that would be over as they begin, since the clock leaves them out, the time after is theirs.
        """
        for start, end in self._of_day[day.weekday()]:
            begins, ends = self._moments(day, start)[0], max(self._moments(day, end))
            yield begins, ends if begins < ends else begins + timedelta(minutes=end - start)

    def _runs_on(self, day: date) -> bool:
        """Whether a day is in the weeks."""
        if not self._firsts:
            return True
        number = bisect_right(self._firsts, day)
        return number > 0 and day <= self._lasts[number - 1]

    def _calm_midnight(self, day: date) -> datetime | None:
        """Return when a day begins, in UTC; None if its clock is changed on this day or the next.

        No clock is changed twice within two days.
        """
        begins, ends = self._moments(day, 0)[0], self._moments(day, 2 * _DAY_MINUTES)[0]
        return begins if ends - begins == 2 * _DAY else None

    def _moments(self, day: date, minutes: int) -> tuple[datetime, datetime]:
        """Return when the clock shows this, the first time and, where there are two, the second."""
        days, rest = divmod(minutes, _DAY_MINUTES)
        local = datetime.combine(day + timedelta(days=days), time(rest // 60, rest % 60), self.zone)
        # Compared in UTC: times of one zone are compared as clocks show them.
        return local.astimezone(timezone.utc), local.replace(fold=1).astimezone(timezone.utc)
