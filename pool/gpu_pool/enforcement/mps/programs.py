"""NVIDIA's programs: how its tools are run, and which processes of MPS there are on this machine.

Tools run with a deadline, and fail with their own words. Processes, whoever's
they are, are found by name and told apart by their environment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool_client._processes import account_of, owner_of
from gpu_pool_client._procfs import pids

_INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
#: Most of a tool's words that go into a message.
_SHOWN: Final = 300


def inherited() -> dict[str, str]:
    """Return what NVIDIA's programs need of this process's environment.

    A server of MPS may run as another user, who can read its environment; and
    variables of CUDA would steer it.
    """
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def find(tool: str) -> str:
    """Return the path of a tool of the NVIDIA driver."""
    path = shutil.which(tool)
    if path is None:
        raise TierFailed(
            f"{tool} was not found on this machine.",
            "It is part of the NVIDIA driver: install its package of compute tools (nvidia-compute-utils).",
        )
    return path


class NotAnswered(TierFailed):
    """A tool did not answer in time."""


class NotRun(TierFailed):
    """A tool could not be run, for want of processes, memory or disk: nothing is known of what it asks."""


def run(
    command: Sequence[str], *, timeout: float, text: str = "", environ: Mapping[str, str] | None = None
) -> str:
    """Run a command until it ends and return what it printed; kill it at the deadline.

    ``text`` is its standard input. Raises ``TierFailed`` with its own words if
    it fails, ``NotAnswered`` if it takes too long, and ``NotRun`` if it could not be run.
    """
    shown = " ".join((Path(command[0]).name, *command[1:], *text.split()))
    try:
        # Files, since a daemon it leaves behind may keep a pipe open for ever.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
            told.write(text.encode())
            told.seek(0)
            done = subprocess.run(
                command,
                stdin=told,
                stdout=out,
                stderr=out,
                env=inherited() if environ is None else environ,
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            words = out.read().decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        raise NotAnswered(f"{shown} did not answer within {timeout:g} s.") from None
    except OSError as error:
        raise NotRun(f"{shown} could not be run: {error}.") from None
    if done.returncode:
        raise TierFailed(f"{shown} failed: {words[-_SHOWN:] or f'status {done.returncode}'}")
    return words


_MEMORY: Final = re.compile(r"([0-9]+)([MG])", re.ASCII)


def is_memory(answer: str, mib: int) -> bool:
    """Whether an answer such as ``655M`` or ``3G`` means that much.

    The daemon keeps the limit to the byte and shows it rounded down to whole
    GiB from 1 GiB on: 1,621 MiB are ``1G`` (driver 580.159.04, H100).
    """
    match = _MEMORY.fullmatch(answer.strip())
    if match is None:
        return False
    return int(match[1]) == (mib // 1024 if match[2] == "G" else mib)


def is_percentage(answer: str, percent: int) -> bool:
    """Whether an answer such as ``2.0`` is that much."""
    try:
        return float(answer) == percent
    except ValueError:
        return False


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
