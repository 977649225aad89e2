"""Warm kernels behind the kernel proxy: after a wait, parked and back, of a service; cold ones in pods."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Process, connect
from gpu_pool_provisioner import templates as templates_module
from gpu_pool_provisioner.templates import templates
from support.fixtures import soon, spec
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, kill
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
    km = manager(name)
    await km.start_kernel()
    async with frontend(km) as page:
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
    first = manager(name)
    await first.start_kernel()
    await answer(first)
    await eventually(has_a_template)
    await first.shutdown_kernel(now=True)
    km = manager(name)
    await km.start_kernel()
    async with frontend(km) as page:
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


async def test_kernels_in_pods_start_cold_and_that_is_told_once(
    manager: Managers, spec: Spec, pods: PodPool, caplog: pytest.LogCaptureFixture
) -> None:
    templates_module.say_cold_in_pods.cache_clear()
    name = spec("drawing", drawing="")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            km = manager(name)
            await km.start_kernel()
            assert await answer(km, IS_THERE) == "False\n"
    assert [line.startswith("Kernels in pods start cold") for line in caplog.messages].count(True) == 1
    assert not templates().all()
