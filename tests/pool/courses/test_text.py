"""YAML without its traps: text stays text, and nothing written can hang, crash or surprise."""

from __future__ import annotations

from contextlib import suppress

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as some

from gpu_pool.courses import BadCourseFile, CourseFile, parse_course, text
from gpu_pool.courses.text import UnreadableText, read_text


@pytest.fixture(params=[yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything with both parsers of PyYAML."""
    monkeypatch.setattr(text, "PARSER", request.param)


@pytest.mark.parametrize(
    "written", "no on yes 20:30 007 1e3 0x10 1_000 2026-10-12 null ~ .nan = true".split()
)
def test_a_value_is_the_text_that_was_written(written: str) -> None:
    assert read_text("a.yaml", f"a: {written}\nb: [{written}]").tree == {"a": written, "b": [written]}


def test_lines_are_those_of_keys_and_items() -> None:
    written = read_text("a.yaml", "# first\na:\n\n  b: 1\n  c:\n    - x\n    - y\n")
    assert written.lines == {
        (): 2,
        ("a",): 2,
        ("a", "b"): 4,
        ("a", "c"): 5,
        ("a", "c", 0): 6,
        ("a", "c", 1): 7,
    }


def test_a_key_that_comes_twice_keeps_its_first_value() -> None:
    written = read_text("a.yaml", "a: 1\nb: 2\na: {c: [3, *d]}\ne: 4\n")
    assert written.tree == {"a": "1", "b": "2", "e": "4"}
    assert [str(each) for each in written.problems] == [
        "a.yaml, line 3: 'a' is already given on line 1. Keep one of the two."
    ]


def test_a_billion_laughs_are_refused() -> None:
    bomb = "a: &a [lol, lol]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    written = read_text("a.yaml", bomb)
    assert "references (* and &) are not supported" in str(written.problems[0])
    assert written.tree is not None
    assert str(written.tree).count("lol") == 2


@pytest.mark.parametrize("deep", ["[" * 60_000, "{a: " * 60_000, "- " * 60_000, "a:\n" + " b:\n" * 15_000])
def test_what_is_nested_without_end_is_refused(deep: str) -> None:
    with pytest.raises((UnreadableText, BadCourseFile)):
        parse_course("a.yaml", deep.encode())


def test_a_text_in_quotes_may_be_empty_or_special() -> None:
    assert read_text("a.yaml", "a: ''\nb: '*b'\nc: \"&c\"\nd: '!d'").tree == {
        "a": "",
        "b": "*b",
        "c": "&c",
        "d": "!d",
    }


def test_a_mark_at_the_beginning_is_not_part_of_the_text() -> None:
    course = parse_course("a.yaml", b"\xef\xbb\xbftitle: A\r\nslices:\r\n- {name: S, request: 2%}\r\n")
    assert course.title == "A"


NAMES = (*CourseFile.model_fields, "name", "request", "default", "from", "to", "groups", "users", "image")
SIGNS = ": |:\n|\n|\n  |\n- |[|]|{|}|, |- |&a |*a|!t |>|'|\"|?|#|%|@|\t|---\n|...\n".split("|")
VALUES = ("2%", "1GiB", "true", "Mon 10:00-12:00", "UTC", "2026-10-12", "|\n")
pieces = some.sampled_from((*NAMES, *SIGNS, *VALUES))
#: What resembles a course file, and what is nothing at all.
texts = some.lists(pieces | some.text(max_size=3), max_size=60).map("".join)
GOOD = b"title: A\nslices:\n- {name: S, request: 2%}\nhours: [Mon 10:00-12:00]\ntime_zone: UTC\n"
damaged = some.tuples(some.integers(0, len(GOOD)), some.integers(0, len(GOOD)), some.binary(max_size=4)).map(
    lambda cut: GOOD[: cut[0]] + cut[2] + GOOD[cut[1] :]
)


@given(texts.map(lambda each: each.encode(errors="replace")) | some.binary(max_size=200) | damaged)
@example(b"? ")
@example(b"%YAML 9.9\n---\na: 1")
@example(b"<<: {title: A}")
@example(b"a: 1\n...\nb: 2")
def test_whatever_is_written_is_read_or_refused_in_words(data: bytes) -> None:
    with suppress(BadCourseFile):
        parse_course("a.yaml", data)
