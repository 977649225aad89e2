"""The watch of Slurm's queue goes on, whatever Slurm prints and this machine refuses."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpu_pool.slurm import watch
from gpu_pool.slurm.watch import JobQueueWatch
from support.jupyter_env import eventually

_JOB = "7|PENDING|Priority|12|gpu|N/A|N/A|"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a job in a queue."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{_JOB}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("squeue")
async def test_one_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, read = iter([MemoryError("none left")]), watch.read_jobs

    def read_jobs(printed: str) -> object:
        for fault in faults:
            raise fault
        return read(printed)

    monkeypatch.setattr(watch, "read_jobs", read_jobs)
    found = JobQueueWatch()
    found.keep()
    await eventually(lambda: found.trouble)
    assert found.trouble == "Slurm's queue cannot be looked at: MemoryError: none left."
    await eventually(lambda: "7" in found.jobs)
    assert not found.trouble


@pytest.mark.usefixtures("squeue")
async def test_where_no_thread_can_be_had_it_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found = JobQueueWatch()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        found.keep()
    assert "can't start new thread" in found.trouble
    found.keep()
    await eventually(lambda: "7" in found.jobs)
    assert not found.trouble
