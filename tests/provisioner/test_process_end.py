"""A kernel's process counts as ended when it has, also where the server cannot be told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_pool_provisioner.launchers.process import ProcessRun


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open nothing, as where a server has too many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_of(child: subprocess.Popen[bytes]) -> ProcessRun:
    nothing: Any = None
    return ProcessRun(nothing, child.pid, nothing, nothing, nothing)


async def one_step() -> None:
    """Return once what was begun has gone as far as it can without waiting."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_process_lives_and_can_be_killed_where_no_file_could_be_opened(
    child: subprocess.Popen[bytes],
) -> None:
    run = run_of(child)
    with no_more_files():
        await one_step()
        assert not run.end.done()
    run.kill()
    await run.end
    assert child.wait() < 0


async def test_a_process_lives_and_can_be_killed_where_its_end_cannot_be_waited_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refused)
    run = run_of(child)
    with no_more_files():
        await one_step()
        assert not run.end.done()
    await one_step()
    assert not run.end.done()
    run.kill()
    await run.end
    assert child.wait() < 0
