"""What ``health`` and ``doctor`` say of the course files: what is wrong, and what holds meanwhile."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_pool.cli.checks import Check, State, is_served
from gpu_pool.cli.courses import CheckedFile, read_files
from gpu_pool.cli.formatting import safe
from gpu_pool.cli.session import CommandSession, complete
from gpu_pool.courses.access import NOT_IN_COURSE
from gpu_pool_client import GpuPoolError, Holder, NotAllowed, Pool

#: Files that are told of, and mistakes of each.
_MOST_FILES, _MOST_OF_FILE = 20, 5
_LONGEST = 600


def check_courses(session: CommandSession) -> Iterator[Check]:
    """Read the course files, and ask the pool what it does without those that are wrong."""
    from gpu_pool.settings import load_settings

    try:
        settings = load_settings()
        if not settings.courses_dir:
            return
        found = read_files((), settings)
    except GpuPoolError as error:
        is_ours = not is_served(session) or not isinstance(error.__cause__, PermissionError)
        remedy = error.remedy or "Correct c.PoolSettings.courses_dir, or the folder's permissions."
        yield Check("courses", "broken" if is_ours else "note", error.message, remedy)
        return
    found = [each for each in found if each.course or _is_ours_to_read(each.path, session)]
    wrong = [each for each in found if each.course is None]
    if len(wrong) < len(found):
        names = ", ".join(safe(each.name) for each in found if each.course is not None)
        yield Check("courses", "ok", safe(names, _LONGEST))
    offered = complete(_offered(session, [each.name for each in wrong[:_MOST_FILES]]))
    for each, is_offered in zip(wrong, offered, strict=False):
        yield from _of_file(each, is_offered)
    if len(wrong) > _MOST_FILES:
        yield Check(
            "courses", "broken", f"and {len(wrong) - _MOST_FILES} more files", "gpu-pool courses check"
        )
    for each in found:
        for warning in each.warnings[:_MOST_OF_FILE]:
            what = f"{warning.field}: {warning.message}" if warning.field else warning.message
            told = safe(f"{each.path.name}{_line(warning.line)}: {what}", _LONGEST)
            yield Check("courses", "note", told, safe(warning.remedy, _LONGEST))


def _of_file(checked: CheckedFile, is_offered: bool | None) -> Iterator[Check]:
    meanwhile = {
        True: "its last good version is in force until the service ends",
        False: "the course is not offered",
        None: "",
    }[is_offered]
    state: State = "note" if is_offered else "broken"
    for problem in checked.problems[:_MOST_OF_FILE]:
        what = f"{problem.field}: {problem.message}" if problem.field else problem.message
        told = f"{checked.path.name}{_line(problem.line)}: {what.removesuffix('.')}"
        remedy = f"{problem.remedy} To check it: gpu-pool courses check {safe(str(checked.path), 300)}"
        yield Check("courses", state, safe(f"{told}; {meanwhile}" if meanwhile else told, _LONGEST), remedy)


def _line(number: int | None) -> str:
    return "" if number is None else f", line {number}"


def _is_ours_to_read(path: Path, session: CommandSession) -> bool:
    """Whether we should be able to read this: what a service alone may read is not wrong."""
    return not is_served(session) or os.access(path, os.R_OK)


async def _offered(session: CommandSession, names: Sequence[str]) -> list[bool | None]:
    """Return of each course whether the pool offers it all the same; None where it cannot be asked."""
    if not names:
        return []
    try:
        async with session.connect() as pool:
            return [await _is_offered(pool, name) for name in names]
    except GpuPoolError:  # told by other checks
        return [None] * len(names)


async def _is_offered(pool: Pool, name: str) -> bool | None:
    try:
        return await pool.offers(Holder(getpass.getuser(), name)) is not None
    except NotAllowed as error:
        # Of a course that cannot be used nobody is told whether they are in it.
        return True if error.message == NOT_IN_COURSE else None
