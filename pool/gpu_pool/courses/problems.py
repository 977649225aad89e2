"""What is wrong with a course file: where, what was given, and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import BadRequest

#: Problems of one file that are kept, and about as many are looked for.
MOST_PROBLEMS: Final = 100
#: Those that are in the text of the error itself.
_TOLD: Final = 5
#: Characters of a value that are repeated.
_MOST_GIVEN: Final = 60
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
        super().__init__("\n".join(told), "There is more." if len(problems) > _TOLD else "")
        self.problems = tuple(problems[:MOST_PROBLEMS])


def given(value: object) -> str:
    """Repeat what was given: text in quotes and not too long, anything else by its kind."""
    if isinstance(value, str):
        return ascii(value if len(value) <= _MOST_GIVEN else value[: _MOST_GIVEN - 3] + "...")
    return "a list" if isinstance(value, list) else "a group of fields"


def accepted(names: Iterable[str]) -> str:
    """List the names that are accepted."""
    listed = ", ".join(names)
    return f"Accepted: {listed if len(listed) <= _MOST_ACCEPTED else listed[:_MOST_ACCEPTED] + '...'}."


def nearest(name: str, names: Iterable[str]) -> str:
    """Ask whether the most similar of the names was meant, if one is similar."""
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"Did you mean {by_lower[close[0]]}?" if close else ""
