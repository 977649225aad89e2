"""Characters that are not seen: refused in what is written anew, and written out where a change is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpu_pool.courses import BadCourseFile, check_course, parse_course, read_course
from gpu_pool.courses.editing import difference
from gpu_pool.names import visible
from gpu_pool.service.dashboard.edit_page import diff_lines

GOOD = "title: A course\nslices:\n  - name: Small\n    request: 2%\n"
#: Embeddings, overrides and isolates, marks, line ends, a byte order mark, tags, controls of both kinds.
HIDDEN = [
    *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
    *"\u200b\u200e\u200f\u061c\ufeff\u2028\u2029\x85\u00ad\ufff9",
    *map(chr, (0xE0001, 0xE0041, 0xE007F)),
]


@pytest.mark.parametrize("character", HIDDEN, ids=[f"{ord(each):04x}" for each in HIDDEN])
@pytest.mark.parametrize("line", ["# harmless {} comment", "weight: 2 # {}", "#{}weight: 9"])
def test_a_hidden_character_is_told_on_its_line_and_refused_in_what_is_new(character: str, line: str) -> None:
    data = (GOOD + line.format(character) + "\npriority: 1\n").encode()
    with pytest.raises(BadCourseFile) as raised:
        check_course("cs101.yaml", data)
    found = raised.value.problems[0]
    assert found.line == 5
    assert f"has U+{ord(character):04X}" in found.message
    assert character not in str(found)
    assert visible(character) in found.remedy


def test_a_file_that_is_there_is_read_with_a_warning() -> None:
    found = read_course("cs101.yaml", f"{GOOD}# a \u202e comment\nweight: 9\n".encode())
    assert found.course.weight == 9
    assert [each.line for each in found.warnings] == [5]


@pytest.mark.parametrize("character", HIDDEN, ids=[f"{ord(each):04x}" for each in HIDDEN])
@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("A course", '"A {} course"'),
        GOOD.replace("Small", '"{}Small"'),
        GOOD + 'who: {{users: ["ada{}"]}}\n',
        GOOD + 'instructors: ["{}"]\n',
    ],
)
def test_in_titles_and_names_it_is_refused_in_every_file(character: str, text: str) -> None:
    escaped = f"\\U{ord(character):08x}"  # as YAML has it, too: it would not be seen in the file
    with pytest.raises(BadCourseFile):
        parse_course("cs101.yaml", text.format(escaped).encode())


@pytest.mark.parametrize(
    "text",
    ["# \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "# 👩\u200d💻 Ünï\u00a0côdé — 课程", "#\ta tab"],
)
def test_what_is_only_another_script_is_accepted(text: str) -> None:
    check_course("cs101.yaml", f"{GOOD}{text}\n".encode())


@given(some.text())
def test_in_a_difference_all_is_seen_and_nothing_breaks_a_line(text: str) -> None:
    shown = [line.text for line in diff_lines(difference("", text))]
    assert all(each.isprintable() or each == "\t" for line in shown for each in line)


def test_a_line_that_only_yaml_would_end_is_one_line_in_a_difference() -> None:
    lines = difference("# harmless\n", "# harmless\u2028weight: 9\n# left \u202e right\n")
    assert [line.text for line in diff_lines(lines)][1:] == [
        "-# harmless",
        "+# harmless\\u2028weight: 9",
        "+# left \\u202e right",
    ]


#: Spaces at which no line is broken: word processors and web pages put them in by themselves.
NO_BREAK = ["\u00a0", "\u202f", "\u2007"]


@pytest.mark.parametrize("space", NO_BREAK, ids=[f"{ord(each):04x}" for each in NO_BREAK])
def test_a_space_that_breaks_no_line_is_a_space_in_a_value(space: str) -> None:
    text = GOOD.replace("A course", f"A{space}course") + (
        f"hours: Mon{space}10:00{space}-{space}12:00\ntime_zone: UTC\nidle_limit: 30{space}min\n"
    )
    course = check_course("cs101.yaml", text.encode())
    assert (course.title, str(course.hours[0]), course.idle_limit) == (
        "A course",
        "Mon 10:00-12:00",
        1800,
    )


@pytest.mark.parametrize("space", NO_BREAK, ids=[f"{ord(each):04x}" for each in NO_BREAK])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weight:{}2\n", "what is behind the colon only looks like a space. Write weight: 2."),
        ("instructors:\n  -{}ada\n", "what is behind the dash only looks like a space. Write - ada."),
    ],
)
def test_one_that_stands_where_yaml_needs_a_space_is_told_in_words(text: str, words: str, space: str) -> None:
    with pytest.raises(BadCourseFile) as raised:
        parse_course("cs101.yaml", (GOOD + text.format(space)).encode())
    assert words in str(raised.value)
    assert ascii(space)[1:-1] not in str(raised.value)
