"""A JupyterHub of ordinary users, on a machine that is set up as docs/administrator/hibernation.md says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page

from support.accounts import ENVIRONMENT, PATH, Machine, machine
from support.browsers import PATIENCE
from support.guide import Guide
from support.hibernating import CRIU
from support.hub_with_proxy import DEVICES, Hub, need_proxy
from support.lab import SETTINGS
from support.left_kernels import gpu_kernel, start, write
from support.pools import eventually

PAGE = "administrator/hibernation.md"
COURSE = "title: Introduction\nwho: {users: [alice, bob]}\nslices: [{name: Small, request: 2%}]\n"
_HUB = f"""
c.JupyterHub.spawner_class = "gpu-pool"
c.Spawner.cmd = ["{ENVIRONMENT}/bin/python", "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--ServerApp.open_browser=False"]
c.Spawner.environment = {{}}
c.GPUPoolSpawnerMixin.pool_url = "unix:"
"""
#: A machine with other work takes longer.
_PATIENT = {"leave_within = 45": "leave_within = 300", "interrupt_timeout = 60": "interrupt_timeout = 310"}


def install(machine: Machine, *users: str) -> None:
    """Do what stands on the page below *Install it*, as it stands there, for these users."""
    guide = Guide(PAGE, Path(), {})
    for command in guide.commands("Install it"):
        for each in users if "usermod" in command else ("",):
            machine.type(command.replace(" ada", f" {each}"))
    path = "/etc/sudoers.d/gpu-pool-hibernation"
    machine.write(path, guide.file("Install it", path), 0o440)
    machine.run("visudo", "--check")


def turn_on(machine: Machine, more: str = "") -> str:
    """Do what stands below *Turn it on*; return what the Hub is configured with."""
    guide = Guide(PAGE, Path(), _PATIENT)
    path = "/etc/jupyter/jupyter_server_config.py"
    machine.write(path, guide.file("Turn it on for a JupyterHub", path) + more)
    return guide.file("Turn it on for a JupyterHub", "jupyterhub_config.py")


@pytest.fixture
def school() -> Iterator[Machine]:
    """A machine with two users and CRIU, and nothing of ours."""
    need_proxy()
    with machine() as made:
        for name in ("alice", "bob"):
            made.add_user(name)
        made.write("/etc/gpu-pool/hibernation.json", json.dumps({"criu": os.path.realpath(CRIU)}))
        made.write("/etc/gpu-pool/courses/intro.yaml", COURSE)
        made.write(
            "/etc/jupyter/gpu_pool_config.py", 'c.PoolSettings.courses_dir = "/etc/gpu-pool/courses"\n'
        )
        made.write("/etc/jupyter/labconfig/default_setting_overrides.json", json.dumps(SETTINGS))
        yield made


@asynccontextmanager
async def serving(machine: Machine) -> AsyncIterator[None]:
    """Serve the machine's GPU to its users."""
    command = ("gpu-pool", "serve", "--mode=0666", "--store=/var/lib/gpu-pool/store.db")
    service = machine.start(*command, GPU_POOL_DEVICES=DEVICES)
    try:
        await eventually(machine.here("/run/gpu-pool/gpu-pool.sock").exists)
        yield
    finally:
        service.terminate()
        service.wait()


@asynccontextmanager
async def running_hub(machine: Machine, folder: Path, config: str) -> AsyncIterator[Hub]:
    """Run a Hub whose users are the machine's, with the pool that serves it."""
    hub = Hub(
        folder,
        {},
        {"intro": COURSE},
        config=_HUB + config,
        environment={"GPU_POOL_DEVICES": DEVICES, "PATH": PATH},
        within=[*machine.enter, str(folder)],
    )
    async with serving(machine):
        await hub.start()
        try:
            for name in ("alice", "bob"):
                await hub.api("POST", f"users/{name}")
            yield hub
        finally:
            await hub.end()


@asynccontextmanager
async def logged_in(browser: Browser, hub: Hub, name: str) -> AsyncIterator[BrowserContext]:
    """Be a user in a browser of theirs."""
    context = await browser.new_context(viewport={"width": 1100, "height": 700}, device_scale_factor=2)
    context.set_default_timeout(PATIENCE)
    page = await context.new_page()
    await page.goto(f"{hub.url}/hub/login?next=/hub/home")
    await page.fill("#username_input", name)
    await page.fill("#password_input", "any")
    await page.click("#login_submit")
    await page.wait_for_url("**/hub/home")
    await page.close()
    yield context
    await context.close()


async def opened(context: BrowserContext, hub: Hub, name: str) -> Page:
    """Open a user's notebook."""
    page = await context.new_page()
    await page.goto(f"{hub.url}/user/{name}/lab/tree/week1.ipynb")
    return page


async def begin(machine: Machine, hub: Hub, name: str) -> str:
    """Start a user's server, and write their notebook; return what their kernel is called."""
    await start(hub, name)
    kernel, shown = await gpu_kernel(hub, name)
    notebook = machine.here(f"/home/{name}/week1.ipynb")
    write(notebook, kernel)
    shutil.chown(notebook, notebook.parent.stat().st_uid, notebook.parent.stat().st_gid)
    return shown
