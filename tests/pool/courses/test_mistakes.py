"""What teachers get wrong in YAML: told on the line where it stands, in their words, with what to write."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gpu_pool.courses import BadCourseFile, CourseFile, parse_course
from gpu_pool.courses.mistakes import Mistake, explain

SLICES = "slices:\n  - name: Small\n    request: 2%\n"
#: The parser in Python, and that in C where PyYAML has it.
LOADERS = (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
MISTAKES = [
    ("title: Intro: deep learning", 1, "'Intro: deep learning' has a colon", "title: 'Intro: deep learning'"),
    ("title: Intro:", 1, "has a colon", "title: 'Intro:'"),
    ("# A comment\n\ntitle: Intro: deep # new", 3, "'Intro: deep' has a colon", "title: 'Intro: deep'"),
    ("title: Turing's course: part 1", 1, "has a colon", 'title: "Turing\'s course: part 1"'),
    ("title:Intro", 1, "no space after the colon", "title: Intro"),
    ("title Intro", 1, "no colon after title", "title: Intro"),
    ("title:\u00a0Intro", 1, "what is behind the colon only looks like a space", "title: Intro"),
    ("title:\u202fIntro: deep", 1, "behind the colon only looks like a space", "title: Intro: deep"),
    ("title\N{FULLWIDTH COLON}Intro", 1, "a wide colon", "title: Intro"),
    ("title: 'Turing's machine'", 1, "ends at the first '", 'title: "Turing\'s machine"'),
    ('title: "Say "hi" now"', 1, 'ends at the first "', "title: 'Say \"hi\" now'"),
    ('title: "Intro" to ML', 1, "behind the closing quote", "title: '\"Intro\" to ML'"),
    ("title: 'Intro", 1, "never closed", "Close it"),
    ('title: "UNI\\hopper"', 1, "double quotes", "title: 'UNI\\hopper'"),
    ("title: [Intro] to ML", 1, "cannot begin with [", "title: '[Intro] to ML'"),
    *((f"title: {each} x", 1, f"cannot begin with {each}", f"title: '{each} x'") for each in "@`%*&|>,]}?-"),
    *((f"title: {each}x", 1, f"cannot begin with {each}", f"title: '{each}x'") for each in "@`%"),
    ("title: #1 course", 1, "is empty", "What begins with # is a comment"),
    ("title: !x", 1, "the tag '!x'", "in quotes"),
    ("title: \N{LEFT DOUBLE QUOTATION MARK}Intro\N{RIGHT DOUBLE QUOTATION MARK}", 1, "curly", "'Intro'"),
    (
        "title: x\nwho:\n  users: [ada, grace\nweight: 2",
        3,
        "the [ on this line is not closed",
        "[ada, grace]",
    ),
    ("title: x\nwho:\n  users: [@ada]", 3, "cannot begin with @", "in quotes: '@ada'"),
    ("title: x\nwho: {users: [ada]\nweight: 2", 2, "the { on this line is not closed", "{name: Small"),
    ("title: x\nwho:\n\tusers: [ada]", 3, "begins with a tab", "Indent with spaces"),
    ("title: x\nwho:\n\N{NO-BREAK SPACE} users: [ada]", 3, "only looks like a space", "Indent with spaces"),
    ("title: x\n weight: 2", 2, "begins in column 2, and line 1 in column 1", "in the same column"),
    ("  title: x\nweight: 2", 2, "begins in column 1, and line 1 in column 3", "in the same column"),
    ("title: x\nwho:\n  users:\n  -ada\n  -name: bob", 5, "no space after the dash", "Write - name: bob"),
]


@pytest.mark.parametrize(("text", "line", "message", "remedy"), MISTAKES)
def test_a_mistake_is_told_on_its_line_with_what_to_write(
    text: str, line: int, message: str, remedy: str
) -> None:
    for ends in ("\n", "\r\n"):
        whole = (text + "\n" + SLICES).replace("\n", ends)
        with pytest.raises(BadCourseFile) as raised:
            parse_course("cs101.yaml", whole.encode())
        found = raised.value.problems[0]
        assert found.line == line, found
        assert message in found.message
        assert remedy in found.remedy
        assert not any(word in str(found) for word in ("mapping", "block", "token", "scalar", "indicator"))


@pytest.mark.parametrize(
    ("more", "line", "message"),
    [
        ("  - name: Part: two\n    request: 1%\n", 4, "'Part: two' has a colon"),
        ("  - {name: Part: two, request: 1%}\n", 4, "'Part: two' has a colon"),
        ("  - name: Big\n   request: 1%\n", 5, "begins in column 4, and line 4 in column 5"),
        ("  - name: Big\n     request: 1%\n", 5, "begins in column 6, and line 4 in column 5"),
        ("  - name: Big\n    request:1%\n", 5, "no space after the colon"),
    ],
)
def test_a_mistake_in_a_list_is_told_on_its_line(more: str, line: int, message: str) -> None:
    with pytest.raises(BadCourseFile) as raised:
        parse_course("cs101.yaml", (SLICES + more + "title: x\n").encode())
    [found] = raised.value.problems
    assert (found.line, message in found.message) == (line, True), found


def told_by(loader: Any, text: str) -> Mistake | None:
    try:
        list(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        at, since = error.problem_mark, error.context_mark
        return explain(
            text.split("\n"), at.line if at else 0, None if since is None else since.line, error.problem or ""
        )
    return None


@pytest.mark.parametrize(("text", "line", "message", "remedy"), MISTAKES)
def test_it_is_told_the_same_whichever_parser_found_it(
    text: str, line: int, message: str, remedy: str
) -> None:
    told = list(filter(None, (told_by(loader, text + "\n" + SLICES) for loader in LOADERS)))
    assert len({*told}) <= 1
    for each in told:
        assert (each.line + 1, message in each.message, remedy in each.remedy) == (line, True, True)


def test_names_and_texts_are_what_is_written() -> None:
    text = f"title: 2026\nwho: {{users: [007, no, on, off, yes, 1e3, 0x10, ~, 12:30, null]}}\n{SLICES}"
    course: CourseFile = parse_course("cs101.yaml", text.encode())
    assert course.title == "2026"
    assert course.who.users == ("007", "no", "on", "off", "yes", "1e3", "0x10", "~", "12:30", "null")


def test_what_only_looks_like_a_mistake_is_none() -> None:
    text = (
        "title: 'Intro: it''s \"deep\"' # a comment: here\n"
        'instructors: ["a: b", "c\\\\d", http://x, -1]\n'
        "any_up_to: >-\n  25%\nhours: [Mon 10:00-12:00, 'Tue 14:00-15:30']\ntime_zone: UTC\n"
    )
    course = parse_course("cs101.yaml", (text + SLICES).encode())
    assert course.title == 'Intro: it\'s "deep"'
    assert course.instructors == ("a: b", "c\\d", "http://x", "-1")
