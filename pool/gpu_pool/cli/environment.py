"""The environment that a command on a slice gets."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from gpu_pool_client import Lease
from gpu_pool_client.framework_caps import installed_frameworks, lease_caps, with_caps

_PYTHON: Final = re.compile(r"python[0-9.]*t?")
_SHEBANG: Final = re.compile(rb"#![ \t]*(/[^ \t\n]*/python[0-9.]*t?)[ \t\n]")


def environment_for(lease: Lease, command: str) -> dict[str, str]:
    """Return this process's environment with the slice's variables and framework caps added.

    The caps suit the frameworks of the Python that ``command`` is, or is
    written for, or would find on the PATH. What the user has set is kept.
    """
    limits = lease_caps(installed_frameworks(python_of(command)), lease)
    return {**os.environ, **with_caps(lease, limits).environment, **limits}


def python_of(command: str) -> str:
    """Return the Python that ``command`` runs with, as far as its name or first line tells."""
    located = shutil.which(command)
    if located and _PYTHON.fullmatch(Path(located).name):
        return located
    match = _SHEBANG.match(_first_bytes(located)) if located else None
    if match is not None:
        return os.fsdecode(match[1])
    return next((name for name in ("python", "python3") if shutil.which(name)), "python3")


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(256)
    except OSError:
        return b""
