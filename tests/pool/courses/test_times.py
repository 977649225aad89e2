"""Times in course files: with a unit in what is new, read back in words, and as before in old files."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpu_pool.courses import BadCourseFile, check_course, json_schema, parse_course, read_course
from gpu_pool.courses.editing import template
from gpu_pool.courses.reading import TIMES, read_back, spelled

GOOD = "title: A course\nslices:\n  - name: Small\n    request: 2%\n"


def test_all_fields_that_are_times_are_known() -> None:
    schema = json_schema()
    found = [
        *((name,) for name, field in schema["properties"].items() if "pattern" in field),
        *(
            (group, name)
            for group, part in (("kubernetes", "CourseServer"), ("slurm", "CourseJobs"))
            for name, field in schema["$defs"][part]["properties"].items()
            if "pattern" in field
        ),
    ]
    assert found == [*TIMES]


@pytest.mark.parametrize("place", TIMES, ids=".".join)  # type: ignore[arg-type]
@pytest.mark.parametrize(
    ("text", "words"), [("90", "1 minute 30 seconds"), ("0.5", "0.5 seconds"), ("7200", "2 hours")]
)
def test_a_time_without_a_unit_is_read_with_a_warning_and_refused_in_a_new_file(
    place: tuple[str, ...], text: str, words: str
) -> None:
    *group, name = place
    line = f"{group[0]}: {{{name}: {text}}}\n" if group else f"{name}: {text}\n"
    data = (GOOD + line).encode()
    found = read_course("cs101.yaml", data)
    [warning] = found.warnings
    assert (warning.line, warning.field) == (5, ", ".join(place))
    assert warning.message == f"'{text}' has no unit, and is read as {words}."
    assert warning.remedy == f"Write {text}s, {text}min or {text}h."
    assert parse_course("cs101.yaml", data) == found.course
    with pytest.raises(BadCourseFile) as raised:
        check_course("cs101.yaml", data)
    assert raised.value.problems == (warning,)
    good = data.replace(text.encode(), f"{text}s".encode())
    assert check_course("cs101.yaml", good) == found.course


@pytest.mark.parametrize(
    ("text", "field", "line", "remedy"),
    [
        (GOOD.replace("2%", "2% for 6h") + "longest_lease: 4h\n", "slices no. 1, request", 4, "2% for 4h"),
        (GOOD + "any_up_to: 2x50% for 5h\nlongest_lease: 4h\n", "any_up_to", 5, "2x50% for 4h"),
        ("longest_lease: 30min\ntitle: A\nslices: [{name: S, request: 1 for 1h}]\n",
         "slices no. 1, request", 3, "1 for 30min"),
    ],
)  # fmt: skip
def test_an_offer_for_longer_than_the_longest_lease_is_warned_of_and_refused_in_a_new_file(
    text: str, field: str, line: int, remedy: str
) -> None:
    found = read_course("cs101.yaml", text.encode())
    [warning] = found.warnings
    assert (warning.field, warning.line) == (field, line)
    assert re.fullmatch(
        r"'.* for \wh' is for longer than longest_lease \(.*\): it ends with that.", warning.message
    )
    assert warning.remedy == f"Write {remedy}, or a longer longest_lease."
    with pytest.raises(BadCourseFile) as raised:
        check_course("cs101.yaml", text.encode())
    assert raised.value.problems == (warning,)
    good = re.sub(r" for \wh", f" for {remedy.rpartition(' ')[2]}", text)
    assert check_course("cs101.yaml", good.encode()).longest_lease == found.course.longest_lease


def test_what_is_no_time_is_refused_and_not_warned_of() -> None:
    for text in ("soon 9", "-9", "99999999999", "0"):
        with pytest.raises(BadCourseFile) as raised:
            parse_course("cs101.yaml", f"{GOOD}longest_lease: '{text}'\n".encode())
        [found] = raised.value.problems
        assert "unit" not in found.message
        assert "a number of seconds" not in found.remedy


def test_every_time_is_read_back_in_words() -> None:
    course = check_course(
        "cs101.yaml", (GOOD + "longest_lease: 1h30min\nkubernetes: {start_within: 10m}\n").encode()
    )
    assert read_back(course) == {
        "longest_lease": "1 hour 30 minutes",
        "yield_after": "1 minute (default)",
        "warn_before": "5 minutes (default)",
        "keep_at_most": "2 hours (default)",
        "kubernetes, start_within": "10 minutes",
    }


@given(some.integers(0, 3650 * 86_400))
def test_what_is_spelled_is_exact(seconds: int) -> None:
    words = re.findall(r"([0-9]+) (day|hour|minute|second)s?", spelled(seconds))
    sizes = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}
    assert sum(int(count) * sizes[unit] for count, unit in words) == seconds


def test_the_file_to_begin_with_has_units() -> None:
    check_course("cs101.yaml", template("cs101").encode())


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("90s", True), ("1h30min", True), ("1.5 h", True), ("90", False), ("1h30", False), ("h", False)],
)
def test_editors_know_that_a_time_has_a_unit(text: str, is_right: bool) -> None:
    lease = json_schema()["properties"]["longest_lease"]
    assert lease["type"] == "string"
    assert bool(re.search(lease["pattern"], text)) == is_right
