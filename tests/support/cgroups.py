"""Processes in cgroups that are named as a kubelet and a container runtime name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
def limited_memory(mib: int) -> Iterator[Path]:
    """Yield the ``cgroup.procs`` of a group whose processes may have no more memory than this together."""
    first = _ROOT / "memory"
    root, limit = (first, "memory.limit_in_bytes") if first.exists() else (_ROOT, "memory.max")
    group = root / f"gpu-pool-test-{os.getpid()}"
    try:
        if root is _ROOT:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError:
        pytest.skip("needs root, and cgroups that can limit memory")
    try:
        (group / limit).write_text(str(mib << 20))
        yield group / "cgroup.procs"
    finally:
        for each in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it is ending
                (root / "cgroup.procs").write_text(each)
        group.rmdir()


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
