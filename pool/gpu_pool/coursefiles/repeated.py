"""What several slices of a course file say, and only one may: each is told at its own line.

This is looked for in the file as it is written, and not by the model of a course,
which compares slices only once nothing is wrong with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final

from gpu_pool.coursefiles.fields import read_line, read_request, read_yes_or_no
from gpu_pool.coursefiles.problems import Problem, given
from gpu_pool.coursefiles.text import Place, Tree, Written, in_words
from gpu_pool_client import BadRequest

_SLICES: Final = "slices"


def _default(value: object) -> bool | None:
    """Return True for the default; None for what any number of slices may say."""
    return read_yes_or_no(value) or None


#: Field → (its reader, what a second one is called, what to do about it).
_ONLY_ONCE: Final[dict[str, tuple[Callable[[object], Hashable], str, str]]] = {
    "name": (read_line, "{value} is already the name of {first}, on line {line}.", "Give it another name."),
    "request": (read_request, "{value} is already the request of {first}, on line {line}.", "Keep one."),
    "default": (_default, "{first} is already the default, on line {line}.", "Keep one default: true."),
}


def repeated(file: str, written: Written) -> Iterator[Problem]:
    """Yield every name, request and default of a slice that another slice before it has."""
    slices = written.tree.get(_SLICES) if isinstance(written.tree, dict) else None
    for field in _ONLY_ONCE:
        yield from _repeated(file, written, slices if isinstance(slices, list) else [], field)


def _repeated(file: str, written: Written, slices: list[Tree], field: str) -> Iterator[Problem]:
    read, message, remedy = _ONLY_ONCE[field]
    seen: dict[Hashable, Place] = {}
    for number, each in enumerate(slices):
        value = each.get(field) if isinstance(each, dict) else None
        try:
            meaning = None if value is None else read(value)
        except BadRequest:  # told by the model
            continue
        place = (_SLICES, number, field)
        if meaning is None or seen.setdefault(meaning, place) == place:
            continue
        first = seen[meaning]
        words = message.format(value=given(value), first=in_words(first[:-1]), line=written.lines[first])
        yield Problem(file, written.lines[place], in_words(place), words, remedy)
