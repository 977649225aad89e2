"""The service is killed under fifty live kernels, which notice nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager

from gpu_pool_client import EndReason, Holder, Lease, Pool, connect, parse_request
from support.fixtures import jupyter_env
from support.hub import Hub, HubService, serving_hub
from support.jupyter_env import TINY, JupyterEnv, answer, eventually, is_running
from support.service import ForkServer

__all__ = ["jupyter_env"]

KERNELS = 50
#: Seconds after which a lease ends that nobody renews.
TTL = 20

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
async def behind(
    children: ForkServer, hub: Hub, folder: Path, jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HubService]:
    """Serve a V100 with room for fifty kernels, which ask for it over HTTP as a student's."""
    async with serving_hub(children, hub, folder / "pool", f"c.ServeApp.ttl = {TTL}") as behind:
        monkeypatch.setenv("GPU_POOL_URL", behind.url)
        monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token("ada"))
        jupyter_env.url = behind.url
        yield behind


@asynccontextmanager
async def kernels(jupyter_env: JupyterEnv) -> AsyncIterator[list[AsyncKernelManager]]:
    """Run fifty tiny kernels, all of which have answered."""
    kernel = jupyter_env.install("tiny", argv=TINY, language="tiny", ready_timeout=300)
    many = AsyncMultiKernelManager()
    try:
        ids = [await many.start_kernel(kernel_name=kernel) for _ in range(KERNELS)]
        managers = [many.get_kernel(each) for each in ids]
        for each in managers:
            await answer(each, within=300)
        yield managers
    finally:
        await many.shutdown_all(now=True)
        many.context.destroy(linger=0)


async def held(pool: Pool) -> dict[str, Lease]:
    return {lease.id: lease for lease in (await pool.status()).leases}


def pid_of(manager: AsyncKernelManager) -> int:
    assert manager.provisioner is not None
    pid: int = manager.provisioner.pid
    return pid


async def ask(pool: Pool, key: str) -> Lease:
    return await pool.request(parse_request("2%"), Holder("", kernel="a test"), key)


async def test_kernels_go_on_and_nothing_is_lost_or_granted_twice(
    behind: HubService, jupyter_env: JupyterEnv
) -> None:
    async with kernels(jupyter_env) as managers, connect(behind.url) as pool:
        before = await held(pool)
        assert len(before) == KERNELS
        # Asked for by somebody who then says nothing more.
        forgotten = await behind.take(os.environ["GPU_POOL_TOKEN"], key="forgotten")
        assert forgotten["state"] == "waiting"

        await behind.service.end(signal.SIGKILL)
        assert all(is_running(pid_of(each)) for each in managers)
        assert "HELLO on 2%" in await answer(managers[0], "hello", within=120)

        began = time.monotonic()
        await behind.service.start()
        status = await pool.status()
        seconds = time.monotonic() - began
        print(f"right again {seconds:.2f} s after its start, imports apart, under {KERNELS} kernels")
        assert {lease.id: lease for lease in status.leases} == before
        assert [lease.id for lease in status.queue] == [forgotten["id"]]
        assert [each.held_milli for each in status.devices] == [1000]
        assert all(is_running(pid_of(each)) for each in managers)

        # No kernel is forgotten, though enough time passes for those that are.
        async for lease in pool.watch(forgotten["id"]):
            ended = lease.end_reason
        assert ended is EndReason.EXPIRED
        assert await held(pool) == before

        # What ends is granted once more, and once only.
        waiting = [await ask(pool, f"next-{number}") for number in range(2)]
        await managers[-1].shutdown_kernel()
        granted = await pool.wait(waiting[0].id, 120)
        assert (await pool.get_lease(waiting[1].id)).position == 1
        after = await held(pool)
        assert len(after) == KERNELS
        assert after.keys() - before.keys() == {granted.id}
        assert sum(each.held_milli for each in (await pool.status()).devices) == 1000
        await asyncio.gather(*(pool.release(each.id) for each in waiting))

    async with connect(behind.url) as pool:
        await eventually(lambda: _is_empty(pool))


async def _is_empty(pool: Pool) -> bool:
    status = await pool.status()
    return not (status.leases or status.queue)
