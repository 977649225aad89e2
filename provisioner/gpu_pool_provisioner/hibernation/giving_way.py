"""Room on disk for a kernel that would end with its server: older ones of its user give way to it.

They are removed only where that makes room enough, and only what no server has. Who opens the notebook of one
next reads of it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.hibernation.calling import Program, ProgramRefused
from gpu_pool_provisioner.hibernation.left import (
    Hold,
    KernelRecord,
    Owner,
    hold,
    kernels_on_disk,
    mib_of,
    record_of,
    remove_image,
)
from gpu_pool_provisioner.session import texts

#: Seconds after which a notice that nobody has read is removed.
_KEPT_FOR: Final = 30 * 86_400.0


def make_room(program: Program, refused: ProgramRefused, owner: Owner) -> bool:
    """Remove the user's oldest kernels on disk until what was missing is there; whether it is. Blocks.

    Parameters
    ----------
    program
        What has them.
    refused
        What it said of the image for which there was no room. Where that is for its course, kernels of the
        same course alone are removed.
    owner
        Whose image that is.
    """
    oldest = sorted(kernels_on_disk(program), key=lambda each: float(each[1]["image"]["since"]))
    given: list[tuple[Hold, dict[str, Any]]] = []
    freed = 0
    for kernel, said in oldest:
        if freed >= refused.missing:
            break
        record = record_of(said)
        is_theirs = record is None or record.owner.hub_user == owner.hub_user
        is_of_course = not refused.course or (said["note"] or {}).get("course") == refused.course
        with suppress(OSError):
            if is_theirs and is_of_course and (held := hold(kernel)) is not None:
                given.append((held, said))
                freed += int(said["image"]["bytes"])
    is_made = 0 < refused.missing <= freed
    for held, said in given:
        is_made = is_made and _remove(program, held, said, owner)
        if not is_made:
            held.let_go()
    return is_made


def _remove(program: Program, held: Hold, said: dict[str, Any], owner: Owner) -> bool:
    """Remove one, and leave a notice for its owner; whether it is removed."""
    record = record_of(said)
    notice = _note(record, mib_of(said["image"]), owner) if record is not None else None
    if not remove_image(program, held.kernel):
        if notice is not None:
            notice.unlink(missing_ok=True)
        return False
    get_logger().info("A kernel on disk gave way to a later one of its user: %s", held.kernel)
    held.remove()
    return True


def told_once(owner: Owner) -> str:
    """Return what the owner reads, once, of a kernel that has given way; empty where none has. Blocks."""
    path = _notice_of(owner)
    try:
        said = json.loads(path.read_text())
        record = KernelRecord(owner, "", "", {}, said["count"], said["at"])
        told = texts.gave_way(record.in_words(said["mib"], time.time()), Path(said["to"]).name)
    except (OSError, ValueError, KeyError, TypeError):
        told = ""
    with suppress(OSError):
        path.unlink()
    return told


def _note(record: KernelRecord, mib: int, to: Owner) -> Path | None:
    """Write down that a kernel gives way, for who opens its notebook; return where, if that can be."""
    path = _notice_of(record.owner)
    said = {"at": record.at, "count": record.count, "mib": mib, "to": to.notebook}
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        for each in path.parent.iterdir():
            if time.time() - each.stat().st_mtime > _KEPT_FOR:
                each.unlink(missing_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        with open(descriptor, "w") as file:
            json.dump(said, file)
        Path(draft).replace(path)
    except OSError as error:
        get_logger().warning("That a kernel on disk gives way could not be noted: %s", error)
        return None
    return path


def _notice_of(owner: Owner) -> Path:
    name = hashlib.sha256(json.dumps(asdict(owner), sort_keys=True).encode()).hexdigest()[:32]
    return Path(jupyter_data_dir(), "gpu-pool", "gave-way", name)
