"""A job of two machines: kernels in steps on the one that is another machine, with files of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager

from support.frontend import frontend
from support.jupyter_env import eventually
from support.slurm_allocated import Allocate, allocating, write_drivers
from support.slurm_far import FarSite, far_site

_SHOW = """
import os, socket
names = ('CUDA_VISIBLE_DEVICES', 'SLURM_STEP_ID', 'GPU_POOL_MEMORY_MIB')
print(socket.gethostname(), *map(os.environ.get, names), os.getpid())
"""


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarSite]:
    folder = tmp_path_factory.mktemp("far")
    with far_site(folder, f"TaskProlog={folder}/shared/prologue\n") as found:
        write_drivers(found.shared)
        yield found


@pytest.fixture
def site(module_site: FarSite) -> Iterator[FarSite]:
    module_site.slurm.cancel_all()
    yield module_site
    module_site.slurm.cancel_all()


@pytest.fixture
async def allocate(site: FarSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Allocate]:
    monkeypatch.chdir(site.shared)  # which is where steps begin
    async with allocating(site.slurm, site.folder(), tmp_path, monkeypatch) as do:
        yield do


async def test_a_kernel_of_a_step_lives_on_another_machine(allocate: Allocate, site: FarSite) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        before = (await page.run(_SHOW).done()).outputs[-1].split()
        assert before[:2] == ["far", "GPU-t"]
        asked = await page.run("print(input('What? '))", allow_stdin=True).done()
        assert (page.questions, asked.outputs[-1]) == (["What? "], "an answer\n")
        cell = page.run("import time; print('began')\nwhile True: time.sleep(0.05)")
        await cell.shows("began")
        await manager.interrupt_kernel()
        await cell.shows("KeyboardInterrupt")
        await manager.restart_kernel(now=True)
        await page.is_connected()
        after = (await page.run(_SHOW).done()).outputs[-1].split()
        assert (after[:3], after[-1] != before[-1]) == (before[:3], True)
    await manager.shutdown_kernel(now=True)
    await eventually(shell.is_empty)
    # Slurm has killed the step with all that it ran: what that has left is removed by the next one there.
    [left] = site.temporary()
    async with frontend(await shell.start("1 model=t4")) as page:
        await page.run("1").done()
        [own] = site.temporary()
        assert own != left


async def test_kernels_share_the_shards_of_another_machine_and_one_dies_alone(
    allocate: Allocate, site: FarSite
) -> None:
    shell = allocate("--nodes=2", "--gres=shard:40")
    managers = [await shell.start("20% model=t4") for _ in range(2)]
    async with frontend(managers[0]) as one, frontend(managers[1]) as two:
        shown = [(await page.run(_SHOW).done()).outputs[-1].split() for page in (one, two)]
        assert [each[:2] for each in shown] == [["far", "GPU-t"]] * 2
        assert [each[3] for each in shown] == [str(15360 * 20 // 100)] * 2
        assert len({each[2] for each in shown}) == len(shell.steps()) == 2
        status = (sys.executable, "-m", "gpu_pool.cli", "status")
        listing = await asyncio.create_subprocess_exec(*status, stdout=asyncio.subprocess.PIPE)
        told, _ = await listing.communicate()
        assert (told.count(b"held"), listing.returncode) == (2, 0), told
        async with frontend(await shell.start("20% model=t4")) as three:
            cell = three.run(_SHOW)
            await cell.shows("Waiting for a GPU slice of 20%")
            site.far.run("kill", "-KILL", *_pids_of(site, shown[0][2]))
            await cell.done()
            assert cell.outputs[-1].split()[:2] == ["far", "GPU-t"]
        assert (await two.run(_SHOW).done()).outputs[-1].split() == shown[1]


async def test_the_end_of_the_allocation_is_the_end_of_its_kernels_on_all_machines(
    allocate: Allocate, site: FarSite
) -> None:
    shell = allocate("--nodes=2", "--gres=gpu:1")
    async with frontend(manager := await shell.start("1 model=t4")) as page:
        step = (await page.run(_SHOW).done()).outputs[-1].split()[2]
        cell = page.run("import time; print('began')\nwhile True: time.sleep(0.05)")
        await cell.shows("began")
        shell.slurm.run("scancel", shell.job)
        await eventually(lambda: _is_dead(manager))
        await eventually(shell.env.is_empty)
        assert _pids_of(site, step) == []


async def test_a_machine_that_dies_ends_its_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    more = f"TaskProlog={folder}/shared/prologue\nSlurmdTimeout=5\n"
    with far_site(folder, more) as site:
        write_drivers(site.shared)
        monkeypatch.chdir(site.shared)
        async with allocating(site.slurm, site.folder(), tmp_path, monkeypatch) as allocate:
            shell = allocate("--nodes=2", "--gres=gpu:1", "--no-kill")
            managers = [await shell.start(f"1 model={kind}") for kind in ("t4", "v100")]
            async with frontend(managers[0]) as one, frontend(managers[1]) as two:
                before = (await two.run(_SHOW).done()).outputs[-1]
                cell = one.run("import time; print('began')\nwhile True: time.sleep(0.05)")
                await cell.shows("began")
                site.far.die()
                await eventually(lambda: _is_dead(managers[0]))
                assert (await two.run(_SHOW).done()).outputs[-1] == before
                await managers[0].restart_kernel()
                await one.run("1").shows(
                    "The step of Slurm job 1 on n2 ended with status 1. Its last words: srun:"
                )
            for each in managers:
                await each.shutdown_kernel(now=True)


async def _is_dead(manager: AsyncKernelManager) -> bool:
    return not await manager.is_alive()


def _pids_of(site: FarSite, step: str) -> list[str]:
    """Return the numbers that processes of a step have on the far node."""
    is_of_it = 'tr "\\0" "\\n" <$each/environ | grep -qx SLURM_STEP_ID=$0'
    find = f"for each in /proc/[0-9]*; do {is_of_it} && echo ${{each##*/}}; done; true"
    return site.far.run("sh", "-c", find, step).split()
