"""Warm kernels behind the kernel proxy: after a wait, parked and back, of a service, and in pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool_client import Process, connect
from gpu_pool_provisioner.templates import templates
from support.fixtures import soon, spec
from support.frontend import page_of
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, kill, started_kernel
from support.pods import PodPool, pods
from support.service import ForkServer, serving
from support.warm_kernels import Spec, is_warm, start, until_ready

__all__ = ["pods", "soon", "spec"]

#: Whether a module that was preloaded is there before it is imported.
IS_THERE = "import sys; print('drawing' in sys.modules)"


async def test_a_kernel_that_waited_in_the_queue_is_warm(
    jupyter_env: JupyterEnv, manager: Managers, spec: Spec
) -> None:
    name = spec("drawing", drawing="")
    first = manager(name)
    await until_ready(first)
    lesson = await jupyter_env.fill("98%")
    async with page_of(manager(name)) as (km, page):
        cell = page.run(IS_THERE)
        await cell.shows("You are next in the queue")
        await jupyter_env.pool.release(lesson.id)
        assert (await cell.done()).outputs[-1] == "True\n"
    assert is_warm(km)
    pid = km.provisioner.pid
    assert Process.of(pid) in [lease.process for lease in await jupyter_env.leases()]
    await km.restart_kernel()
    assert await answer(km, IS_THERE) == "True\n"
    assert km.provisioner.pid != pid


@pytest.mark.long
async def test_a_warm_kernel_is_parked_and_comes_back(
    jupyter_env: JupyterEnv, manager: Managers, spec: Spec, course: Any
) -> None:
    course(idle_limit="1s")
    name = spec("drawing", drawing="")
    first = await started_kernel(manager(name))
    await answer(first)
    await eventually(has_a_template)
    await first.shutdown_kernel(now=True)
    async with page_of(manager(name)) as (km, page):
        assert (await page.run(f"{IS_THERE}; kept = 42").done()).outputs == ["True\n"]
        await eventually(jupyter_env.is_parked)
        assert (await page.run("print(kept)").done()).outputs == ["42\n"]
        # Its template may end meanwhile.
        (template,) = templates().all()
        kill(template.pid)
        await eventually(jupyter_env.is_parked)
        assert (await page.run("print(kept)").done()).outputs == ["42\n"]
    assert is_warm(km)


async def has_a_template() -> bool:
    return any(template.is_ready for template in templates().all())


@pytest.mark.long
async def test_kernels_of_a_service_are_warm(
    children: ForkServer,
    jupyter_env: JupyterEnv,
    manager: Managers,
    spec: Spec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = "c.PoolSettings.default_course = {'longest_lease': '4h'}\n"
    async with serving(children, tmp_path / "service", limits) as service, connect(service.url) as pool:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        name = spec("drawing", drawing="")
        first, second = manager(name), manager(name)
        assert not await start(first)
        await answer(first)
        await eventually(has_a_template)
        await second.start_kernel()
        assert await answer(second, IS_THERE) == "True\n"
        assert is_warm(second)
        attached = [lease.process for lease in (await pool.status()).leases]
        assert Process.of(second.provisioner.pid) in attached
        await second.restart_kernel()
        assert await answer(second, IS_THERE) == "True\n"
        for km in (first, second):
            await km.shutdown_kernel(now=True)
        assert not (await pool.status()).leases


async def test_a_kernel_in_a_pod_is_warm_after_a_restart(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("warm", preload=["wave"])))
    is_there = "import sys; print('wave' in sys.modules)"
    assert await answer(km, is_there) == "False\n"
    (pod,) = pods.launched

    async def is_preloaded() -> bool:
        assert pod.process is not None
        return any("wave" in each.cmdline() for each in psutil.Process(pod.process.pid).children())

    async def is_warm_then() -> bool:
        await km.restart_kernel()
        return await answer(km, is_there) == "True\n"

    # In a pause of the first kernel.
    await eventually(is_preloaded)
    await eventually(is_warm_then)
    assert pods.launched == [pod]
    assert not templates().all()
