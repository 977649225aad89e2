"""Memory on top of a slice, its burst, followed by kernels of a real pool while their cells run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpu_pool_client._background import in_background
from support.frameworks import write_torch
from support.frontend import Frontend, frontend, page_of, printed
from support.jupyter_env import IPYKERNEL, JupyterEnv, Managers
from support.pools import eventually
from support.warm_kernels import start, until_ready

#: 10% of 32 GiB, less what CUDA and its libraries take; and the same of 2%.
RAISED, GRANTED = "0.08441", "0.00698"
AWAIT = "while f'{{torch.cuda.fractions[0]:.5f}}' != {!r}: time.sleep(0.01)\n"


def install(jupyter_env: JupyterEnv, tmp_path: Path, size: str = "2%..10%", **config: object) -> str:
    """Install a kernel of a size, by default 2% of a GPU and up to 10%, with a stand-in for torch."""
    python = tmp_path / "env/bin/python"
    packages = tmp_path / f"env/lib/python3.{sys.version_info[1]}/site-packages"
    python.parent.mkdir(parents=True)
    packages.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "env/pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    write_torch(packages)
    here = os.pathsep.join([str(packages), *filter(None, sys.path)])
    argv = str(python), *IPYKERNEL[1:]
    return jupyter_env.install("two", size, argv=argv, env={"PYTHONPATH": here}, **config)


async def is_followed(jupyter_env: JupyterEnv, page: Frontend) -> None:
    """See torch's limit raised, and lowered in the middle of a cell once somebody is granted the memory."""
    assert await printed(page, f"import time, torch; torch.cuda.init()\n{AWAIT.format(RAISED)}") == ""
    cell = page.run(f"print('runs', flush=True)\n{AWAIT.format(GRANTED)}print('lowered')")
    newcomer = await jupyter_env.fill("98%")
    assert newcomer.slices, "it is granted at once"
    assert "".join((await cell.done()).outputs) == "runs\nlowered\n"
    told = str((await page.run("%gpu").done()).heard)
    assert ("655 MiB granted;" in told, "now up to" in told) == (True, False), told
    assert "3.2 GiB while nobody else needs that" in told
    await jupyter_env.pool.release(newcomer.id)
    assert await printed(page, f"{AWAIT.format(RAISED)}print('raised')") == "raised\n"


async def test_torchs_limit_follows_the_burst_while_a_cell_runs(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with page_of(manager(install(jupyter_env, tmp_path))) as (_, page):
        await is_followed(jupyter_env, page)
        assert "now up to 3.2 GiB" in str((await page.run("%gpu").done()).heard)


async def test_what_follows_it_leaves_the_end_of_its_lease_as_it_is(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    km = manager(install(jupyter_env, tmp_path, "2%..10% for 20min"))
    await km.start_kernel()
    async with frontend(km) as page:
        await printed(page, f"import time, torch; torch.cuda.init()\n{AWAIT.format(RAISED)}")
        ends_at = (await jupyter_env.only_lease()).terms.ends_at
        assert await printed(page, "import os; print(os.environ['GPU_POOL_ENDS_AT'])") == f"{ends_at:.0f}\n"


@pytest.mark.long
async def test_it_follows_in_the_kernel_after_a_restart(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with page_of(manager(install(jupyter_env, tmp_path))) as (km, page):
        await printed(page, "import torch; torch.cuda.init()")
    await km.restart_kernel()
    async with frontend(km) as page:
        await is_followed(jupyter_env, page)


@pytest.mark.usefixtures("soon")
async def test_it_follows_in_a_kernel_that_was_forked_from_a_template(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    spec = install(jupyter_env, tmp_path, preload=["json"])
    cold = manager(spec)
    await until_ready(cold)
    await cold.shutdown_kernel(now=True)
    warm = manager(spec)
    assert await start(warm)
    async with frontend(warm) as page:
        await is_followed(jupyter_env, page)


@pytest.mark.long
async def test_a_kernel_that_has_begun_to_use_the_gpu_follows_from_when_it_gets_a_limit(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with page_of(manager(install(jupyter_env, tmp_path, "2%"))) as (_, page):
        assert await printed(page, "import torch; torch.cuda.init(); print(torch.cuda.fractions[0])") == (
            "0.00698\n"
        )
        told = await printed(page, "%gpu use 2%..10%")
        assert told.startswith("This kernel now has 2%")
        assert "restarted" not in told
        await is_followed(jupyter_env, page)


@pytest.mark.long
async def test_a_kernel_that_gets_a_limit_while_a_cell_runs_follows_when_that_has_ended(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with page_of(manager(install(jupyter_env, tmp_path, "2%"))) as (km, page):
        await printed(page, "import torch; torch.cuda.init()")
        ends = tmp_path / "ends"
        waits = f"while not os.path.exists({str(ends)!r}): time.sleep(0.01)"
        cell = page.run(f"import os, time; print('runs', flush=True)\n{waits}")
        await eventually(lambda: cell.outputs)
        resized = await in_background(km.provisioner._driver.resize("2%..10%"))
        assert resized.granted
        ends.touch()
        await cell.done()
        await is_followed(jupyter_env, page)


#: What fails at torch's limit, as torch's own allocator does, of one device with 32 GiB.
ALLOCATES = """
import torch, time
class OutOfMemoryError(RuntimeError): __module__ = 'torch.cuda'
def allocate(mib):
    torch.cuda.init()
    if mib > torch.cuda.fractions[0] * 32768:
        raise OutOfMemoryError('CUDA out of memory.')
    print('allocated')
"""


async def test_who_hits_the_lowered_limit_reads_why_and_what_to_do(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with page_of(manager(install(jupyter_env, tmp_path))) as (_, page):
        await printed(page, ALLOCATES)
        assert (
            await printed(page, f"torch.cuda.init()\n{AWAIT.format(RAISED)}allocate(2000)") == "allocated\n"
        )
        newcomer = await jupyter_env.fill("98%")
        cell = await page.run(f"{AWAIT.format(GRANTED)}allocate(100)\nallocate(2000)").done()
        assert cell.status == "error"
        told = "".join(cell.outputs)
        assert told.startswith("allocated\n"), "what is granted is never taken"
        assert "GPU memory ran out: this kernel's slice is 2%..10%, with 655 MiB of memory." in told
        assert "It may use up to 3.2 GiB while nobody else needs that, and 655 MiB now. Delete what" in told
        assert "or run the cell later." in told
        await jupyter_env.pool.release(newcomer.id)
        assert await printed(page, f"{AWAIT.format(RAISED)}allocate(2000)") == "allocated\n"
