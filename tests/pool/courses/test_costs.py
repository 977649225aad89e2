"""What a course file can make its reader compute grows with the file, and no faster. Counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

from gpu_pool.courses import BadCourseFile, check_course, parse_course
from gpu_pool.courses.reading import MOST_BYTES
from gpu_pool.courses.text import MOST_LISTED

GOOD = "title: T\nslices: [{name: S, request: 2%}]\n"


def calls_of(read: Callable[[], object]) -> Counter[str]:
    """Return how often each function was called, by its name."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_name] += 1
        elif event == "c_call":
            counted[what.__name__] += 1

    sys.setprofile(count)
    try:
        with suppress(BadCourseFile):
            read()
    finally:
        sys.setprofile(None)
    return counted


#: Texts with so many of something that is refused, or that has to be looked at.
MANY: dict[str, Callable[[int], str]] = {
    "references": lambda n: f"instructors: [{','.join(['*a'] * n)}]",
    "tags": lambda n: f"who: {{users: [{','.join(['!a'] * n)}]}}",
    "empty items": lambda n: "instructors:\n" + "-\n" * n,
    "empty groups": lambda n: f"weeks: [{','.join(['{}'] * n)}]",
    "keys on one line": lambda n: f"quota: {{{', '.join(f'a {i}: 1' for i in range(n))}}}",
    "unknown fields": lambda n: "".join(f"f{i}: 1\n" for i in range(n)),
    "the same field": lambda n: "weight: 1\n" * n,
    "wrong hours": lambda n: f"hours: [{','.join(['x'] * n)}]",
    "names": lambda n: f"instructors: [{','.join(f'u{i}' for i in range(n))}]",
    "lines that are no YAML": lambda n: "a b c\n" * n,
    "what is not seen": lambda n: "# \u202e\n" * n,
}


@pytest.mark.parametrize("text", MANY.values(), ids=list(MANY))
def test_twice_as_much_costs_twice_as_much(text: Callable[[int], str]) -> None:
    some, twice = (
        calls_of(partial(parse_course, "a.yaml", (GOOD + text(number)).encode())) for number in (400, 800)
    )
    assert twice.total() < 2.2 * some.total() + 5_000


def test_a_line_with_many_fields_is_looked_at_once() -> None:
    data = (GOOD + MANY["keys on one line"](2_000)).encode()
    assert len(data) < MOST_BYTES
    assert calls_of(lambda: parse_course("a.yaml", data))["of_line"] <= 3


@pytest.mark.parametrize(
    "text",
    [
        "instructors: [" + "a," * MOST_LISTED + "a]",
        "who: {users: [" + "*a," * MOST_LISTED + "a]}",
        "hours:\n" + "- x\n" * (MOST_LISTED + 1),
        "".join(f"a{n}:\n" for n in range(MOST_LISTED)),
    ],
    ids=["names", "references", "hours", "fields"],
)
def test_more_than_a_course_can_have_is_refused_where_it_is_read(text: str) -> None:
    with pytest.raises(BadCourseFile) as caught:
        check_course("a.yaml", (GOOD + text).encode())
    [problem] = caught.value.problems
    assert "there are more than 10000 in one list or group of fields" in problem.message
    assert "Accepted: at most 10000. For more students, name a group" in problem.remedy


def test_as_many_names_as_fit_are_accepted() -> None:
    names = [f"u{n}" for n in range(9_000)]
    course = check_course("a.yaml", f"{GOOD}who: {{users: [{','.join(names)}]}}".encode())
    assert list(course.who.users) == names
