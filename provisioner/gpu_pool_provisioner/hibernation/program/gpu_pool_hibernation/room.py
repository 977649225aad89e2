"""How much room an image may take: of its user, its course, of all, and of the disk."""

from __future__ import annotations

import os

from .folders import (
    BUSY,
    NEEDS,
    NOTE,
    STATE,
    is_callers,
    is_held,
    kernel_folders,
    read_said,
    size_of,
    write_said,
)
from .values import MIB, Call, Refused

#: What an image may take beyond a tenth more than its kernel's memory.
_MARGIN = 64 << 20


def reserved(call: Call, path: str, needs: int) -> int:
    """Note that an image is about to take room, and return how many bytes at most. Raises ``Refused``.

    Nobody waits for anybody: each notes it and looks once more, so of two that are too much one is refused,
    or both. Who would be refused has noted nothing, and is in nobody's way.
    """
    most = needs + needs // 10 + _MARGIN
    _refuse_without_room(call, path, most)
    write_said(path, NEEDS, {"bytes": most})
    _refuse_without_room(call, path, most)
    return most


def _refuse_without_room(call: Call, path: str, most: int) -> None:
    """Raise ``Refused`` where an image may take more than there is room.

    Where that is not the disk's: with how many bytes are ``missing`` of what the caller's kernels may take,
    and how many of what those of its ``course`` may.
    """
    folder, settings, course = call.settings.folder, call.settings, _course(path)
    free, of_all, mine, of_course = _free(folder), 0, 0, 0
    for each in kernel_folders(folder):
        takes = size_of(each)
        said = read_said(each, NEEDS).get("bytes", 0) if each != path and is_held(each, BUSY) else 0
        free -= max(0, said - takes)
        takes = max(said, takes)
        of_all += takes
        mine += takes if is_callers(call, read_said(each, STATE)) else 0
        of_course += takes if course and _course(each) == course else 0
    why = [f"the disk has {max(0, free) // MIB} MiB for it"] if most > free else []
    missing = []
    for bound, taken, whose in (
        (settings.all_mib, of_all, "kernels"),
        (settings.user_mib if call.caller.uid else 0, mine, "your kernels"),
        (settings.course_mib.get(course, 0), of_course, f"kernels of the course {course[:60]!a}"),
    ):
        left = max(0, bound * MIB - taken)
        missing.append(max(0, most - left) if bound else 0)
        if missing[-1]:
            why.append(f"of the {bound} MiB that {whose} may take on disk {left // MIB} MiB are left")
    if why:
        of_any, of_user, of_course = missing if most <= free else (0, 0, 0)
        raise Refused(
            f"its image may take {most // MIB} MiB, and {'; '.join(why)}.",
            missing=max(of_any, of_user),
            of_course=of_course,
            course=course,
        )


def _course(path: str) -> str:
    """Return the course of a kernel, as its user has noted it; empty for none."""
    note = read_said(path, NOTE).get("note")
    course = note.get("course") if isinstance(note, dict) else None
    return course if isinstance(course, str) else ""


def takes_too_much(call: Call, most: int, *written: str) -> str:
    """Return why an image is not written any further, by its folders; empty where it may be."""
    if size_of(*written) > most:
        return f"its image takes more than the {most // MIB} MiB that it may."
    if _free(call.settings.folder) < 0:
        return "the disk has got full meanwhile: a twentieth of it stays free."
    return ""


def _free(folder: str) -> int:
    """Return the bytes that the disk has for images: a twentieth of it stays free."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // 20
