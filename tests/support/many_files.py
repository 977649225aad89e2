"""A process that has many files open, as a server of many kernels has."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

#: From this descriptor on select(2) takes none (FD_SETSIZE of glibc).
_TOO_MANY = 1024


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
