"""``%gpu use 10%`` in kernels behind a proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpu_pool_client import Lease, NotAllowed
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.session import State
from gpu_pool_provisioner.session.events import SizeChange
from support.frontend import Cell, Frontend, frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually, started_kernel

FACTS = "import os; print(*[os.environ.get(n) for n in ('GPU_POOL_SLICE', 'GPU_POOL_MEMORY_MIB')])"


@asynccontextmanager
async def waiting_for(
    jupyter_env: JupyterEnv, manager: Managers, code: str
) -> AsyncIterator[tuple[Any, Frontend, Cell, str]]:
    """Run a cell in a kernel that waits; yield the kernel, its frontend, the cell, and what it waits for."""
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run(code)
        await cell.shows("Waiting for a GPU slice of 2%.")
        yield km, page, cell, held.id


@pytest.fixture
def lending(jupyter_env: JupyterEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Park the slices of idle kernels soon."""
    (tmp_path / "settings").mkdir()
    content = {"PoolSettings": {"default_course": {"idle_limit": "1s"}}}
    (tmp_path / "settings" / "gpu_pool_config.json").write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "settings"))


async def test_a_kernel_that_has_waited_changes_its_size_and_is_restarted_with_it(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with waiting_for(jupyter_env, manager, "%gpu use 10%") as (km, page, cell, held):
        await jupyter_env.pool.release(held)
        await cell.shows("This kernel now has 10% of a GPU")
        assert (await page.run(FACTS).done()).outputs == ["10% 3276\n"]
        await km.restart_kernel()
        assert (await page.run(FACTS).done()).outputs == ["10% 3276\n"]
    assert (await jupyter_env.only_lease()).slices[0].milli == 100


@pytest.mark.usefixtures("lending")
@pytest.mark.long
async def test_a_kernel_that_lends_its_slice_gets_it_back_at_its_new_size(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with page_of(manager(jupyter_env.install("all", "1"))) as (_, page):
        await page.run("%gpu use 10%").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        cell = page.run(FACTS)
        await cell.shows("Waiting for a GPU slice of 10%.")
        await jupyter_env.pool.release(other.id)
        assert (await cell.done()).outputs == ["10% 3276\n"]


async def test_a_change_of_size_that_outlives_its_kernel_leaves_the_next_one_alone(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    """It holds back what is submitted, and must not hold back what the next kernel is to run."""
    async with waiting_for(jupyter_env, manager, "1") as (km, page, cell, held):
        await jupyter_env.pool.release(held)
        await cell.done()
        os.kill(km.provisioner.pid, signal.SIGSTOP)  # it does not say whether it is idle
        changing = asyncio.create_task(in_background(km.provisioner.driver.resize("10%")))
        await eventually(lambda: is_held_back(km))
        await km.restart_kernel(now=True)
        with pytest.raises(NotAllowed, match="has ended"):
            await changing
        assert (await page.run(FACTS).done()).outputs == ["2% 655\n"]


async def is_held_back(km: Any) -> bool:
    return km.provisioner.session.state is State.RESIZING


async def test_a_size_that_changes_as_the_slice_comes_is_the_one_that_the_kernel_starts_on(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted, told, own = asyncio.Event(), asyncio.Event(), jupyter_env.pool.wait

    async def late(lease_id: str, timeout: float | None = None) -> Lease:
        lease = await own(lease_id, timeout)
        here.call_soon_threadsafe(granted.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(told.wait(), here))
        return lease

    here = asyncio.get_running_loop()
    async with waiting_for(jupyter_env, manager, FACTS) as (km, _, cell, held):
        monkeypatch.setattr(jupyter_env.pool, "wait", late)
        await jupyter_env.pool.release(held)
        await granted.wait()
        changed = await in_background(km.provisioner.driver.resize("10%"))
        assert changed.message == "This kernel now has 10% of a GPU."
        told.set()
        assert (await cell.done()).outputs == ["10% 3276\n"]


async def test_of_two_restarts_at_once_one_kernel_is_left_and_has_the_slice(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await asyncio.gather(km.restart_kernel(now=True), km.restart_kernel(now=True), return_exceptions=True)
    async with frontend(km) as page:
        done = await page.run("import os; print(os.getpid())").done()
    lease = await jupyter_env.only_lease()
    assert lease.process is not None
    assert done.outputs == [f"{lease.process.pid}\n"]


async def test_a_page_that_asks_for_the_debugger_meanwhile_does_not_keep_the_size(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    driver = km.provisioner.driver
    content = {"type": "request", "command": "debugInfo", "seq": 1, "arguments": {}}
    asked = km.session.serialize(km.session.msg("debug_request", content), b"page")

    async def resized() -> SizeChange:
        change = asyncio.create_task(driver.resize("10%"))
        while driver.session.state is not State.RESIZING:  # noqa: ASYNC110 - it is one turn of the loop
            await asyncio.sleep(0)
        driver._do.front["control"].on_message([zmq.Frame(part) for part in asked])
        return await change

    async with frontend(km) as page:
        await page.run("1").done()
        assert (await in_background(resized())).granted
        assert (await page.run(FACTS).done()).outputs == ["10% 3276\n"]
