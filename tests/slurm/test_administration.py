"""What administrators, and a controller that hangs, do to the jobs of kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from support.frontend import frontend
from support.jupyter_env import eventually
from support.slurm_login import Login


def _has_jobs(login: Login, *jobs: str) -> Callable[[], Awaitable[bool]]:
    async def has() -> bool:
        return login.jobs() == list(jobs)

    return has


async def test_a_job_that_is_held_or_moved_says_so_and_runs_once_it_may(login: Login) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:v100:2", "--nodelist=n1")
    login.slurm.until(taken, "RUNNING")
    async with frontend(await login.start("1 model=v100")) as page:
        cell = page.run("print('ran')")
        await cell.shows("It is next in the queue of partition gpu")
        [job] = [each for each in login.jobs() if each != taken]
        login.slurm.run("scontrol", "hold", job)
        await cell.shows("holds it back.")
        login.slurm.run("scontrol", "update", f"jobid={job}", "partition=large")
        login.slurm.run("scontrol", "release", job)
        await cell.shows("It is next in the queue of partition large")
        login.slurm.run("scancel", taken)
        await cell.done()
        assert cell.outputs[-1] == "ran\n"
        assert login.jobs() == [job]


async def test_a_job_that_is_suspended_says_so_and_goes_on(login: Login, tmp_path: Path) -> None:
    async with frontend(await login.start("40%")) as page:
        end = tmp_path / "end"
        code = "import pathlib, time; print('began')\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)"
        cell = page.run(code.format(str(end)))
        await cell.shows("began")
        [job] = login.jobs()
        login.slurm.run("scontrol", "suspend", job)
        await cell.shows("Slurm has suspended its job: it goes on once it is resumed.")
        login.slurm.run("scontrol", "resume", job)
        end.touch()
        await cell.done()
        assert login.jobs() == [job]


async def test_a_cell_that_is_run_in_a_job_that_was_suspended_says_so(login: Login) -> None:
    async with frontend(await login.start("40%")) as page:
        [pid] = (await page.run("import os; print(os.getpid())").done()).outputs
        [job] = login.jobs()
        login.slurm.run("scontrol", "suspend", job)
        await eventually(lambda: psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED)
        cell = page.run("print('ran')")
        await cell.shows("Slurm has suspended its job: it goes on once it is resumed.")
        login.slurm.run("scontrol", "resume", job)
        assert (await cell.done()).outputs[-1] == "ran\n"


async def test_of_what_a_controller_takes_that_hung_meanwhile_one_job_remains(login: Login) -> None:
    async with frontend(manager := await login.start("40%")) as page:  # so that what there is is known
        await page.run("1").done()
        await manager.shutdown_kernel(now=True)
    await eventually(_has_jobs(login))
    with login.slurm.silent():
        async with frontend(manager := await login.start("40% model=t4")) as page:
            cell = page.run("print('ran')")
            await cell.shows("Slurm does not answer")
    async with frontend(manager) as page:
        cell = await page.run("import os; print(os.environ['SLURM_JOB_ID'])").done()
        await eventually(_has_jobs(login, cell.outputs[-1].strip()))


#: Submits a job as Slurm's does, and says so; and answers once it may.
_SLOW = """#!/bin/sh
{real} "$@"
: > {folder}/submitted
while [ ! -e {folder}/go-on ]; do sleep 0.05; done
"""


async def test_a_kernel_that_is_shut_down_while_its_job_is_submitted_leaves_no_job(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = login.slurm.submit("sleep 600", "--gres=gpu:t4:1")
    login.slurm.until(taken, "RUNNING")
    folder = login.env.folder / "slow"
    folder.mkdir()
    real = shutil.which("sbatch", path=login.slurm.environment["PATH"])
    (folder / "sbatch").write_text(_SLOW.format(real=real, folder=folder))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    manager = await login.start("1 model=t4")
    await eventually(lambda: (folder / "submitted").exists())
    assert len(login.jobs()) == 2
    await manager.shutdown_kernel(now=True)
    (folder / "go-on").touch()
    await eventually(_has_jobs(login, taken))
    left = login.env.folder / "data" / "gpu-pool-jobs"
    await eventually(lambda: not list(left.iterdir()))
