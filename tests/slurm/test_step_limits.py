"""Kernels in steps where Slurm binds jobs to their processors, and limits their memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager

from support.frontend import frontend
from support.jupyter_env import eventually, restarting_soon
from support.slurm import CGROUP_CONF, Slurm, cannot_limit, missing, slurm_cluster
from support.slurm_allocated import Allocate, allocating, write_drivers

#: A job has 400 MiB for each of its processors.
_LIMITED = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=400
TaskProlog={}
"""
_GIVEN = ("--nodes=2", "--gres=shard:40")
_SHOW = """
import os, re
groups = open("/proc/self/cgroup").read()
print(len(os.sched_getaffinity(0)), re.search(r"memory:.*(/job_[0-9]+)/step_", groups)[1])
"""
_FILLS_MEMORY = "kept = bytearray(2**30)\nfor at in range(0, len(kept), 4096): kept[at] = 1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing() or cannot_limit() or ("" if (os.cpu_count() or 1) > 1 else "there is one processor"):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("limited")
    (folder / "cluster").mkdir()
    (folder / "cluster" / "cgroup.conf").write_text(CGROUP_CONF)
    with slurm_cluster(folder / "cluster", _LIMITED.format(write_drivers(folder))) as found:
        yield found


@pytest.fixture
async def allocate(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Allocate]:
    async with allocating(slurm, tmp_path, tmp_path, monkeypatch) as do:
        yield do


@pytest.mark.parametrize("processors", [1, 2])
async def test_kernels_have_all_processors_of_their_job_on_their_node_and_run_at_once(
    allocate: Allocate, processors: int
) -> None:
    shell = allocate(*_GIVEN, f"--ntasks-per-node={processors}")
    managers = [await shell.start("20% model=t4") for _ in range(2)]
    async with frontend(managers[0]) as one, frontend(managers[1]) as two:
        for page in (one, two):
            shown = (await page.run(_SHOW).done()).outputs[-1].split()
            assert shown == [str(processors), f"/job_{shell.job}"]


async def test_a_kernel_runs_beside_a_step_that_shares_nothing(allocate: Allocate, slurm: Slurm) -> None:
    shell = allocate(*_GIVEN, "--ntasks-per-node=1")
    where = (f"--jobid={shell.job}", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--chdir=/")
    slurm.run("sh", "-c", 'srun "$@" --exact sleep 600 >/dev/null 2>&1 &', "srun", *where)
    await eventually(lambda: shell.steps())
    async with frontend(await shell.start("20% model=t4")) as page:
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"
        assert len(shell.steps()) == 2


async def test_a_kernel_of_a_step_that_uses_up_its_jobs_memory_is_restarted_there(allocate: Allocate) -> None:
    shell = allocate(*_GIVEN, "--ntasks-per-node=1")
    name = shell.env.install("GPU", "20% model=t4")
    manager = AsyncIOLoopKernelManager(kernel_name=name, config=restarting_soon())
    shell.started.append(manager)
    other = await shell.start("20% model=t4")
    await manager.start_kernel()
    async with frontend(manager) as page, frontend(other) as beside:
        await beside.run("kept = 6 * 7").done()
        await page.run("1").done()
        steps = shell.steps()
        page.run(_FILLS_MEMORY)
        await page.is_connected()
        await page.run("1").shows("It used more than the memory of its pod or job (not of the GPU)")
        assert shell.steps() == steps
        assert (await beside.run("print(kept)").done()).outputs[-1] == "42\n"
