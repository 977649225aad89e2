"""YAML as course files use it: text in, a tree of texts with their lines out, and what is wrong with it.

A small part of YAML: one document of mappings, lists and values, at most a few
levels deep. Values stay the text that was written, and the field they are in
says what they mean. So nothing is turned into something else on the way: ``no``
and ``on`` are not truth values, ``20:30`` and ``007`` are not numbers. What can
refer to something else (aliases, tags) or say something twice is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import yaml

from gpu_pool.courses.mistakes import explain, of_line
from gpu_pool.names import hides, named, visible
from gpu_pool.policy.course_values import given
from gpu_pool_client import BadRequest

#: What was written. None stands where something was, and was refused.
Tree: TypeAlias = "str | list[Tree] | dict[str, Tree] | None"
#: The way to a value: keys, and numbers of items from 0.
Place: TypeAlias = tuple[str | int, ...]

#: The parser in C where PyYAML has it, which is some ten times as fast.
PARSER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST: Final = 6
#: Items of one list, and fields of one group.
MOST_LISTED: Final = 10_000
_MOST_LINE: Final = 200
_TOO_DEEP: Final = ("too many levels.", "See the example files.")
_WRITE: Final = "Write a value, or remove the line."
#: As word processors write them.
_CURLY: Final = "\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb"
#: An item of a list, but for the space behind its dash: it breaks no line, as web pages have it.
_NO_BREAK_ITEM: Final = re.compile("-[\u00a0\u2007\u202f]")
_QUOTE: Final = "Put a text that begins with a special character in quotes: '...'."


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What a file says, and where."""

    tree: Tree
    #: The line of each key and item, from 1.
    lines: Mapping[Place, int]
    #: What was refused; None stands in the tree in its place.
    problems: tuple[FileProblem, ...]
    #: The places of those.
    refused: frozenset[Place]


class UnreadableText(Exception):
    """The text is no YAML from some line on."""

    def __init__(self, problem: FileProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_text(file: str, text: str) -> WrittenText:
    """Read the text of a file. Raises ``UnreadableText`` where the rest cannot be made sense of."""
    reader = _Reader(file, text)
    try:
        tree = reader.document()
    except yaml.MarkedYAMLError as error:
        raise UnreadableText(_syntax(file, reader, error)) from None
    except yaml.YAMLError:
        raise UnreadableText(_unprintable(file, text)) from None
    return WrittenText(tree, reader.lines, tuple(reader.problems), frozenset(reader.refused))


class _Reader:
    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._events: Iterator[Any] = yaml.parse(text, Loader=PARSER)
        self.text = text.split("\n")
        self._ends = [index for index, each in enumerate(text) if each == "\n"]
        self.lines: dict[Place, int] = {}
        self.problems: list[FileProblem] = []
        self.refused: set[Place] = set()
        #: Lines in which nothing was found: there may be thousands of keys on one.
        self._plain: set[int] = set()

    def line(self, mark: Any) -> int:
        """Return the line of a mark, from 0, as every editor counts: YAML has more kinds of line ends."""
        return bisect_right(self._ends, mark.index - 1)

    def document(self) -> Tree:
        """Return the tree of the one document."""
        next(self._events)  # of the stream
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return {}
        tree = self._value(next(self._events), ())
        next(self._events)  # of the document's end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            problem = self._problem(after, (), "a second document begins here (---).", "Use one file each.")
            raise UnreadableText(problem)
        return tree

    def _value(self, event: Any, place: Place) -> Tree:
        self.lines.setdefault(place, self.line(event.start_mark) + 1)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(
                event, place, "references (* and &) are not supported.", f"Write the value out. {_QUOTE}"
            )
        elif event.tag is not None:
            self._refuse(
                event, place, f"the tag {given(event.tag)} is not supported.", f"Leave it out. {_QUOTE}"
            )
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(event, place)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(event, place)
        if isinstance(event, yaml.ScalarEvent) and place not in self.refused:
            return self._text(event, place)
        return None

    def _text(self, event: Any, place: Place) -> Tree:
        value: str = event.value
        if event.style:
            return value
        if not place and not value:
            return {}
        if not value:
            is_comment = "#" in self.text[self.line(event.start_mark)]
            remedy = f"What begins with # is a comment. {_QUOTE}" if is_comment else _WRITE
            self._refuse(event, place, "is empty.", remedy)
        elif len(value) > 1 and value[0] in _CURLY and value[-1] in _CURLY:
            self._refuse(
                event,
                place,
                f"{given(value)} is in curly quotes.",
                f"Write {value[1:-1][:60]!r} with straight ones.",
            )
        elif _NO_BREAK_ITEM.match(value):
            message = "what is behind the dash only looks like a space."
            self._refuse(event, place, message, f"Write {visible('- ' + value[2:].strip())[:_MOST_LINE]}.")
        return None if place in self.refused else value

    def _list(self, event: Any, place: Place) -> Tree:
        self._check_depth(event, place)
        items: list[Tree] = []
        for each in self._until(yaml.SequenceEndEvent):
            self._check_number(each, place, len(items))
            items.append(self._value(each, (*place, len(items))))
        return items

    def _mapping(self, event: Any, place: Place) -> Tree:
        self._check_depth(event, place)
        found: dict[str, Tree] = {}
        for event_of_key in self._until(yaml.MappingEndEvent):
            self._check_number(event_of_key, place, len(found))
            key = event_of_key.value if isinstance(event_of_key, yaml.ScalarEvent) else None
            if key is None or key in found:
                self._no_key(event_of_key, place, key)
                continue
            here = (*place, key)
            at = self.line(event_of_key.start_mark)
            if not key.isidentifier() and at not in self._plain:
                told = of_line(self.text[at])
                if told is not None:
                    raise UnreadableText(FileProblem(self._file, at + 1, in_words(place), *told))
                self._plain.add(at)
            self.lines[here] = at + 1
            found[key] = self._value(next(self._events), here)
        return found

    def _no_key(self, event: Any, place: Place, key: str | None) -> None:
        """Tell that this is not, or not again, the name of a field; pass over what it names."""
        if key is None:
            raise UnreadableText(self._problem(event, place, "this is not a field.", "Write NAME: VALUE."))
        before = (*place, key)
        message = f"{given(key)} is already given on line {self.lines[before]}."
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(self._problem(event, place, message, "Keep one of the two."))
        known = len(self.problems)
        self._value(next(self._events), (*before, "again"))
        del self.problems[known:]

    def _until(self, end: type[Any]) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield event

    def _check_number(self, event: Any, place: Place, number: int) -> None:
        if number >= MOST_LISTED:
            message = f"there are more than {MOST_LISTED} in one list or group of fields."
            remedy = f"Accepted: at most {MOST_LISTED}. For more students, name a group that has them."
            raise UnreadableText(self._problem(event, place, message, remedy))

    def _check_depth(self, event: Any, place: Place) -> None:
        if len(place) >= _DEEPEST:
            raise UnreadableText(self._problem(event, place[:2], *_TOO_DEEP))

    def _refuse(self, event: Any, place: Place, message: str, remedy: str) -> None:
        self.refused.add(place)
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(self._problem(event, place, message, remedy))

    def _problem(self, event: Any, place: Place, message: str, remedy: str) -> FileProblem:
        return FileProblem(self._file, self.line(event.start_mark) + 1, in_words(place), message, remedy)


def in_words(place: Place) -> str:
    """Name a place as a person would: ``slices no. 2, request``."""
    words = ""
    for part in place:
        if isinstance(part, int):
            words += f" no. {part + 1}"
        else:
            words += f"{', ' if words else ''}{part if part.isidentifier() else given(part)}"
    return words.strip()


def _syntax(file: str, reader: _Reader, error: yaml.MarkedYAMLError) -> FileProblem:
    mark, problem = error.problem_mark or error.context_mark, error.problem or ""
    if mark is None:
        return FileProblem(file, None, "", f"is not YAML: {problem}.")
    at = reader.line(mark)
    if "nesting depth" in problem:  # libyaml's own limit, since 0.2.6
        return FileProblem(file, at + 1, "", *_TOO_DEEP)
    since = None if error.context_mark is None else reader.line(error.context_mark)
    found = explain(reader.text, at, since, problem)
    return FileProblem(file, found.line + 1, "", found.message, found.remedy)


def hidden(file: str, text: str) -> Iterator[FileProblem]:
    """Yield the lines of a text that have what is not seen, and makes them read as something else."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        found = next((each for each in line if each != "\t" and hides(each)), None)
        if found is not None:
            message = f"has {named(found)}, which is not seen and may let the line read as something else."
            shown = visible(line.strip(" "))[:_MOST_LINE]
            yield FileProblem(file, number, "", message, f"Remove it: {shown}")


def _unprintable(file: str, text: str) -> FileProblem:
    """Say where the first character stands that YAML does not allow."""
    lines = enumerate(text.split("\n"), start=1)
    allowed = yaml.reader.Reader.NON_PRINTABLE
    line = next((number for number, each in lines if allowed.search(each)), None)
    found = next(hidden(file, text), None)
    return found or FileProblem(file, line, "", "has a character that cannot be printed.", "Remove it.")


#: Problems of one file that are kept, and about as many are looked for.
MOST_PROBLEMS: Final = 100
#: Those that are in the text of the error itself.
_TOLD: Final = 5
_MOST_ACCEPTED: Final = 400


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One thing that is wrong with a file, for its author to read."""

    #: The file's name, without its folder.
    file: str
    #: From 1; None where it is not about a line.
    line: int | None
    #: The field in words, such as ``slices no. 2, request``; empty where it is about the whole file.
    field: str
    #: What was given, and why that is wrong.
    message: str
    #: What is accepted, or what to do.
    remedy: str = ""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        what = f"{self.field}: {self.message}" if self.field else self.message
        return f"{where}: {what} {self.remedy}".strip()


class BadCourseFile(BadRequest):
    """A course file that cannot be used. ``problems`` are what was found, by line."""

    def __init__(self, problems: Sequence[FileProblem]) -> None:
        told = [str(problem) for problem in problems[:_TOLD]]
        super().__init__("\n".join(told), "There are more problems." if len(problems) > _TOLD else "")
        self.problems = tuple(problems[:MOST_PROBLEMS])


def accepted(names: Iterable[str]) -> str:
    """List the names that are accepted."""
    listed = ", ".join(names)
    return f"Accepted: {listed if len(listed) <= _MOST_ACCEPTED else listed[:_MOST_ACCEPTED] + '...'}."
