"""Random walks of real small kernels, by their manager, a page and a pool, against a session's promises."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import GpuPoolError, Lease, LeaseState
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.session import State
from support.frontend import Cell, Frontend, page_of
from support.jupyter_env import TINY, JupyterEnv, Managers, eventually, is_running, kill

STEPS = 40
#: Where the tiny kernel, which a signal ends, does not have it.
_WAITS = (State.ASKING, State.QUEUED, State.RESUMING, State.WITHOUT_SLICE)


class Walk:
    """One kernel that needs the whole GPU, and somebody else who takes it at times."""

    def __init__(self, env: JupyterEnv, km: AsyncKernelManager, page: Frontend, seed: int) -> None:
        self.env, self.km, self.page = env, km, page
        self.chance = random.Random(seed)
        self.other: Lease | None = None
        #: Cells that were submitted while somebody else had the GPU.
        self.meanwhile: list[Cell] = []
        self.processes: set[int] = set()

    async def step(self) -> None:
        """Do one of the things that happen to kernels, and look whether a cell ran that must not."""
        actions: list[Callable[[], Awaitable[None]]] = [
            *([self.submit] * 4),
            *(self.take, self.release, self.interrupt, self.restart, self.die),
            *(self.give_back, self.resume, self.wait),
        ]
        with suppress(GpuPoolError):
            await self.chance.choice(actions)()
        if self.km.provisioner.process is not None:
            self.processes.add(self.km.provisioner.process.pid)
        await self.check()

    async def check(self) -> None:
        """Fail where a cell ran while the whole GPU was somebody else's."""
        if self.other is not None and await self.is_others():
            ran = [cell for cell in self.meanwhile if cell.status == "ok"]
            assert not ran, "a cell ran without its slice"

    async def is_others(self) -> bool:
        assert self.other is not None
        return (await self.env.pool.get_lease(self.other.id)).state is LeaseState.HELD

    async def submit(self) -> None:
        cell = self.page.run(f"cell {self.chance.random()}")
        if self.other is not None and await self.is_others():
            self.meanwhile.append(cell)

    async def take(self) -> None:
        self.other = self.other or await self.env.fill("1")

    async def release(self) -> None:
        if self.other is not None:
            await self.check()
            other, self.other = self.other, None
            self.meanwhile.clear()
            await self.env.pool.release(other.id)

    async def interrupt(self) -> None:
        if self.km.provisioner.session.state in _WAITS:
            await self.km.interrupt_kernel()

    async def restart(self) -> None:
        try:
            await self.km.restart_kernel(now=self.chance.random() < 0.5)
        except GpuPoolError:  # its slice is over: its user shuts it down and starts it again
            await self.km.shutdown_kernel(now=True)
            await self.km.start_kernel()

    async def die(self) -> None:
        if self.km.provisioner.session.state.has_kernel:
            kill(self.km.provisioner.process.pid)
            await self.restart()

    async def give_back(self) -> None:
        await in_background(self.km.provisioner.driver.give_back())

    async def resume(self) -> None:
        await in_background(self.km.provisioner.driver.resume())

    async def wait(self) -> None:
        """Let a kernel start, or its end be seen; whatever comes next finds it so, or not."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.page.run("wait").done(), 1.0)


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
async def test_no_walk_of_real_kernels_breaks_a_promise(
    jupyter_env: JupyterEnv, manager: Managers, seed: int
) -> None:
    async with page_of(manager(jupyter_env.install("tiny", "1", TINY, language="shout"))) as (km, page):
        walk = Walk(jupyter_env, km, page, seed)
        for _ in range(STEPS):
            await walk.step()
        await walk.release()
        await walk.restart()
        assert (await page.run("well").done()).status == "ok"
    ports = [km.shell_port, km.iopub_port, km.stdin_port, km.hb_port, km.control_port]
    folder = jupyter_env.folder
    await km.shutdown_kernel(now=True)
    await eventually(jupyter_env.is_empty)
    assert not [pid for pid in walk.processes if is_running(pid)]
    assert not [port for port in ports if listens(port)]
    assert not list(folder.rglob(".gpu-pool-*"))
    assert not list(folder.rglob(".gpu-resize-*"))
