"""What is wrong with a text that is no YAML, in the words of who wrote it. Pure.

A parser says where it could not go on, and that in its own words. Most of what people get wrong in
a course file is one of a few things, on that line or on one before it, and is told with what to write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.names import visible
from gpu_pool.policy.course_values import given

#: ``title: Intro`` with what comes before: the indentation, and the dash of an item of a list.
_FIELD: Final = re.compile(r"(?P<before> *(?:- +)*)(?P<name>[A-Za-z_]\w*): +(?P<value>\S.*)")
_ITEM: Final = re.compile(r"(?P<before> *(?:- +)+)(?P<name>)(?P<value>[^\s-].*)")
_NO_SPACE: Final = re.compile(r"(?P<before> *(?:- +)*)(?P<name>[A-Za-z_]\w*):(?P<value>[^\s:/].*)")
#: What only looks like the space that YAML needs behind a colon.
_NO_BREAK: Final = re.compile(
    "(?P<before> *(?:- +)*)(?P<name>[A-Za-z_]\\w*):[\u00a0\u2007\u202f]\\s*(?P<value>.*)"
)
_WIDE_COLON: Final = re.compile(
    "(?P<before> *(?:- +)*)(?P<name>[A-Za-z_]\\w*) *\N{FULLWIDTH COLON} *(?P<value>.*)"
)
_NO_COLON: Final = re.compile(r" *(?P<name>[a-z_]{3,})(?: +(?P<value>\S.*))?")
_NO_DASH_SPACE: Final = re.compile(r"(?P<before> *)-(?P<value>[A-Za-z_]\w*:.*)")
_TAB: Final = re.compile(r" *\t")
_COMMENT: Final = re.compile(r"\s#.*$")
_COLON: Final = re.compile(r":(?:\s|$)")
#: In a list or group on one line: a text that begins so, or has a colon in it.
_SPECIAL_ITEM: Final = re.compile(r"[\[{,:]\s*([@`%][^\],}]*)")
_COLON_ITEM: Final = re.compile(r"[{,]\s*([A-Za-z_]\w*): +([^,{}\[\]'\"]*:\s[^,{}\[\]]*)")
#: What a text in YAML cannot begin with unless it is in quotes.
_SPECIAL: Final = "@`%&*!|>,]}?:-"
_BRACKETS: Final = {"[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, on which line (from 0), and what to write."""

    line: int
    message: str
    remedy: str


def explain(lines: Sequence[str], at: int, since: int | None, problem: str) -> Mistake:
    """Explain why a parser could not go on at a line; ``since`` is where what it was reading begins."""
    at = max(0, min(at, len(lines) - 1))
    # What ends too early is noticed on the line after the last.
    while at and not lines[at].strip():
        at -= 1
    began = at if since is None else min(since, at)
    if "unexpected end of stream" in problem:
        return Mistake(began, "a quote is opened here and is never closed.", "Close it on the same line.")
    if "unknown escape" in problem:
        remedy = f"Write {_in_single_quotes(lines[at])}."
        return Mistake(at, r"a \ in double quotes has a meaning of its own.", remedy)
    above = _above(lines, at)
    for line in (at, *range(at - 1, -1, -1)):
        told = of_line(lines[line]) or (_of_name(lines[line]) if line in (at, began, above) else None)
        if told is not None:
            return Mistake(line, *told)
    if "',' or ']'" in problem or "',' or '}'" in problem:
        return Mistake(began, *_of_brackets(lines[began], problem))
    return Mistake(at, *(_of_items(lines[at]) or _of_indentation(lines, at, above)))


def of_line(line: str) -> tuple[str, str] | None:
    """Return (what is wrong with this line in itself, what to write), or None."""
    if _TAB.match(line):
        return "this line begins with a tab.", "Indent with spaces."
    if not (line.strip() and not line.lstrip().startswith("#")):
        return None
    return _of_blanks(line) or _of_colon(line) or _of_value(line)


def _of_blanks(line: str) -> tuple[str, str] | None:
    indentation = line[: len(line) - len(line.lstrip())]
    if indentation.strip(" "):
        return "this line is indented with a character that only looks like a space.", "Indent with spaces."
    return None


def _of_colon(line: str) -> tuple[str, str] | None:
    if found := _NO_SPACE.fullmatch(line):
        return "there is no space after the colon.", f"Write {_shown(found['name'], found['value'])}."
    if found := _NO_BREAK.fullmatch(line):
        remedy = f"Write {_shown(found['name'], found['value'] or '...')}."
        return "what is behind the colon only looks like a space.", remedy
    if found := _WIDE_COLON.fullmatch(line):
        remedy = f"Write {_shown(found['name'], found['value'] or '...')}."
        return "this is a wide colon, which means nothing in YAML.", remedy
    if found := _NO_DASH_SPACE.fullmatch(line):
        return "there is no space after the dash.", f"Write {_shown('', found['value'])}."
    return None


def _of_value(line: str) -> tuple[str, str] | None:
    """Tell of a value that needs quotes, or has them where they end too early."""
    found = _FIELD.fullmatch(line) or _ITEM.fullmatch(line)
    if found is None:
        return None
    value = _COMMENT.sub("", found["value"]).rstrip()
    remedy = f"Put it in quotes: {_quoted(found['name'], value)}."
    if value[0] in "'\"":
        return _of_quotes(found["name"], value)
    if value[0] in _BRACKETS:
        end = value.rfind(_BRACKETS[value[0]])
        if end >= 0 and value[end + 1 :].strip():
            return f"a text cannot begin with {value[0]} without quotes.", remedy
        return None
    if value[0] in _SPECIAL and not (value[0] in "|>-?:" and value[1:2].strip()):
        if value in ("|", ">", "|-", ">-"):
            return None
        return f"a text cannot begin with {value[0]} without quotes.", remedy
    if _COLON.search(value):
        return f"the text {given(value)} has a colon in it.", remedy
    return None


def _of_quotes(name: str, value: str) -> tuple[str, str] | None:
    """Tell of a text that goes on after its quote has ended."""
    quote = value[0]
    end, inner = 1, []
    while end < len(value):
        if quote == '"' and value[end] == "\\":
            inner.append(value[end : end + 2])
            end += 2
            continue
        if value[end] == quote:
            if quote == '"' or value[end + 1 : end + 2] != "'":
                break
            end += 1
        inner.append(value[end])
        end += 1
    if not value[end + 1 :].strip():
        return None
    if quote == "'" and value.endswith("'"):  # as of 'Turing's machine'
        text, what = value[1:-1], "the quote ends at the first ' in the text."
    elif quote == '"' and value.endswith('"'):
        text, what = value[1:-1], 'the quote ends at the first " in the text.'
    else:
        text, what = value, "there is more behind the closing quote."
    return what, f"Write {_quoted(name, text)}."


def _of_name(line: str) -> tuple[str, str] | None:
    found = _NO_COLON.fullmatch(_COMMENT.sub("", line).rstrip())
    if found is None:
        return None
    return (
        f"there is no colon after {found['name']}.",
        f"Write {_shown(found['name'], found['value'] or 'VALUE')}.",
    )


def _of_items(line: str) -> tuple[str, str] | None:
    """Tell of what stands in a list on one line and needs quotes."""
    if found := _SPECIAL_ITEM.search(line):
        text = found[1].strip()
        return (
            f"a text cannot begin with {text[0]} without quotes.",
            f"Put it in quotes: {visible(_in_quotes(text))}.",
        )
    return None


def _of_brackets(line: str, problem: str) -> tuple[str, str]:
    if found := _COLON_ITEM.search(line):
        name, text = found[1], found[2].strip()
        return f"the text {given(text)} has a colon in it.", f"Put it in quotes: {_quoted(name, text)}."
    opened, example = ("[", "[ada, grace]") if "]" in problem else ("{", "{name: Small, request: 2%}")
    return (
        f"the {opened} on this line is not closed, or a comma is missing behind it.",
        f"Write it as in {example}; a text with a colon or a comma in it needs quotes.",
    )


def _of_indentation(lines: Sequence[str], at: int, above: int | None) -> tuple[str, str]:
    line = lines[at]
    if above is not None and line.strip():
        is_item = line.lstrip().startswith("- ")
        there, here = (_column(each, is_item=is_item) for each in (lines[above], line))
        if there != here:
            return (
                f"this line is not indented like those that it belongs with: it begins in column {here}, "
                f"and line {above + 1} in column {there}.",
                "Let all fields of one group begin in the same column.",
            )
    shown = f"The line is {given(line.strip())}. " if line.strip() else ""
    return "this line cannot be read.", f"{shown}Look here and at the line before for a missing colon."


def _above(lines: Sequence[str], at: int) -> int | None:
    """Return the nearest line above that says anything."""
    return next((n for n in range(at - 1, -1, -1) if lines[n].strip() and lines[n].lstrip()[0] != "#"), None)


def _column(line: str, *, is_item: bool) -> int:
    """Return the column, from 1, in which an item of a list begins, or the field in it."""
    blanks = " *" if is_item else " *(?:- +)*"
    found = re.match(blanks, line)
    return 1 + (found.end() if found else 0)


def _in_single_quotes(line: str) -> str:
    """Return a line whose value is in double quotes with it in single ones."""
    found = _FIELD.fullmatch(line) or _ITEM.fullmatch(line)
    if found is None or found["value"][0] != '"':
        return "it in single quotes: '...'"
    return _quoted(found["name"], found["value"].strip().strip('"'))


def _quoted(name: str, text: str) -> str:
    return _shown(name, _in_quotes(text))


def _in_quotes(text: str) -> str:
    """Write a text in quotes: in double ones where it has single ones, and needs no more than that."""
    if "'" in text and not {'"', "\\"} & {*text}:
        return f'"{text}"'
    return "'" + text.replace("'", "''") + "'"


def _shown(name: str, value: str) -> str:
    return visible(f"{name}: {value}" if name else f"- {value}")[:200]
