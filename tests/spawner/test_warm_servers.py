"""A course whose kernels are warm: a real Hub, a server for each user, and a real service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient

from support.hub_with_proxy import Hub, need_proxy
from support.jupyter_env import eventually, printed_by
from support.service import ForkServer, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

COURSE = """\
title: Introduction
slices: [{name: Small, request: 2%}, {name: Large, request: 10%}]
preload: [module_of_the_course]
preload_with_server: true
"""
IS_WARM = "import sys; print('module_of_the_course' in sys.modules)"
EXTENSION = {"ServerApp": {"jpserver_extensions": {"gpu_pool_provisioner": True}}}


@pytest.fixture
async def hub(children: ForkServer, tmp_path: Path) -> AsyncIterator[Hub]:
    """Run a Hub with one course, whose pool is a service that follows the same files."""
    need_proxy()
    followed = f"c.PoolSettings.courses_dir = {str(tmp_path / 'hub/courses')!r}\n"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/module_of_the_course.py").write_text("")
    async with serving(children, tmp_path / "pool", followed, "--mode=0666") as service:
        config = (
            f"c.GPUPoolSpawnerMixin.pool_url = {service.url!r}\n"
            f"c.Spawner.environment['PYTHONPATH'] = {str(tmp_path / 'modules')!r}\n"
        )
        hub = Hub(tmp_path / "hub", {}, {"intro": COURSE}, config=config)
        (hub.folder / "jupyter_server_config.json").write_text(json.dumps(EXTENSION))
        await hub.start()
        try:
            yield hub
        finally:
            await hub.end()


async def test_the_first_kernel_of_everybody_is_warm(hub: Hub) -> None:
    for user in ("ada", "grace"):
        await hub.api("POST", f"users/{user}")
        answer = await hub.api("POST", f"users/{user}/server", {"course": "intro"})
        assert answer.code in (201, 202), answer.body

    async def are_ready() -> bool:
        assert "does not start with the server" not in hub.log, hub.log
        return hub.log.count("The template of the kernel python3-gpu-2pct is ready") == 2

    await eventually(are_ready, within=240)
    assert "The template of the kernel python3-gpu-10pct" not in hub.log
    for user in ("ada", "grace"):
        kernel = await hub.api("POST", f"/user/{user}/api/kernels", {"name": "python3-gpu-2pct"})
        assert kernel.code == 201, kernel.body
        kernel_id = json.loads(kernel.body)["id"]
        runtime = hub.folder / "homes" / user / ".local/share/jupyter/runtime"
        client = AsyncKernelClient(connection_file=str(runtime / f"kernel-{kernel_id}.json"))
        client.load_connection_file()
        assert await printed_by(client, IS_WARM) == "True\n"
    for user in ("ada", "grace"):
        await hub.api("DELETE", f"users/{user}/server")
