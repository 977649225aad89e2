"""Course files that anybody could have written: a course, or problems in words; never anything else."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.bounds import within
from fuzz.corpus import contents, kept
from gpu_pool.courses import BadCourseFile, parse_course
from gpu_pool.courses.access import open_now, when_open
from gpu_pool.courses.arithmetic import slice_figures
from gpu_pool.courses.model import CourseFile
from gpu_pool.courses.reading import MOST_BYTES
from gpu_pool.policy.queue_state import Rules
from support.examples import examples
from support.pools import V100

_KEYS = st.sampled_from(
    [*CourseFile.model_fields, "name", "request", "from", "to", "users", "slices", "<<", "x"]
)
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.dates(),
    st.binary(max_size=8),
    st.sampled_from([
        "2%", "50%", "1", "2h", "30min", "0s", "9999999999h", "1e400", "Mon-Fri 08:00-18:00",
        "Sun 23:59-00:00",
        "Mon 24:00-25:00", "Europe/Berlin", "../../etc/passwd", "UTC", "Factory", "keep", "end", "2026-02-30",
        "2026-09-01", "0001-01-01", "9999-12-31", "8GiB", "-1", ".inf", ".nan", "!!python/object:os.system",
    ]),
)  # fmt: skip
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_KEYS, inner, max_size=5)),
    max_leaves=12,
)
_LINES = st.lists(
    st.sampled_from([
        "title: T", "slices: [{name: S, request: 2%}]", "slices: 2%",
        "weeks: {from: 2026-09-01, to: 2026-12-01}",
        "weeks: {from: 0001-01-01, to: 9999-12-31}", "hours: Mon-Fri 08:00-18:00", "hours: [Sat, Sun]",
        "time_zone: Europe/Berlin", "time_zone: America/St_Johns", "longest_lease: 2h", "weight: 1e308",
        "weight: 0",
        "who: {users: [a, b]}", "who: []", "&a a: *a", "a: &a [*a]", "? [a]: b", "!!map {a: b}", "- x",
        "---", "...",
        "%YAML 1.1", "\t", "{", "[", "'", "\"", "|", ">", "#", "any_up_to: 33%",
        "quota: {share: 4, memory: 1GiB}",
    ]),
    max_size=14,
).map("\n".join)  # fmt: skip
#: A file that is right, so that what is made up of it is read to the end.
_GOOD: dict[str, Any] = {"title": "T", "slices": [{"name": "Small", "request": "2%"}]}
FILES = st.one_of(
    st.binary(max_size=300),
    _LINES.map(str.encode),
    st.dictionaries(_KEYS, _TREES, max_size=4).map(
        lambda more: yaml.safe_dump({**_GOOD, **more}, allow_unicode=True).encode(errors="replace")
    ),
)
_DAYS = st.dates(date(2000, 1, 1), date(2099, 12, 31))
#: The clock of a machine can be wrong by decades.
MOMENTS = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(timezone.utc))


def _read(data: bytes) -> CourseFile | BadCourseFile:
    try:
        return parse_course("cs101.yaml", data)
    except BadCourseFile as error:
        return error


@kept("courses", lambda content: content)
@given(FILES)
def test_a_file_is_a_course_or_has_problems_in_words(data: bytes) -> None:
    course = _read(data)
    if isinstance(course, BadCourseFile):
        assert 0 < len(course.problems) <= 200
        assert all(problem.message.isprintable() for problem in course.problems)
        return
    now = datetime(2026, 10, 1, 12, tzinfo=timezone.utc)
    assert open_now(course, now).isprintable()
    assert when_open(course).isprintable()
    slice_figures(course, [V100], Rules())
    assert course.course("cs101").name == "cs101"


@settings(max_examples=examples(60))
@given(
    weeks=st.lists(st.tuples(_DAYS, _DAYS).map(sorted), max_size=3),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Apia", "Africa/Casablanca"]),
    hours=st.sampled_from(
        [None, "Mon-Fri 08:00-18:00", "Sun 00:00-24:00", ["Mon 23:00-24:00", "Tue 00:00-01:00"]]
    ),
    at=MOMENTS,
)
def test_a_timetable_knows_when_it_opens_at_any_time(
    weeks: list[Any], zone: str, hours: object, at: datetime
) -> None:
    more = {
        "weeks": [{"from": first, "to": last} for first, last in weeks],
        "hours": hours,
        "time_zone": zone,
    }
    given = {key: value for key, value in more.items() if value}
    table = parse_course("cs101.yaml", yaml.safe_dump({**_GOOD, **given}).encode()).timetable
    opens = table.opens_next(at)
    if opens is not None:
        assert table.is_open(opens)
        assert opens >= at
    if table.is_open(at):
        until = table.open_until(at)
        assert until is None or until > at


@pytest.mark.long
def test_the_largest_files_take_little_memory() -> None:
    for content in contents("courses"):
        data = (content * (1 + MOST_BYTES // max(1, len(content))))[:MOST_BYTES]
        with within(64):
            _read(data)
