"""When a course is open: on the clock of its place, also on the days when that clock is changed."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from gpu_pool.courses.hours import Timetable, WeeklyHours, parse_hours
from support.examples import examples

BERLIN = ZoneInfo("Europe/Berlin")
TERM = ((date(2026, 10, 12), date(2026, 12, 18)),)
#: Changes by an hour and by half of one, at night and at midnight, on both halves of the Earth, and none.
ZONES = (
    "Europe/Berlin Australia/Lord_Howe Africa/Cairo America/Santiago America/New_York Asia/Kathmandu UTC"
).split()

zones = some.sampled_from(ZONES).map(ZoneInfo)
moments = some.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=some.just(timezone.utc))
hours = some.builds(
    lambda days, start, length: WeeklyHours(tuple(sorted(days)), start, start + length),
    some.sets(some.integers(0, 6), min_size=1),
    some.integers(0, 1439),
    some.integers(1, 1440),
)


def timetables(weeks: some.SearchStrategy[tuple[tuple[date, date], ...]]) -> some.SearchStrategy[Timetable]:
    return some.builds(Timetable, zones, weeks, some.lists(hours, min_size=1, max_size=3).map(tuple))


weekly = timetables(some.just(()))


@pytest.mark.parametrize(
    ("text", "days", "start", "end"),
    [
        ("Mon 10:00-12:00", (0,), 600, 720),
        ("mon 9:05-9:06", (0,), 545, 546),
        ("Monday,wednesday 10:00-12:00", (0, 2), 600, 720),
        ("Fri-Mon 10:00–12:00", (0, 4, 5, 6), 600, 720),  # noqa: RUF001 - as word processors write it
        ("Mon - Fri 08:00 - 18:00", (0, 1, 2, 3, 4), 480, 1080),
        ("Sat 00:00-24:00", (5,), 0, 1440),
        ("Sun 22:00-02:00", (6,), 1320, 1560),
    ],
)
def test_hours_as_people_write_them(text: str, days: tuple[int, ...], start: int, end: int) -> None:
    assert parse_hours(text) == WeeklyHours(days, start, end)


@given(hours.filter(lambda each: each.end <= 1440 or each.end - each.start < 1440))
def test_hours_are_written_as_they_are_read(each: WeeklyHours) -> None:
    assert parse_hours(str(each)) == each


def test_days_that_follow_each_other_are_written_short() -> None:
    assert str(WeeklyHours((0, 1, 2, 3, 4), 480, 1080)) == "Mon-Fri 08:00-18:00"
    assert str(WeeklyHours((0, 1, 3), 1320, 1560)) == "Mon,Tue,Thu 22:00-02:00"
    assert str(WeeklyHours((0, 1), 480, 1080)) == "Mon,Tue 08:00-18:00"


def local(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


@pytest.mark.parametrize(
    ("at", "is_open"),
    [
        ("2026-10-12 09:59:59", False),
        ("2026-10-12 10:00", True),
        ("2026-10-12 11:59:59", True),
        ("2026-10-12 12:00", False),
        ("2026-10-13 11:00", False),
        ("2026-10-05 11:00", False),
        ("2026-12-21 11:00", False),
    ],
)
def test_open_in_its_weeks_at_its_hours(at: str, is_open: bool) -> None:
    timetable = Timetable(BERLIN, TERM, (parse_hours("Mon 10:00-12:00"),))
    assert timetable.is_open(local(at)) == is_open
    assert timetable.is_open(local(at).astimezone(timezone.utc)) == is_open


def test_weeks_without_hours_are_whole_days_both_ends_included() -> None:
    timetable = Timetable(BERLIN, TERM)
    assert timetable.opens_next(local("2026-01-01")) == local("2026-10-12")
    assert timetable.is_open(local("2026-12-18 23:59"))
    assert not timetable.is_open(local("2026-12-19 00:00"))
    assert timetable.opens_next(local("2026-12-19 00:00")) is None
    assert timetable.open_until(local("2026-12-17 12:00")) == local("2026-12-19")
    assert timetable.open_until(local("2026-11-01")) is None  # not in the next days


def test_the_last_night_goes_on_into_the_day_after_the_term() -> None:
    timetable = Timetable(BERLIN, TERM, (parse_hours("Fri 22:00-02:00"),))
    assert timetable.is_open(local("2026-12-19 01:59"))
    assert timetable.open_until(local("2026-12-18 23:00")) == local("2026-12-19 02:00")


def test_between_two_terms_the_second_is_next() -> None:
    weeks = (*TERM, (date(2027, 1, 4), date(2027, 2, 12)))
    timetable = Timetable(BERLIN, weeks, (parse_hours("Wed 10:00-12:00"),))
    assert timetable.opens_next(local("2026-12-16 12:00")) == local("2027-01-06 10:00")


def test_always_open_never_closes() -> None:
    timetable = Timetable(BERLIN)
    assert timetable.is_open(local("2026-01-01"))
    assert timetable.open_until(local("2026-01-01")) is None


def test_in_spring_a_skipped_hour_is_the_one_after_it() -> None:
    timetable = Timetable(BERLIN, (), (parse_hours("Sun 02:30-03:30"),))
    opens = timetable.opens_next(local("2026-03-28 12:00"))
    assert opens == local("2026-03-29 03:30")
    assert timetable.is_open(opens)
    assert Timetable(BERLIN, (), (parse_hours("Sun 02:15-02:45"),)).is_open(local("2026-03-29 03:30"))
    whole = Timetable(BERLIN, (), (parse_hours("Sun 02:00-03:00"),))
    assert whole.opens_next(local("2026-03-28 12:00")) == local("2026-03-29 03:00")
    assert whole.open_until(local("2026-03-29 03:00")) == local("2026-03-29 04:00")


def test_in_autumn_an_hour_that_comes_twice_is_open_twice() -> None:
    timetable = Timetable(BERLIN, (), (parse_hours("Sun 02:00-02:30"),))
    first, second = (local("2026-10-25 02:15", fold=fold) for fold in (0, 1))
    assert timetable.is_open(first)
    assert timetable.is_open(second)
    assert not timetable.is_open(local("2026-10-25 02:31", fold=1))


def test_a_day_that_begins_at_one_is_open_from_its_beginning() -> None:
    cairo = ZoneInfo("Africa/Cairo")
    timetable = Timetable(cairo, (), (parse_hours("Fri 00:00-24:00"),))
    opens = timetable.opens_next(local("2026-04-23 12:00", cairo))
    assert opens == local("2026-04-24 01:00", cairo)


def is_calm(zone: ZoneInfo, at: datetime) -> bool:
    """Whether the clock is not changed for two days around."""
    offsets = {(at + timedelta(hours=hours)).astimezone(zone).utcoffset() for hours in range(-50, 51)}
    return len(offsets) == 1


@given(weekly, moments)
def test_on_calm_days_it_is_what_the_clock_on_the_wall_says(timetable: Timetable, at: datetime) -> None:
    assert isinstance(timetable.zone, ZoneInfo)
    assume(is_calm(timetable.zone, at))
    wall = at.astimezone(timetable.zone).replace(tzinfo=None)
    minute = 60 * wall.hour + wall.minute
    expected = any(
        (wall.weekday() in each.days and each.start <= minute < each.end)
        or ((wall.weekday() - 1) % 7 in each.days and each.start <= minute + 1440 < each.end)
        for each in timetable.hours
    )
    assert timetable.is_open(at) == expected


def changes() -> list[datetime]:
    """Return when the clock is changed in these zones, in some year, to the hour."""
    return [
        instant
        for zone in map(ZoneInfo, ZONES)
        for hour in range(24 * 365)
        if (instant := datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=hour))
        .astimezone(zone)
        .utcoffset()
        != (instant + timedelta(hours=1)).astimezone(zone).utcoffset()
    ]


near_changes = some.deferred(lambda: some.sampled_from(changes())).flatmap(
    lambda change: some.integers(-4000, 4000).map(lambda minutes: change + timedelta(minutes=minutes))
)


@given(weekly, moments | near_changes)
def test_it_opens_when_it_says_and_not_before(timetable: Timetable, at: datetime) -> None:
    opens = timetable.opens_next(at)
    assert opens is not None
    assert at < opens <= at + timedelta(days=9)
    assert timetable.is_open(opens)
    if not timetable.is_open(at):
        step = (opens - at) / 50
        assert not any(timetable.is_open(at + n * step) for n in range(50))


@given(weekly, moments | near_changes)
def test_it_closes_when_it_says_and_not_before(timetable: Timetable, at: datetime) -> None:
    until = timetable.open_until(at)
    if until is None:
        assert not timetable.is_open(at) or all(
            timetable.is_open(at + timedelta(hours=hours)) for hours in range(24 * 8)
        )
    else:
        step = (until - at) / 50
        assert all(timetable.is_open(at + n * step) for n in range(50))
        assert not timetable.is_open(until)


@given(zones, some.integers(1, 1439), moments | near_changes)
def test_hours_that_follow_each_other_leave_no_hole(zone: ZoneInfo, minute: int, at: datetime) -> None:
    every = tuple(range(7))
    timetable = Timetable(zone, (), (WeeklyHours(every, 0, minute), WeeklyHours(every, minute, 1440)))
    assert timetable.is_open(at)


def moments_of(zone: ZoneInfo, day: date, minutes: int) -> tuple[datetime, datetime]:
    """Return the two moments at which the clock shows so many minutes since a day's midnight."""
    wall = datetime.combine(day, time(), zone) + timedelta(minutes=minutes)
    first, second = (wall.replace(fold=fold).astimezone(timezone.utc) for fold in (0, 1))
    return first, second


def every_span(timetable: Timetable, around: date) -> list[tuple[datetime, datetime]]:
    """Return when each of the hours begins and ends on each day around one, one by one."""
    assert isinstance(timetable.zone, ZoneInfo)
    return [
        (moments_of(timetable.zone, day, each.start)[0], max(moments_of(timetable.zone, day, each.end)))
        for day in (around + timedelta(days=n) for n in range(-2, 60))
        if not timetable.weeks or any(first <= day <= last for first, last in timetable.weeks)
        for each in timetable.hours or (WeeklyHours(tuple(range(7)), 0, 1440),)
        if day.weekday() in each.days
    ]


def naive(timetable: Timetable, at: datetime) -> tuple[bool, datetime | None, datetime | None]:
    """Return whether it is open, until when, and when the next hours begin, looking at all of them."""
    spans = every_span(timetable, at.astimezone(timetable.zone).date())
    until = at
    while later := [end for start, end in spans if start <= until < end]:
        until = max(later)
    is_open = any(start <= at < end for start, end in spans)
    closes = until if is_open and until < at + timedelta(days=9) else None
    return is_open, closes, min((start for start, _ in spans if start > at), default=None)


@some.composite
def many_hours_near_a_day(draw: some.DrawFn) -> tuple[Timetable, datetime]:
    """Return hours of which many adjoin or overlap, in some weeks around a time, and that time."""
    at = draw(moments | near_changes)
    quarters = some.builds(
        lambda days, start, length: WeeklyHours(tuple(sorted(days)), 15 * start, 15 * (start + length)),
        some.sets(some.integers(0, 6), min_size=1),
        some.integers(0, 95),
        some.integers(1, 96),
    )
    weeks = some.tuples(some.integers(-9, 20), some.integers(0, 12)).map(
        lambda pair: ((at + timedelta(pair[0])).date(), (at + timedelta(sum(pair))).date())
    )
    found = draw(some.lists(quarters | hours, max_size=8)), draw(some.lists(weeks, max_size=4))
    return Timetable(draw(zones), tuple(sorted(found[1])), tuple(found[0])), at


@settings(max_examples=examples(300))
@given(many_hours_near_a_day())
def test_joined_hours_open_and_close_when_each_of_them_says(case: tuple[Timetable, datetime]) -> None:
    timetable, at = case
    if not timetable.is_always_open:
        is_open, closes, opens = naive(timetable, at)
        assert timetable.is_open(at) == is_open
        assert in_utc(timetable.open_until(at)) == in_utc(closes)
        assert in_utc(timetable.opens_next(at)) == in_utc(opens)


def in_utc(moment: datetime | None) -> datetime | None:
    """Return the same moment: in an hour that a clock repeats, one equals none of another zone (PEP 495)."""
    return moment and moment.astimezone(timezone.utc)


class CountingZone(tzinfo):
    """Berlin's clock, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        self.asked += 1
        return at and at.replace(tzinfo=BERLIN).utcoffset()

    def dst(self, at: datetime | None) -> timedelta | None:
        return at and at.replace(tzinfo=BERLIN).dst()

    def tzname(self, at: datetime | None) -> str | None:
        return at and at.replace(tzinfo=BERLIN).tzname()


EVERY_DAY = tuple(range(7))


@pytest.mark.parametrize("day", ["2026-10-12", "2026-10-24"], ids=["calm", "the clock is changed"])
@pytest.mark.parametrize(
    "weeks",
    [(), tuple((date(2026, 1, 1) + timedelta(days=14 * n),) * 2 for n in range(50))],
    ids=["always", "fifty days"],
)
def test_what_a_look_costs_grows_with_the_number_of_hours_and_no_faster(
    day: str, weeks: tuple[tuple[date, date], ...]
) -> None:
    """Of hours that adjoin, each was looked for among all of them: 50 cost seconds."""
    number, length = 50, 28
    zone = CountingZone()
    adjoining = tuple(WeeklyHours(EVERY_DAY, length * n, length * (n + 1)) for n in range(number))
    timetable = Timetable(zone, weeks, (*adjoining, WeeklyHours(EVERY_DAY, length * number, 1440)))
    at = datetime.fromisoformat(f"{day} 00:00").replace(tzinfo=timezone.utc)
    timetable.is_open(at)
    timetable.open_until(at)
    timetable.opens_next(at)
    # At most three days are affected by a change of the clock, and looked at by each of three questions;
    # of any other day it is asked when it begins and when the next one ends.
    assert zone.asked < 3 * 3 * 5 * number + 20 * len(weeks) + 200
