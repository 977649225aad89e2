"""What a course file says, and that it is read as it was written."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from gpu_pool.courses import CourseFile, parse_course
from gpu_pool.courses.hours import DAYS, WeeklyHours
from gpu_pool.courses.model import CourseServer
from gpu_pool.policy.sharing import Course, Quota, Sharing
from gpu_pool_client import WhenIdle, format_duration, format_memory, parse_request

FULL = """\
title: Deep Learning 101
who:
  groups: [dl101, 2026]
  users: [ada, 0123, 1e3]
instructors: [grace]
slices:
  - name: Small
    request: 2%
  - name: Large
    request: "1.5GiB model=V100"
    default: yes
any_up_to: 25%
per_user: {slices: 1, share: 50%, memory: 16GiB, gpu_hours_per_week: 2.5, gpu_hours_per_term: 40}
quota: {slices: 30, share: 4}
weight: 2
priority: -1
batch: yes
longest_lease: 2h
idle_limit: 15min
yield_after: 2min
when_idle: end
warn_before: 90s
keep_at_most: 1h30min
hibernate_after: 2h
preload: [numpy, matplotlib.pyplot]
preload_with_server: yes
weeks:
  - {from: 2026-10-12, to: 2026-12-18}
  - {from: 2027-01-04, to: 2027-02-12}
hours:
  - Mon 9:00-12:00
  - Wed,Fri-Sun 22:00-02:00
time_zone: Europe/Berlin
kubernetes: {image: "quay.io/jupyter/scipy-notebook:latest", cpu: 0.5, memory: 4GiB, home: 10GiB}
slurm: {partition: teach, time: 90min, mem: 1.5GiB, cpus_per_task: 2, prologue: module load cuda}
"""
LEAST = "title: Any\nslices: [{name: One, request: 1}]\n"


def read(text: str) -> CourseFile:
    return parse_course("cs101.yaml", text.encode())


def test_every_field_is_read() -> None:
    course = read(FULL)
    assert set(yaml.load(FULL, yaml.BaseLoader)) == set(CourseFile.model_fields)
    assert course.title == "Deep Learning 101"
    assert (course.who.groups, course.who.users) == (("dl101", "2026"), ("ada", "0123", "1e3"))
    assert course.instructors == ("grace",)
    assert [offer.name for offer in course.slices] == ["Small", "Large"]
    assert course.requests == (parse_request("2%"), parse_request("1536MiB model=V100"))
    assert course.default_slice.name == "Large"
    assert course.any_up_to == parse_request("0.25")
    assert course.weeks[1].first == date(2027, 1, 4)
    assert course.weeks[1].last == date(2027, 2, 12)
    assert course.hours == (WeeklyHours((0,), 540, 720), WeeklyHours((2, 4, 5, 6), 1320, 1560))
    assert course.time_zone == "Europe/Berlin"
    assert (course.preload, course.preload_with_server) == (("numpy", "matplotlib.pyplot"), True)
    assert course.kubernetes == CourseServer.model_construct(
        image="quay.io/jupyter/scipy-notebook:latest", cpu=0.5, memory=4096, home=10240
    )
    assert course.slurm.options == {"partition": "teach", "time": "90", "mem": "1536M", "cpus-per-task": "2"}
    assert course.slurm.prologue == ("module load cuda",)


def test_a_short_time_limit_is_none_that_slurm_takes_for_no_limit() -> None:
    assert read(f"{LEAST}slurm: {{time: 1s}}\n").slurm.options == {"time": "1"}


@pytest.mark.parametrize(
    ("line", "modules"), [("", None), ("preload: []", ()), ("preload: torch", ("torch",))]
)
def test_what_is_preloaded(line: str, modules: tuple[str, ...] | None) -> None:
    assert read(f"{LEAST}{line}\n").preload == modules


def test_queue_quotas_and_terms_get_what_they_need() -> None:
    course = read(FULL).course("dl101")
    assert (course.name, course.weight, course.priority, course.batch) == ("dl101", 2.0, -1, True)
    assert course.per_user == Quota(1, 500, 16384, 2.5, 40.0)
    assert course.quota == Quota(slices=30, milli=4000)
    terms = course.terms(None)
    assert (course.longest_lease, terms.idle_limit, terms.when_idle) == (7200, 900, WhenIdle.END)
    assert (terms.warn_before, terms.keep_at_most, terms.yield_after) == (90, 5400, 120)
    assert terms.hibernate_after == 7200
    in_pod = Sharing(in_pods=True).where_kernels_run(terms)
    assert (in_pod.in_pod, in_pod.can_be_parked, in_pod.yield_after) == (True, False, None)
    assert in_pod.hibernate_after is None  # what is in a pod has no folder there that outlives it
    parked = Sharing(in_pods=True, pods_park=True).where_kernels_run(terms)
    assert (parked.in_pod, parked.can_be_parked, parked.yield_after) == (True, True, 120)


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ("", 60),
        ("idle_limit: 30s", 60),
        ("yield_after: Never", None),
        ("yield_after: 15min\nidle_limit: 15min", 900),
        ("yield_after: never\nidle_limit: 30s", None),
    ],
)
def test_after_how_long_a_kernel_gives_way(lines: str, after: float | None) -> None:
    assert read(f"{LEAST}{lines}\n").course("any").yield_after == after


def test_what_is_left_out_is_as_without_a_file() -> None:
    course = read(LEAST)
    assert course.course("any") == Course(name="any")
    assert course.default_slice.name == "One"
    assert course.timetable.is_always_open
    assert course.who.is_everybody


def test_one_of_weeks_and_hours_needs_no_list() -> None:
    more = "weeks: {from: 2026-10-12, to: 2026-10-12}\nhours: Mon 10:00-12:00\ntime_zone: UTC\n"
    course = read(LEAST + more)
    assert (len(course.weeks), len(course.hours)) == (1, 1)


def test_a_course_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read(LEAST).title = "Another"  # type: ignore[misc]


#: Quotes of word processors are refused around a text.
CURLY = "\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb"
lines = some.text(
    some.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=CURLY),
    min_size=1,
    max_size=20,
)
shares = some.integers(1, 1000).map(lambda milli: f"{milli / 10:.1f}%")
memory = some.integers(1, 10**6)
seconds = some.integers(1, 10**6).map(lambda number: format_duration(number))
hours = some.builds(
    WeeklyHours,
    some.lists(some.integers(0, 6), min_size=1, unique=True).map(lambda days: tuple(sorted(days))),
    some.integers(0, 1439),
    some.just(1440),
)


@pytest.mark.parametrize("quote", CURLY)
def test_a_quote_alone_is_a_text(quote: str) -> None:
    assert read(LEAST.replace("Any", quote)).title == quote


@given(
    title=lines,
    users=some.lists(lines, max_size=5),
    names=some.lists(lines, min_size=1, max_size=5, unique=True),
    sizes=some.lists(shares, min_size=5, max_size=5, unique=True),
    weight=some.integers(0, 10**6),
    mib=memory,
    idle=seconds,
    first=some.dates(date(2000, 1, 1), date(2199, 12, 31)),
    when=some.lists(hours, min_size=1, max_size=4),
    zone=some.sampled_from(["UTC", "Asia/Kathmandu", "America/St_Johns"]),
)
def test_what_is_written_is_read_back(
    title: str,
    users: list[str],
    names: list[str],
    sizes: list[str],
    weight: int,
    mib: int,
    idle: str,
    first: date,
    when: list[WeeklyHours],
    zone: str,
) -> None:
    written: dict[str, Any] = {
        "title": title,
        **({"who": {"users": users}} if users else {}),
        "slices": [{"name": name, "request": size} for name, size in zip(names, sizes, strict=False)],
        "per_user": {"memory": format_memory(mib)},
        "weight": weight,
        "idle_limit": idle,
        "weeks": {"from": first, "to": first.replace()},
        "hours": [str(each) for each in when],
        "time_zone": zone,
    }
    course = read(yaml.safe_dump(written, allow_unicode=True))
    assert (course.title, list(course.who.users)) == (title, users)
    assert [offer.name for offer in course.slices] == names
    assert list(course.requests) == [parse_request(size) for size in sizes[: len(names)]]
    assert (course.per_user.memory, course.weight) == (mib, weight)
    assert format_duration(course.idle_limit or 0) == idle
    assert (course.weeks[0].first, course.weeks[0].last) == (first, first)
    assert (list(course.hours), course.time_zone) == (when, zone)


def test_days_are_named_as_they_are_read() -> None:
    assert [str(WeeklyHours((day,), 60, 120)) for day in range(7)] == [f"{day} 01:00-02:00" for day in DAYS]
