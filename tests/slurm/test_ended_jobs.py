"""Jobs that Slurm ends for what they have used: their time, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager

from gpu_pool_client import EndReason
from support.frontend import frontend
from support.jupyter_env import eventually, restarting_soon
from support.slurm import CGROUP_CONF, Slurm, cannot_limit, missing, slurm_cluster
from support.slurm_login import Login

_LIMITED = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=400
"""
_FILLS_MEMORY = "kept = bytearray(2**30)\nfor at in range(0, len(kept), 4096): kept[at] = 1"
_MORE_MEMORY = "Load less at a time; its course, or c.SlurmSettings.mem, can give it more."
_GOES_ON = "Its variables are gone. Run the cell again to start a new kernel."


async def _ended_as(login: Login) -> tuple[str, str]:
    """Return how the one lease has ended, and what was noted of that, once it has."""
    await eventually(login.env.is_empty)
    [lease] = await login.env.pool.history()
    return lease.reason, lease.note


async def test_a_job_that_reaches_its_time_limit_says_so_and_the_next_cell_has_a_new_one(
    login: Login,
) -> None:
    async with frontend(await login.start("40%")) as page:
        await page.run("1").done()
        [job] = login.jobs()
        cell = page.run("import time; print('began')\nwhile True: time.sleep(0.05)")
        await cell.shows("began")
        # Slurm looks at its jobs' limits twice a minute.
        login.slurm.run("scontrol", "update", f"jobid={job}", "endtime=now+1seconds")
        told = (
            f"Slurm job {job} reached its time limit. Its course, or c.SlurmSettings.time, can give it more."
        )
        assert await _ended_as(login) == (EndReason.TAKEN.value, told)
        await cell.shows(f"The kernel was ended. {told} {_GOES_ON}")
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        assert login.jobs() not in ([], [job])


@pytest.fixture(scope="module")
def limited_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster that gives jobs 400 MiB, by control groups."""
    if why := missing() or cannot_limit():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("limited")
    (folder / "cgroup.conf").write_text(CGROUP_CONF)
    with slurm_cluster(folder, _LIMITED) as found:
        yield found


def _let_it_be_ended_first(process: str) -> None:
    """Have Linux end this process where its control group's memory is used up."""
    Path("/proc", process, "oom_score_adj").write_text("1000")


class TestMemory:
    """What becomes of a kernel that uses up its job's memory."""

    @pytest.fixture
    def slurm(self, limited_cluster: Slurm) -> Iterator[Slurm]:
        limited_cluster.cancel_all()
        yield limited_cluster
        limited_cluster.cancel_all()

    async def test_a_kernel_that_was_ended_for_memory_is_restarted_in_its_job(self, login: Login) -> None:
        name = login.env.install("GPU", "40%")
        manager = AsyncIOLoopKernelManager(kernel_name=name, config=restarting_soon())
        login.started.append(manager)
        await manager.start_kernel()
        async with frontend(manager) as page:
            await page.run("1").done()
            [job] = login.jobs()
            page.run(_FILLS_MEMORY)
            await page.is_connected()
            await page.run("1").shows("It used more than the memory of its pod or job (not of the GPU)")
            assert login.jobs() == [job]

    async def test_a_job_that_was_ended_for_memory_says_so(self, login: Login) -> None:
        async with frontend(await login.start("40%")) as page:
            shown = await page.run("import os; print(os.getppid())").done()
            [job] = login.jobs()
            # So that Linux ends the job's main process, as where a site has it end all of a job at once.
            _let_it_be_ended_first(shown.outputs[-1].strip())
            cell = page.run(_FILLS_MEMORY)
            told = (
                f"Slurm job {job} used more than its memory (not of the GPU), and was ended. {_MORE_MEMORY}"
            )
            assert await _ended_as(login) == (EndReason.TAKEN.value, told)
            assert login.slurm.state(job) == "OUT_OF_MEMORY"
            await cell.shows(f"The kernel was ended. {told} {_GOES_ON}")
            assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
