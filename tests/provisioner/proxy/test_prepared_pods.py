"""Kernels that begin in pods which were there before them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from support.frontend import frontend, page_of
from support.jupyter_env import JupyterEnv, Managers
from support.pods import PodPool, PodProcess, pods

__all__ = ["pods"]


async def until_listening(pod: PodProcess) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(pod.address, 9750)
        except OSError:  # noqa: PERF203 - what is waited for takes longer
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return


async def test_a_first_kernel_begins_in_it_and_restarts_there(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    prepared = pods.prepare()
    await until_listening(prepared)
    async with page_of(manager(jupyter_env.install("two", env={"OWN": "mine"}))) as (km, page):
        code = "import os; print(os.getpid(), os.environ['GPU_POOL_SLICE'], os.environ['OWN'])"
        assert (await page.run(code).done()).outputs == [f"{prepared.kernel} 2% mine\n"]
        assert (await page.run("%gpu").done()).status == "ok"
        before = prepared.kernel
        await km.restart_kernel()
        assert (await page.run(code).done()).outputs == [f"{prepared.kernel} 2% mine\n"]
        assert prepared.kernel != before
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
    assert pods.launched == [prepared]
    await km.shutdown_kernel()
    assert not pods.running
    assert await jupyter_env.is_empty()


async def test_its_supervisor_may_still_be_starting(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    prepared = pods.prepare()
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    assert pods.launched == [prepared]


@pytest.mark.parametrize("trouble", ["killed", "stopped", "other key"])
async def test_where_no_kernel_comes_of_it_another_pod_has_it(
    jupyter_env: JupyterEnv,
    manager: Managers,
    pods: PodPool,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would be waited for so long: nobody sets it.
    monkeypatch.setattr("gpu_pool_provisioner.launchers.lease_pod._PREPARED_WITHIN", 1.0)
    prepared = pods.prepare()
    await until_listening(prepared)
    assert prepared.process is not None
    if trouble == "killed":
        os.killpg(prepared.process.pid, signal.SIGKILL)
        prepared.process.wait()
    elif trouble == "stopped":
        os.kill(prepared.process.pid, signal.SIGSTOP)
    else:
        prepared.key = "of another pod"
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        assert (await page.run("print('well')").done()).outputs == ["well\n"]
    assert len(pods.launched) == 2
    assert pods.running == [pods.launched[1]]


async def test_a_kernel_that_ends_in_it_at_once_is_started_in_another_and_says_why(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    prepared = pods.prepare()
    await until_listening(prepared)
    km = manager(jupyter_env.install("two"))
    km.kernel_spec.argv = ["sh", "-c", "exit 3", "{connection_file}"]
    await km.start_kernel()
    async with frontend(km) as page:
        cell = await page.run("print('never')").done()
        assert cell.status == "error"
    assert len(pods.launched) == 2
