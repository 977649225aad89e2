"""The processes of MPS on this machine, whoever's they are: found by name, told apart by environment."""

from __future__ import annotations

import os
import signal
from typing import Final

from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client._processes import account_of, owner_of
from gpu_pool_client._procfs import pids

TOOL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
#: What asks a daemon has the daemon's name, without an option that makes it one.
_DAEMON: Final = frozenset({"-d", "--daemon", "-f", "--foreground"})


def mps_processes() -> list[int]:
    """Return the pids of all control daemons and servers that this process can see."""
    return [pid for pid in pids() if is_daemon(pid) or is_server(pid)]


def is_daemon(pid: int) -> bool:
    """Whether it is a control daemon."""
    words = _words(pid)
    return _named(words, TOOL) and not _DAEMON.isdisjoint(words)


def is_server(pid: int) -> bool:
    """Whether it is a server, which a control daemon has started."""
    return _named(_words(pid), SERVER)


def is_believed(pid: int) -> bool:
    """Whether a process with the name of MPS is MPS: root's and our own by the name, others' by the program.

    Any user can give a process any name, and one that is not MPS keeps nobody off a GPU.
    """
    owner = owner_of(pid)
    if owner in (0, os.geteuid()):
        return True
    # Imported here because few need it, and with its package it loads NVML.
    from gpu_pool.enforcement.watchdog.processes import program_of

    # It has no owner once it has ended. One that we may not look at may be what it says.
    return owner is not None and (program_of(pid) in (TOOL, SERVER) or _is_hidden(pid))


def environment_of(pid: int) -> list[str]:
    """Return a process's environment, ``NAME=value`` each; empty where it is not for us to see."""
    return _read(pid, "environ")


def user_name_of(pid: int) -> str:
    """Return the name of a process's user, for a message."""
    uid = owner_of(pid)
    return "another user" if uid is None else account_of(uid)


def kill(pid: int) -> None:
    """Kill a process, unless it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise TierFailed(f"The MPS process {pid} belongs to another user and cannot be ended.") from None


def _is_hidden(pid: int) -> bool:
    try:
        os.readlink(f"/proc/{pid}/exe")
    except PermissionError:
        return True
    except OSError:  # it has ended
        pass
    return False


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
