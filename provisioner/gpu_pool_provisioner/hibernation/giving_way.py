"""Room on disk for a kernel that would end with its server: older ones of its user give way to it.

They are removed only where that makes room enough, and only what no server has. Who opens the notebook of one
next reads of it, as of every kernel that is no more: the next server tells it below a cell.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.hibernation.calling import MissingRoom, Program
from gpu_pool_provisioner.hibernation.left import (
    Hold,
    KernelRecord,
    Owner,
    day_in_words,
    hold,
    is_on_disk,
    kernels_on_disk,
    mib_of,
    record_of,
    remove_image,
)
from gpu_pool_provisioner.session import texts

#: Seconds after which a notice that nobody has read is removed.
_KEPT_FOR: Final = 30 * 86_400.0


def make_room(program: Program, room: MissingRoom, owner: Owner, is_wanted: Callable[[], bool]) -> bool:
    """Remove the user's oldest kernels on disk until what was missing is there; whether it is. Blocks.

    Parameters
    ----------
    program
        What has them.
    room
        What is missing for the image of one more.
    owner
        Whose image that is. Others who have the same account keep theirs.
    is_wanted
        Whether that kernel is still to go to disk: nothing is removed for one that has ended.
    """
    held: dict[str, Hold] = {}
    found = {}
    for kernel, said in kernels_on_disk(program):
        record = record_of(said)
        if record is not None and record.owner.hub_user == owner.hub_user:
            with suppress(OSError):
                if (hold_of := hold(kernel)) is not None:
                    held[kernel], found[kernel] = hold_of, said
    images = [
        Removable(
            kernel, float(said["image"]["since"]), said["image"]["bytes"], said["note"].get("course") or ""
        )
        for kernel, said in found.items()
    ]
    chosen = gives_way(images, room)
    is_made = bool(chosen)
    for kernel in chosen:
        is_made = is_made and is_wanted() and _remove(program, held.pop(kernel), found[kernel], owner)
    for each in held.values():
        each.close()
    return is_made


class Removable(NamedTuple):
    """A kernel on disk that may give way: since when it is there (Unix seconds), and its bytes."""

    kernel: str
    since: float
    size: int
    course: str


def gives_way(images: Iterable[Removable], room: MissingRoom) -> list[str]:
    """Return the kernels that make room for one more, the oldest first; none where all do not suffice."""
    oldest = sorted(images, key=lambda each: each.since)
    chosen: list[Removable] = []
    for needs, those in (
        (room.of_course, [each for each in oldest if each.course == room.course]),
        (room.missing, oldest),
    ):
        freed = sum(each.size for each in chosen)
        for each in those:
            if freed < needs and each not in chosen:
                chosen.append(each)
                freed += each.size
        if freed < needs:
            return []
    return [each.kernel for each in chosen]


def _remove(program: Program, held: Hold, said: dict[str, Any], owner: Owner) -> bool:
    """Remove one, and leave a notice for its owner; whether it is removed."""
    record = KernelRecord.read(said["note"])
    has, why = record.has_in_words(mib_of(said["image"])), texts.gave_way(Path(owner.notebook).name)
    write_notice(record.owner, record.at, has, why)
    if not remove_image(program, held.kernel):
        write_notice(record.owner, record.at, has, texts.NOT_ON_DISK)
        held.close()
        return False
    get_logger().info("A kernel on disk gave way to a later one of its user: %s", held.kernel)
    held.remove()
    return True


def write_notice(owner: Owner, at: float, has: str, why: str) -> None:
    """Write down that an owner's kernel is gone, in place of what was written before. Blocks.

    Parameters
    ----------
    owner
        Whose kernel it was.
    at
        When it was there last, in Unix seconds.
    has
        What it had, in words; empty where that is not known.
    why
        Why it is gone, as the end of a sentence.
    """
    path = _notice_path(owner)
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        for each in path.parent.iterdir():
            if time.time() - each.stat().st_mtime > _KEPT_FOR:
                each.unlink(missing_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
        with open(descriptor, "w") as file:
            json.dump({"at": at, "has": has, "why": why}, file)
        Path(draft).replace(path)
    except OSError as error:
        get_logger().warning("That a kernel is gone could not be noted for its notebook: %s", error)


def told_of(program: Program, owner: Owner) -> str:
    """Return what was written for an owner, once; empty where nothing was, or another server has the kernel.

    Blocks. Raises ``ProgramRefused``.
    """
    if not _notice_path(owner).exists() or is_on_disk(program, owner):
        return ""
    return take_notice(owner)


def take_notice(owner: Owner) -> str:
    """Return what was written for an owner, and remove it; empty where nothing was. Blocks."""
    path = _notice_path(owner)
    try:
        said = json.loads(path.read_text())
        which = texts.left(day_in_words(float(said["at"]), time.time()), str(said["has"]))
        told = texts.is_gone(which, str(said["why"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        told = ""
    with suppress(OSError):
        path.unlink()
    return told


def _notice_path(owner: Owner) -> Path:
    name = hashlib.sha256(json.dumps(asdict(owner), sort_keys=True).encode()).hexdigest()[:32]
    return Path(jupyter_data_dir(), "gpu-pool", "gone", name)
