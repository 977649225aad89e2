"""What ``/proc`` says of a process: its parent, its owner, the lease in its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from gpu_pool_client import Process
from gpu_pool_client.processes import boot_id

_MARK: Final = b"GPU_POOL_LEASE="
#: A tree of processes deeper than this is a circle: a pid was used again while we looked.
_DEEPEST: Final = 256


def own_namespace() -> str:
    """Name the pid namespace of this process, without asking the system each time."""
    return Process.current().namespace


def line_of(pid: int) -> Iterator[Process]:
    """Yield a process and those it descends from, as far as they can be seen."""
    for _ in range(_DEEPEST):
        found = _look(pid)
        if found is None:
            return
        process, pid = found
        yield process


def lease_in_environment(pid: int) -> str:
    """Return the lease that a process was started on, by its environment; empty if none can be seen.

    A user can write there what they like: it is to be believed only of a
    process that belongs to the lease's own user.
    """
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return ""
    marks = (each for each in content.split(b"\0") if each.startswith(_MARK))
    return next(marks, b"")[len(_MARK) :].decode(errors="replace")


def owner_of(pid: int) -> int | None:
    """Return the Unix user id of a process, or None if it is not there."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - looked at often
    except OSError:
        return None


def describe(pid: int) -> tuple[str, str]:
    """Return the user and the name of a process, as far as they can be seen."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return process.username(), process.name()
    except psutil.Error:
        return "?", "?"


def _look(pid: int) -> tuple[Process, int] | None:
    """Return a living process and its parent's pid: fields 22 and 4 of ``/proc/PID/stat`` (proc(5))."""
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[19]), boot_id(), own_namespace()), int(fields[1])
