"""A course that changes while its servers run: a real Hub, a real server, a real service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.hub_with_proxy import Hub, need_proxy
from support.jupyter_env import eventually
from support.service import ForkServer, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

COURSE = "title: Introduction\nslices: [{name: Small, request: 2%}]\n"


@pytest.fixture
async def hub(children: ForkServer, tmp_path: Path) -> AsyncIterator[Hub]:
    """Run a Hub with one course, whose pool is a service that follows the same files."""
    need_proxy()
    courses = tmp_path / "hub/courses"
    followed = f"c.PoolSettings.courses_dir = {str(courses)!r}\n"
    async with serving(children, tmp_path / "pool", followed, "--mode=0666") as service:
        hub = Hub(
            tmp_path / "hub",
            {},
            {"intro": COURSE},
            config=f"c.GPUPoolSpawnerMixin.pool_url = {service.url!r}\n",
        )
        await hub.start()
        try:
            yield hub
        finally:
            await hub.end()


async def test_a_launcher_offers_what_the_course_offers_now(hub: Hub) -> None:
    await hub.api("POST", "users/ada")
    answer = await hub.api("POST", "users/ada/server", {"course": "intro"})
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready("ada"))

    async def offered() -> set[str]:
        specs = json.loads((await hub.api("GET", "/user/ada/api/kernelspecs")).body)["kernelspecs"]
        return {name for name in specs if "-gpu-" in name}

    assert await offered() == {"python3-gpu-2pct"}
    (hub.courses / "intro.yaml").write_text(COURSE.replace("2%", "4%"))
    await eventually(offered, lambda seen: seen == {"python3-gpu-4pct"})
    kernel = await hub.api("POST", "/user/ada/api/kernels", {"name": "python3-gpu-4pct"})
    assert kernel.code == 201, kernel.body
    refused = await hub.api("POST", "/user/ada/api/kernels", {"name": "python3-gpu-2pct"})
    assert refused.code >= 400
    await hub.api("DELETE", "users/ada/server")
