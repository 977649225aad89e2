"""Kernels that end while their pool is away, or while they are being restarted, keep no slice."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import LeaseGone, OverQuota, connect, parse_request
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.session import effects, events
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, kill, started_kernel
from support.service import ForkServer, serving


async def give_back(driver: SessionDriver) -> None:
    """Give a kernel's slice back, as at its end."""
    lease_id = driver.session.lease_id
    assert lease_id is not None
    await driver.pool_work.pool.give_back(lease_id)


@pytest.mark.long
async def test_a_slice_is_given_back_once_the_service_is_back(children: ForkServer, tmp_path: Path) -> None:
    async with serving(children, tmp_path / "service", "") as service, connect(service.url) as pool:
        mine = await JupyterEnv(tmp_path, service.url).asking()
        # On this process, as between the two kernels of a restart.
        await in_background(mine.being_restarted(3600, 3600))
        await service.end(signal.SIGKILL)
        await give_back(mine)
        await service.start()
        await eventually(pool.status, lambda status: not status.leases)


@pytest.mark.long
async def test_a_restart_with_another_size_does_not_wait_for_a_service_that_is_away(
    children: ForkServer, tmp_path: Path
) -> None:
    async with serving(children, tmp_path / "service", "") as service:
        mine = await JupyterEnv(tmp_path, service.url).asking()
        await in_background(mine.tell(events.SizePending(parse_request("10%"))))
        await in_background(mine.pool_work.pool.status())  # who was heard before is asked for longer
        await service.end(signal.SIGKILL)
        await in_background(mine.being_restarted(3600, 3600))
        notice = mine.session.notice
        assert notice.startswith("You asked for 10%. This kernel still has 2% of a GPU.")
        # Whoever had asked again and again would say so.
        assert "did not answer in time" not in notice
        await give_back(mine)


async def test_a_slice_is_given_back_once_the_service_hears_its_user_again(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = await jupyter_env.asking()
    await in_background(mine.being_restarted(3600, 3600))
    release, faults = (
        jupyter_env.pool.release,
        iter([OverQuota("You have asked too much."), OverQuota("Again.")]),
    )

    async def too_often_twice(*args: Any) -> None:
        for fault in faults:
            raise fault
        await release(*args)

    monkeypatch.setattr(jupyter_env.pool, "release", too_often_twice)
    await give_back(mine)
    await eventually(jupyter_env.is_empty)


async def test_a_kernel_that_is_shut_down_during_its_restart_keeps_no_slice(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, begun, may_go_on = await jupyter_env.asking(), threading.Event(), threading.Event()
    attach = jupyter_env.pool.attach

    async def late(*args: Any, **more: Any) -> Any:
        begun.set()
        await asyncio.to_thread(may_go_on.wait)
        return await attach(*args, **more)

    monkeypatch.setattr(jupyter_env.pool, "attach", late)
    restart = asyncio.create_task(in_background(mine.being_restarted(60, 60)))
    await asyncio.to_thread(begun.wait)
    await in_background(mine.tell(events.CloseRequested()))  # as at a shutdown that could not reach the pool
    may_go_on.set()
    await restart
    assert await jupyter_env.is_empty()


async def test_the_proxy_of_a_kernel_that_was_shut_down_does_not_end_the_next_one(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    lesson = await jupyter_env.fill("100%")
    km = await started_kernel(manager(jupyter_env.install("two")))
    proxy: Any = km.provisioner.driver
    await jupyter_env.pool.release(lesson.id)
    await answer(km, "1")
    kill(km.provisioner.pid)
    await in_background(proxy.ended())
    await km.shutdown_kernel(now=True)
    await km.start_kernel()
    await in_background(proxy.tell(events.ManagerExpected(0)))  # as it does after a while
    assert await answer(km, "print('well')") == "well\n"
    assert await jupyter_env.leases()


@pytest.mark.parametrize("is_known", [True, False], ids=["ended", "unknown"])
async def test_no_drain_is_of_a_lease_that_is_gone(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    async def gone(*_: Any) -> Any:
        raise LeaseGone("There is no such lease.")
        yield

    mine = await jupyter_env.asking()
    await jupyter_env.pool.drain("0", hibernate=True)
    lease = await jupyter_env.pool.get_lease(mine.session.lease_id or "")
    await in_background(mine.tell(events.LeaseSeen(lease)))
    assert mine.session.lease is not None
    assert mine.session.lease.hibernates
    await jupyter_env.pool.release(lease.id)
    if not is_known:
        monkeypatch.setattr(jupyter_env.pool, "watch", gone)
    following = mine.pool_work.begin(effects.FollowLease(hibernates=True))
    assert following is not None
    assert await in_background(following) == events.LeaseNews()
    # A cell that comes now is not refused for the drain: it asks, and is told how the lease ended.
    assert not mine.session.lease.hibernates
