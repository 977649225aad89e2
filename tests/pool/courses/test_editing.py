"""What of a course file is its instructors' own, and how a change of it is shown."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.courses import parse_course
from gpu_pool.courses.editing import RESERVED, difference, how_much, reserved_changes
from gpu_pool.courses.model import CourseFile

TEXT = "title: One\nslices:\n  - {name: Small, request: 2%}\n"
LINES = st.lists(st.sampled_from(["a", "b", "c", "title: x"]), max_size=30)


def changed(before: str, after: str, old_text: str | None = "") -> list[tuple[int | None, str, str]]:
    """Return line, field and remedy of what only an administrator may change."""
    old, new = (parse_course("ml.yaml", each.encode()) for each in (before, after))
    found = reserved_changes("ml.yaml", new, after, old, before if old_text == "" else old_text)
    return [(each.line, each.field, each.remedy) for each in found]


def test_every_reserved_field_is_one() -> None:
    assert set(RESERVED) < set(CourseFile.model_fields)


def test_what_is_not_reserved_may_change() -> None:
    after = TEXT.replace("2%", "5%") + "per_user: {slices: 2}\nlongest_lease: 2h\nwho: {users: [ada]}\n"
    assert changed(TEXT, after) == []


def test_a_default_may_be_written_out() -> None:
    assert changed(TEXT, TEXT + "weight: 1\npriority: 0\n") == []


def test_it_is_said_how_to_put_back_what_is_reserved() -> None:
    before = TEXT + "quota:\n  share: 50%\n  slices: 9\ninstructors: [ada, bob]\n"
    after = TEXT + "quota: {share: 4}\nweight: 9\n"
    assert changed(before, after) == [
        (None, "instructors", "Put it back: instructors: [ada, bob]"),
        (4, "quota", "Put it back: quota: {share: 50%, slices: 9}"),
        (5, "weight", "Remove it."),
    ]


def test_without_a_good_text_before_it_is_only_said_that_it_must_be() -> None:
    assert changed(TEXT, TEXT + "weight: 9\n", None) == [(4, "weight", "Put it back as it was.")]


@given(LINES, LINES)
def test_a_difference_says_all_that_was_removed_and_added(old: list[str], new: list[str]) -> None:
    found = difference("\n".join(old), "\n".join(new))
    removed = [line[1:] for line in found if line.startswith("-")]
    added = [line[1:] for line in found if line.startswith("+")]
    assert (not found) == (old == new)
    for part, whole in ((removed, old), (added, new)):
        remaining = iter(whole)
        assert all(line in remaining for line in part)
    assert len(old) - len(removed) == len(new) - len(added)


def test_it_is_the_unified_difference_that_everybody_knows() -> None:
    old = [f"line {number}" for number in range(100)]
    new = [*old[:40], "another", *old[42:90], *old[91:], "last"]
    known = list(difflib.unified_diff(old, new, lineterm=""))[2:]
    assert list(difference("\n".join(old), "\n".join(new))) == known


def test_two_long_texts_are_not_searched_for_what_they_share() -> None:
    # Half a minute of work for the library.
    old, new = ("\n".join(str(factor * n % 150) for n in range(10_000)) for factor in (1, 7))
    found = difference(old, new)
    assert found[:2] == ("@@ -2,9999 +2,9999 @@", "-1")
    assert all(line.startswith("-") for line in found[1:-1])
    assert found[-1] == "… and 19599 lines more"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("a\nc\nd\n", "2 lines added, 1 removed"),
        ("a\nb\nc\n", "1 line added"),
        ("", "2 lines removed"),
        ("a\nb", ""),
    ],
)
def test_how_much_changed_is_counted(after: str, words: str) -> None:
    assert how_much(difference("a\nb\n", after)) == words


def test_only_an_administrator_says_that_a_course_is_no_batch_work() -> None:
    assert [field for _, field, _ in changed(TEXT + "batch: true\n", TEXT)] == ["batch"]
