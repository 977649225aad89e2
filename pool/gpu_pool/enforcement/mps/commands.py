"""How NVIDIA's tools are run: with a deadline, and what they say in words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu_pool.enforcement.tiers import TierFailed

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


def run(
    command: Sequence[str], *, timeout: float, text: str = "", environ: Mapping[str, str] | None = None
) -> str:
    """Run a command until it ends and return what it printed; kill it at the deadline.

    ``text`` is its standard input. Raises ``TierFailed`` with its own words if
    it fails or takes too long.
    """
    shown = " ".join((Path(command[0]).name, *command[1:], *text.split()))
    # Files, since a daemon it leaves behind may keep a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        told.write(text.encode())
        told.seek(0)
        try:
            done = subprocess.run(
                command,
                stdin=told,
                stdout=out,
                stderr=out,
                env=inherited() if environ is None else environ,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TierFailed(f"{shown} did not answer within {timeout:g} s.") from None
        except OSError as error:
            raise TierFailed(f"{shown} could not be run: {error}.") from None
        out.seek(0)
        words = out.read().decode(errors="replace").strip()
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
