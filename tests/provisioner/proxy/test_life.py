"""Restart, shutdown and death of a kernel that waits or has waited."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from typing import Any

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import KernelManager

from gpu_pool_client import EndReason, LeaseState, PoolUnreachable, Process, TimedOut
from support.frontend import frontend, page_of
from support.jupyter_env import (
    JupyterEnv,
    Managers,
    answer,
    eventually,
    kill,
    restarting_soon,
    started_kernel,
)


async def test_a_restart_while_waiting_keeps_the_place_in_line(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    km = await started_kernel(manager(jupyter_env.install("two")))
    (before,) = (await jupyter_env.pool.status()).queue
    async with frontend(km) as page:
        dropped = page.run("print('dropped')")
        await dropped.shows("Waiting")
        await km.restart_kernel()
        assert (await dropped.done()).status == "aborted"
        (after,) = (await jupyter_env.pool.status()).queue
        assert (after.id, after.position) == (before.id, before.position)
        await km.restart_kernel(now=True)
        cell = page.run("print('well')")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == ["well\n"]
    assert (await jupyter_env.only_lease()).id == before.id


@pytest.mark.parametrize("now", [False, True])
async def test_a_shutdown_while_waiting_leaves_nothing(
    jupyter_env: JupyterEnv, manager: Managers, now: bool
) -> None:
    held = await jupyter_env.fill("1")
    km = await started_kernel(manager(jupyter_env.install("two")))
    port = km.shell_port
    await answer(km)
    await km.shutdown_kernel(now=now)
    assert not await km.is_alive()
    assert not await jupyter_env.has_queue()
    await jupyter_env.pool.release(held.id)
    assert await jupyter_env.is_empty()

    async def nobody_listens() -> bool:
        with socket.socket() as attempt:
            return attempt.connect_ex(("127.0.0.1", port)) != 0

    await eventually(nobody_listens)


async def relayed(jupyter_env: JupyterEnv, manager: Managers, **traits: object) -> AsyncIOLoopKernelManager:
    """Return a kernel that has waited and runs."""
    held = await jupyter_env.fill("1")
    km = await started_kernel(manager(jupyter_env.install("two"), AsyncIOLoopKernelManager, **traits))
    await jupyter_env.pool.release(held.id)
    assert await answer(km) == ""
    async with frontend(km) as page:
        assert (await page.run("import os; print(os.getpid())").done()).outputs == [f"{km.provisioner.pid}\n"]
    assert isinstance(km, AsyncIOLoopKernelManager)
    return km


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_of_a_relayed_kernel_keeps_slice_and_ports(
    jupyter_env: JupyterEnv, manager: Managers, now: bool
) -> None:
    km = await relayed(jupyter_env, manager)
    lease, ports, pid = await jupyter_env.only_lease(), km.ports, km.provisioner.pid
    async with frontend(km) as page:
        await km.restart_kernel(now=now)
        cell = page.run("import os; print(os.getpid())")
        assert (await cell.done()).outputs == [f"{km.provisioner.pid}\n"]
    assert km.provisioner.pid != pid
    assert km.ports == ports
    assert (await jupyter_env.only_lease()).id == lease.id
    await km.shutdown_kernel()
    assert await jupyter_env.is_empty()


async def test_a_kernel_of_which_the_pool_has_not_heard_yet_can_be_restarted(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(idle_limit="1h")
    attach, tried, is_away = jupyter_env.pool.attach, threading.Event(), True

    async def unless_away(*args: Any, **more: Any) -> Any:
        if is_away:
            tried.set()
            raise PoolUnreachable("Nobody answers.")
        return await attach(*args, **more)

    monkeypatch.setattr(jupyter_env.pool, "attach", unless_away)
    km = await started_kernel(manager(jupyter_env.install("two")))
    await eventually(tried.is_set)
    await asyncio.wait_for(km.restart_kernel(now=True), 120)
    is_away = False
    async with frontend(km) as page:
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


async def test_a_relayed_kernel_that_crashes_is_restarted_behind_the_same_ports(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await relayed(jupyter_env, manager, config=restarting_soon())
    lease, pid = await jupyter_env.only_lease(), km.provisioner.pid
    async with frontend(km) as page:
        kill(pid)
        await eventually(lambda: km.provisioner.pid != pid)
        assert (await page.run("print('back')").done()).outputs == ["back\n"]
    assert (await jupyter_env.only_lease()).id == lease.id


async def test_a_frontend_that_ends_the_kernel_while_it_waits(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        asked = page.ask("shutdown_request", {"restart": False}, "control")
        assert (await asked.done()).status == "ok"
        await eventually(km.is_alive, lambda alive: not alive)


async def test_without_the_proxy_a_start_is_refused_as_before(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    await jupyter_env.fill("1")
    km = manager(jupyter_env.install("two", kernel_proxy=False, wait_timeout=0))
    with pytest.raises(TimedOut):
        await km.start_kernel()


def test_a_blocking_manager(jupyter_env: JupyterEnv) -> None:
    held = asyncio.run(jupyter_env.fill("1"))
    km = KernelManager(kernel_name=jupyter_env.install("two"))
    km.start_kernel()
    client = km.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    asyncio.run(jupyter_env.pool.release(held.id))
    assert client.execute_interactive("1", timeout=120)["content"]["status"] == "ok"
    client.stop_channels()
    km.shutdown_kernel()
    assert asyncio.run(jupyter_env.is_empty())


HOLDER = """
import asyncio, sys
from jupyter_client.manager import AsyncKernelManager
async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel()
    print("waits", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_program_that_dies_while_its_kernel_waits_leaves_nothing(
    jupyter_env: JupyterEnv, number: signal.Signals
) -> None:
    held = await jupyter_env.fill("1")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, jupyter_env.install("two")), stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    assert await program.stdout.readline() == b"waits\n"
    assert await jupyter_env.has_queue()
    os.kill(program.pid, number)
    await program.wait()
    await jupyter_env.pool.release(held.id)
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_slice_that_comes_while_nobody_launches_the_kernel_again_goes_back(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await jupyter_env.fill("1")
    km = await started_kernel(manager(jupyter_env.install("two", restart_grace=0)))
    await answer(km)
    await km.shutdown_kernel(now=True, restart=True)
    await jupyter_env.pool.release(held.id)
    lease = await jupyter_env.only_lease()
    assert (lease.state, lease.process) == (LeaseState.HELD, Process.current())

    async def unreachable(*_: object) -> None:
        raise PoolUnreachable("Nobody answers.")

    monkeypatch.setattr(jupyter_env.pool, "release", unreachable)
    await eventually(jupyter_env.is_empty)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.NOT_READY
