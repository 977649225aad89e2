"""A process that has many files open, as a server of many kernels has."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Sequence

import pytest

#: From this descriptor on select(2) takes none (FD_SETSIZE of glibc).
_TOO_MANY = 1024
#: Becomes the command that is given, which finds all these files open.
_LEAVES_OPEN = f"""
import os, sys
for number in range(3, {_TOO_MANY} + 1):
    os.dup2(0, number)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Have more files open in this process than select(2) takes."""
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * _TOO_MANY
    if hard < wanted:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < _TOO_MANY:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def left_open(command: Sequence[str]) -> list[str]:
    """Return what runs a command to which more files are left open than select(2) takes."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < 2 * _TOO_MANY:
        pytest.skip(f"a process may open {allowed} files here")
    return [sys.executable, "-c", _LEAVES_OPEN, *command]
