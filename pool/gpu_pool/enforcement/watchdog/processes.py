"""What ``/proc`` says of a process: its owner, its program, the lease in its environment."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from gpu_pool.devices.activity import environment_of
from gpu_pool_client import Process
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import account_of, owner_of

_MARK: Final = b"GPU_POOL_LEASE="


def own_namespace() -> str:
    """Name the pid namespace of this process, without asking the system each time."""
    return Process.current().namespace


def lease_in_environment(pid: int) -> str:
    """Return the lease that a process was started on, by its environment; empty if none can be seen.

    A user can write there what they like: it is to be believed only of a
    process that belongs to the lease's own user.
    """
    marks = (each for each in environment_of(pid) if each.startswith(_MARK))
    return next(marks, b"")[len(_MARK) :].decode(errors="replace")


@functools.lru_cache(maxsize=4096)
def first_owner(process: Process) -> int | None:
    """Return the real user id that a process had when it was first asked for.

    It is asked for soon after the process was attached. What a user has
    attached is theirs, even if it becomes another's later, as with sudo.
    """
    owner = owner_of(process.pid)
    return owner if process.is_alive() else None


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs, if root has put it there; else an empty text.

    Unlike the name of the process, it is not its user's to choose. The program
    must be where it seems to be: a mount of the user's own could rename any.
    """
    link = f"/proc/{pid}/exe"
    try:
        path, found = Path(os.readlink(link)), os.stat(link)  # noqa: PTH116 - no path of this view
        is_there = os.path.samestat(path.stat(), found)
    except OSError:  # it has ended, or is another user's, or runs in a container
        return ""
    return path.name if is_there and found.st_uid == 0 else ""


def describe(pid: int) -> tuple[str, str]:
    """Return the user and the name of a process, as far as they can be seen; its name is a user's choice."""
    owner, found = owner_of(pid), procfs.stat(pid)
    if owner is None or found is None:
        return "?", "?"
    return account_of(owner), found.name
