"""The paths on which Jupyter never says that a kernel has ended. None of them keeps a slice."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from gpu_pool_client import EndReason, Process, TimedOut
from support.jupyter_env import (
    IPYKERNEL,
    SLEEPER,
    JupyterEnv,
    Managers,
    answer,
    eventually,
    is_running,
    kill,
    restarting_soon,
    started_kernel,
)

CRASHER = (sys.executable, "-c", "raise SystemExit('crash')")


async def test_pre_launch_raises(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = manager(jupyter_env.install("two"), ip="203.0.113.1")
    with pytest.raises(RuntimeError, match="local interface"):
        await km.start_kernel()
    assert await jupyter_env.is_empty()


async def test_launch_kernel_raises(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = manager(jupyter_env.install("broken", argv=["/nowhere/python", "{connection_file}"]))
    with pytest.raises(FileNotFoundError):
        await km.start_kernel()
    assert await jupyter_env.is_empty()


async def test_post_launch_raises(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    async def fail(self: LocalProvisioner, **kwargs: Any) -> None:
        assert self.pid is not None
        pids.append(self.pid)
        raise RuntimeError("no")

    monkeypatch.setattr(LocalProvisioner, "post_launch", fail)
    km = manager(jupyter_env.install("two"))
    with pytest.raises(RuntimeError, match="no"):
        await km.start_kernel()
    assert await jupyter_env.is_empty()
    assert not is_running(pids[0])


async def test_the_start_can_be_tried_again(jupyter_env: JupyterEnv, manager: Managers) -> None:
    binary = jupyter_env.folder / "python"
    km = manager(jupyter_env.install("fixed-later", argv=[str(binary), *IPYKERNEL[1:]]))
    with pytest.raises(FileNotFoundError):
        await km.start_kernel()
    await km.pre_start_kernel()
    written = await asyncio.to_thread(Path(km.connection_file).read_text)
    assert json.loads(written)["shell_port"] == km.shell_port
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    binary.chmod(0o755)
    await km.start_kernel()
    assert await answer(km, "print('well')") == "well\n"


async def test_the_manager_fails_between_launch_and_post_launch(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    class Failing(AsyncKernelManager):
        def start_restarter(self) -> None:
            raise RuntimeError("no")

    km = manager(jupyter_env.install("two", ready_timeout=1), Failing)
    with pytest.raises(RuntimeError, match="no"):
        await km.start_kernel()
    pid = km.provisioner.pid
    await eventually(jupyter_env.is_empty)
    assert not is_running(pid)


async def test_a_start_that_waits_is_cancelled(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    km = manager(jupyter_env.install("two", kernel_proxy=False, wait_timeout=30))
    start = asyncio.create_task(km.start_kernel())
    await eventually(jupyter_env.has_queue)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await eventually(jupyter_env.has_queue, lambda seen: not seen)


async def test_nothing_free_leaves_nobody_in_line(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await jupyter_env.fill("1")
    with pytest.raises(TimedOut):
        await manager(jupyter_env.install("two", kernel_proxy=False, wait_timeout=0)).start_kernel()
    assert not (await jupyter_env.pool.status()).queue


@pytest.mark.long
async def test_a_crash_loop_past_the_restart_limit(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = jupyter_env.install("crasher", argv=CRASHER, restart_grace=10)
    km = await started_kernel(manager(kernel, AsyncIOLoopKernelManager, config=restarting_soon(limit=2)))
    given_up = asyncio.Event()
    km.add_restart_callback(given_up.set, "dead")
    first = await jupyter_env.only_lease()

    async def has_given_up() -> bool:
        """Look at the pool all the while, as others do: a restart must not lose its lease to that."""
        assert (await jupyter_env.only_lease()).id == first.id
        return given_up.is_set()

    await eventually(has_given_up)
    await eventually(jupyter_env.is_empty)


async def test_an_automatic_restart_whose_launch_raises(
    jupyter_env: JupyterEnv, manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    binary = jupyter_env.folder / "sleep"
    shutil.copy("/bin/sleep", binary)
    kernel = jupyter_env.install("vanishing", argv=[str(binary), "600"])
    km = await started_kernel(manager(kernel, AsyncIOLoopKernelManager, config=restarting_soon()))
    lease = await jupyter_env.only_lease()
    binary.unlink()
    kill(km.provisioner.pid)
    await eventually(jupyter_env.is_empty)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.NOT_READY


async def test_kill_9_of_a_kernel_that_nobody_restarts(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km)
    kill(km.provisioner.pid)
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_manager_that_is_dropped_leaves_the_slice_to_its_running_kernel(
    jupyter_env: JupyterEnv,
) -> None:
    km = AsyncKernelManager(kernel_name=jupyter_env.install("two"))
    await km.start_kernel()
    await answer(km)
    process = km.provisioner.process
    km.context.destroy(linger=0)
    # jupyter_client's own: the process of a dropped manager is nobody's to wait for.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        dropped = weakref.ref(km)
        del km
        gc.collect()
    lease = await jupyter_env.only_lease()
    assert is_running(process.pid)
    assert lease.process is not None
    assert lease.process.pid == process.pid
    process.kill()
    process.wait()
    await eventually(jupyter_env.is_empty)

    async def is_collected() -> bool:
        """Its kernel's proxy has gone on to use it, until it has closed."""
        gc.collect()
        return dropped() is None

    await eventually(is_collected)


async def test_the_kernel_dies_before_it_answers(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("deaf", argv=SLEEPER)))
    kill(km.provisioner.pid)
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_cleanup_that_only_announces_a_restart(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two", restart_grace=0)))
    await km.shutdown_kernel(now=True, restart=True)
    assert (await jupyter_env.only_lease()).process == Process.current()
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_cleanup_before_the_kernel_has_ended_ends_it(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km)
    pid = km.provisioner.pid
    await km.cleanup_resources()
    await eventually(jupyter_env.is_empty)
    assert not is_running(pid)


async def test_shutdown_without_a_kernel_changes_nothing(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await km.shutdown_kernel(now=True)
    for restart in (False, True, False):
        await km.cleanup_resources(restart=restart)
    assert await jupyter_env.is_empty()
