"""Processes in cgroups that are named as a kubelet and a container runtime name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


def _hierarchy() -> Path:
    """Return the root of a hierarchy in which any process may be put anywhere; skip where there is none."""
    for root in (_ROOT, _ROOT / "pids", _ROOT / "systemd"):
        if (root / "cgroup.procs").exists() and os.access(root / "cgroup.procs", os.W_OK):
            return root
    pytest.skip("needs root, and cgroups that can be written")


@contextmanager
def in_cgroup(pid: int, name: str) -> Iterator[None]:
    """Have a process in the cgroup of this name, below the root."""
    root = _hierarchy()
    made = [root / parent for parent in (*reversed(Path(name).parents), Path(name)) if str(parent) != "."]
    new = [folder for folder in made if not folder.exists()]
    try:
        for folder in new:
            folder.mkdir()
        (made[-1] / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for each in (made[-1] / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(each)
        for folder in reversed(new):
            folder.rmdir()
