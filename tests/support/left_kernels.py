"""Notebooks whose kernels are left on disk, in the servers of a JupyterHub that its idle culler stops."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from playwright.async_api import Locator, Page

from support.hub_with_proxy import Hub
from support.jupyter_env import eventually
from support.notebook import NAMES
from support.suites import required


def write(path: Path, kernel: str) -> None:
    """Write a notebook with one empty cell."""
    spec = {"name": kernel, "display_name": NAMES[0], "language": "python"}
    cells = [nbformat.v4.new_code_cell()]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), path)


def images(folder: Path) -> int:
    """Return how many kernels are on disk there."""
    return len(list(folder.glob("*/image")))


def output(page: Page) -> Locator:
    """Return what a cell shows that prints *kept:*."""
    return page.locator(".jp-Notebook .jp-OutputArea-output", has_text="kept:")


@pytest.fixture
def culler(request: pytest.FixtureRequest) -> Path:
    """Return where jupyterhub-idle-culler is installed."""
    assert request.config.cache is not None
    return required(["jupyterhub-idle-culler"], request.config.cache)


async def start(hub: Hub, user: str) -> None:
    """Start a user's server for the course, and wait until it answers."""
    assert (await hub.api("POST", f"users/{user}/server", {"course": "intro"})).code in (201, 202)
    await eventually(lambda: hub.is_ready(user), within=300)


async def gpu_kernel(hub: Hub, user: str) -> tuple[str, str]:
    """Return the name of the kernel with a slice that a user's server offers, and what people read."""
    specs = json.loads((await hub.api("GET", f"/user/{user}/api/kernelspecs")).body)["kernelspecs"]
    shown = {name: specs[name]["spec"]["display_name"] for name in specs}
    [kernel] = [name for name in shown if shown[name].startswith("Python 3 (GPU")]
    return kernel, shown[kernel]


async def cull(hub: Hub, culler: Path, *users: str) -> None:
    """Let the idle culler run until it has stopped their servers, which nobody has used for a second."""
    night = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jupyterhub_idle_culler", f"--url={hub.url}/hub/api"),
        *("--timeout=1", "--cull-every=1"),
        env={**os.environ, "PYTHONPATH": str(culler), "JUPYTERHUB_API_TOKEN": hub.token},
    )

    async def are_stopped() -> bool:
        assert night.returncode is None
        answers = [await hub.api("GET", f"users/{each}") for each in users]
        return not any(json.loads(each.body)["servers"] for each in answers)

    try:
        await eventually(are_stopped, within=300)
    finally:
        night.terminate()
        await night.wait()
