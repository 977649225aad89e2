"""The processes of MPS on this machine, whoever's they are: found by name, told apart by environment."""

from __future__ import annotations

import os
import pwd
import signal
from pathlib import Path
from typing import Final

import psutil

from gpu_pool.isolation.tier import TierFailed

TOOL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
#: What asks a daemon has the daemon's name, without an option that makes it one.
_DAEMON: Final = frozenset({"-d", "--daemon", "-f", "--foreground"})


def mps_processes() -> list[int]:
    """Return the pids of all control daemons and servers that this process can see."""
    return [pid for pid in psutil.pids() if is_daemon(pid) or is_server(pid)]


def is_daemon(pid: int) -> bool:
    """Whether it is a control daemon."""
    words = _words(pid)
    return _named(words, TOOL) and not _DAEMON.isdisjoint(words)


def is_server(pid: int) -> bool:
    """Whether it is a server, which a control daemon has started."""
    return _named(_words(pid), SERVER)


def environment_of(pid: int) -> list[str]:
    """Return a process's environment, ``NAME=value`` each; empty where it is not for us to see."""
    return _read(pid, "environ")


def user_of(pid: int) -> int | None:
    """Return the effective user of a process, None if it has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def user_name_of(pid: int) -> str:
    """Return the name of a process's user, for a message."""
    uid = user_of(pid)
    try:
        return "another user" if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def kill(pid: int) -> None:
    """Kill a process, unless it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise TierFailed(f"The MPS process {pid} belongs to another user and cannot be ended.") from None


def _named(words: list[str], name: str) -> bool:
    # A script has its interpreter first.
    return any(word.rpartition("/")[2] == name for word in words[:3])


def _words(pid: int) -> list[str]:
    """Return the command line; of a zombie, nothing."""
    return _read(pid, "cmdline")


def _read(pid: int, what: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read().decode(errors="surrogateescape").split("\0")
    except OSError:  # it has ended, or is another user's
        return []
