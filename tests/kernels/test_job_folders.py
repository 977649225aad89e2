"""The folders of jobs' main processes among a node's temporary files, and which of them are removed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Has a folder until it is killed, on a node of this name, whose disk may have no locks, as Lustre mounted
#: without ``flock``.
_JOB = """
import fcntl, os, sys, types
from gpu_pool_kernels.inkernel.job import own_folder
os.uname = lambda: types.SimpleNamespace(nodename={node!r})
def fails(*_):
    raise OSError({error}, os.strerror({error}))
if {error}:
    fcntl.flock = fails
print(own_folder(), flush=True)
sys.stdin.read()
"""


@contextmanager
def _job(base: Path, node: str = "n1", error: int = 0) -> Iterator[Path]:
    """Run one; return its folder. It is killed at the end."""
    argv = [sys.executable, "-c", _JOB.format(node=node, error=error)]
    environ = {**os.environ, "TMPDIR": str(base)}
    with subprocess.Popen(
        argv, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def _killed(base: Path, node: str = "n1") -> Path:
    with _job(base, node) as folder:
        pass
    assert folder.parent == base
    return folder


def test_the_next_job_on_a_node_removes_what_a_killed_one_has_left_there(tmp_path: Path) -> None:
    with _job(tmp_path) as living:
        left = _killed(tmp_path)
        with _job(tmp_path) as own:
            assert (living.is_dir(), left.is_dir(), own.is_dir()) == (True, False, True)


def test_folders_of_another_node_are_left_alone_whose_locks_may_not_be_seen_here(tmp_path: Path) -> None:
    # Nobody holds its lock, as it seems on another node.
    other = _killed(tmp_path, "n2")
    with _job(tmp_path, "n1"):
        assert other.is_dir()
    with _job(tmp_path, "n2"):
        assert not other.is_dir()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_on_a_disk_without_locks_jobs_have_folders_and_remove_none(tmp_path: Path, error: int) -> None:
    long_ago = time.time() - 7 * 86400
    with _job(tmp_path, error=error) as first:
        os.utime(first, (long_ago, long_ago))
        with _job(tmp_path, error=error) as second:
            assert {first, second} == set(tmp_path.iterdir())


def test_a_folder_whose_job_was_killed_before_it_was_locked_is_removed_after_a_day(tmp_path: Path) -> None:
    old = _killed(tmp_path)
    (old / "lock").rename(old / "draft")
    new = old.with_name(f"{old.name}-new")
    new.mkdir()
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    with _job(tmp_path):
        assert (old.is_dir(), new.is_dir()) == (False, True)
