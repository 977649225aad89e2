"""What instructors change of a course file: one to begin with, what is theirs, what a change is. Pure."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from gpu_pool.courses.model import CourseFile
from gpu_pool.courses.text import FileProblem, Tree, read_text

#: What administrators alone may change: who teaches a course, what it gets of the pool beside
#: the others, what its servers cost the cluster, and what its students' jobs run. All else is its
#: instructors' own.
RESERVED: Final = ("instructors", "quota", "weight", "priority", "batch", "kubernetes", "slurm")
#: Lines of a difference that are shown.
_MOST_LINES: Final = 400
_CONTEXT: Final = 3
#: Lines of which the shortest difference is looked for.
_MOST_COMPARED: Final = 600


def digest(data: bytes) -> str:
    """Return what tells one content of a file from all others."""
    return hashlib.sha256(data).hexdigest()


def reserved_changes(
    file: str, new: CourseFile, text: str, old: CourseFile, old_text: str | None
) -> tuple[FileProblem, ...]:
    """Return what was changed that only administrators may change, with how it was.

    ``text`` says what ``new`` is; ``old_text`` is None where no good text says what ``old`` is.
    """
    changed = [name for name in RESERVED if getattr(new, name) != getattr(old, name)]
    if not changed:
        return ()
    lines = read_text(file, text).lines
    before = read_text(file, old_text).tree if old_text is not None else None
    return tuple(
        FileProblem(
            file, lines.get((name,)), name, "only an administrator may change this.", _put_back(name, before)
        )
        for name in changed
    )


def _put_back(name: str, before: Tree) -> str:
    if not isinstance(before, dict):
        return "Put it back as it was."
    return f"Put it back: {name}: {_flow(before[name])}" if name in before else "Remove it."


def _flow(tree: Tree) -> str:
    """Write values in one line of YAML."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_flow, tree)) + "]"
    return tree or ""


def difference(before: str, after: str) -> tuple[str, ...]:
    """Return a unified difference of two texts, line by line; only the first of very many."""
    # As every editor has them: what else YAML takes for the end of a line is seen in the line.
    old, new = (text.removesuffix("\n").split("\n") if text else [] for text in (before, after))
    first = _alike(old, new)
    last = _alike(old[first:][::-1], new[first:][::-1])
    # To find the shortest difference of two long texts can take minutes.
    is_long = max(len(old), len(new)) - first - last > _MOST_COMPARED
    context = 0 if is_long else _CONTEXT
    begin, end = max(0, first - context), max(0, last - context)
    old, new = old[begin : len(old) - end], new[begin : len(new) - end]
    found = list((_coarse if is_long else _unified)(old, new, begin))
    if len(found) > _MOST_LINES:
        return (*found[:_MOST_LINES], f"… and {len(found) - _MOST_LINES} lines more")
    return tuple(found)


def _coarse(old: Sequence[str], new: Sequence[str], begin: int) -> Iterator[str]:
    """Yield all of a part as removed, and all that takes its place as added."""
    yield f"@@ -{begin + 1},{len(old)} +{begin + 1},{len(new)} @@"
    yield from (f"-{line}" for line in old)
    yield from (f"+{line}" for line in new)


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    """Return how many lines are the same at the beginning."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(old), len(new)))


def _unified(old: Sequence[str], new: Sequence[str], begin: int) -> Iterator[str]:
    """Yield a unified difference of parts of texts that begin after so many lines."""
    for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(_CONTEXT):
        (_, i, _, j, _), (_, _, i_end, _, j_end) = group[0], group[-1]
        yield f"@@ -{begin + i + 1},{i_end - i} +{begin + j + 1},{j_end - j} @@"
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                yield from (f" {line}" for line in old[i1:i2])
            else:
                yield from (f"-{line}" for line in old[i1:i2])
                yield from (f"+{line}" for line in new[j1:j2])


def how_much(lines: tuple[str, ...]) -> str:
    """Say how much a difference changes: ``2 lines added, 1 removed``."""
    counted = (("added", "+"), ("removed", "-"))
    found = [(sum(line.startswith(sign) for line in lines), verb) for verb, sign in counted]
    said = [(number, verb) for number, verb in found if number]
    words = [f"{number} {verb}" for number, verb in said]
    if said:
        number, verb = said[0]
        words[0] = f"{number} {'line' if number == 1 else 'lines'} {verb}"
    return ", ".join(words)


_TEMPLATE: Final = """\
# yaml-language-server: $schema=course.schema.json
# The course {name}. Lines that begin with # are comments.
# Check this file after every change:  gpu-pool courses check {name}.yaml

title: {name}

# Who is in the course. Without groups and users: everybody.
who:
  groups: [{name}]
  # users: [ada, grace]

# Who teaches it, by the names they log in with. They may always use it.
# instructors: [turing]

# What students may pick: a share of a GPU (2%), an amount of its memory (2GiB), or whole GPUs (1).
# 5%..20% is 5% for certain, and up to 20% of the memory while nobody else holds it.
slices:
  - name: Small
    request: 5%
    default: true
  - name: Large
    request: 20%

# How much each student may have at once, and how much all of them together.
per_user:
  slices: 1
# quota:
#   share: 100%
#   gpu_hours_per_week: 100

# A slice is given back after this time at the latest.
longest_lease: 4h

# When nothing has run for this long and somebody waits, the slice goes to them, where that is possible.
# Without this line: 60s. For only after idle_limit: never.
# yield_after: 60s

# When nothing has run for this long, the slice is lent to others, where that is possible.
# Where that is not possible: keep the slice, or end the kernel after a warning.
idle_limit: 30min
when_idle: keep

# Modules that kernels have imported when they start, so that the first cell need not wait for them.
# preload: [numpy, torch]

# When the course runs. Without these lines: always.
# weeks:
#   from: 2026-10-12
#   to: 2026-12-18
# hours:
#   - Mon 10:00-12:00
#   - Wed,Thu 14:00-16:00
# time_zone: Europe/Berlin
"""


def template(name: str) -> str:
    """Return the text of a commented course file for a course of that name."""
    return _TEMPLATE.format(name=name)
