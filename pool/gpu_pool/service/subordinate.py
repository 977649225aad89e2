"""Whose the uids without a name are: many are a user's, who runs containers as them (subuid(5))."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpu_pool_client import procfs

#: Lines of OWNER:FIRST:COUNT; the owner is a name or a uid.
FILE: Final = Path("/etc/subuid")
_MOST_BYTES: Final = 1024 * 1024
#: Uids of people. What belongs to a system's account (root's containers, Docker's ``dockremap``)
#: runs for many people, who must not be one user, and least of all root.
_PEOPLE: Final = range(1000, 65534)


def subordinate_owner(uid: int, file: Path = FILE) -> str | None:
    """Return the name of the person whose subordinate uid it is.

    None if it is nobody's, a system account's or claimed by several, or where the file cannot be read.
    """
    owners = {owner for owner, ids in _ranges(file) if uid in ids}
    return _person(owners.pop()) if len(owners) == 1 else None


def _ranges(file: Path) -> Iterator[tuple[str, range]]:
    """Yield each owner and range; lines that are none are passed over, as the system's tools do."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES)
    except OSError:
        return
    for line in procfs.lines_of(content):
        owner, _, numbers = line.decode(errors="replace").partition(":")
        first, _, count = numbers.partition(":")
        if all(number.isascii() and number.isdecimal() and len(number) <= 10 for number in (first, count)):
            yield owner, range(int(first), int(first) + int(count))


def _person(owner: str) -> str | None:
    try:
        found = pwd.getpwuid(int(owner)) if owner.isdecimal() else pwd.getpwnam(owner)
    except (KeyError, ValueError, OverflowError):
        return None
    return found.pw_name if found.pw_uid in _PEOPLE else None
