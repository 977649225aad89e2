"""Kernels that sleep on disk, by a real CRIU, as the tests of them start them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.hibernation.kept import why_not
from gpu_pool_provisioner.session import State
from support.frontend import Frontend, frontend, page_of, printed
from support.hibernating import CRIU as CRIU
from support.jupyter_env import JupyterEnv, Managers, eventually

_WHY = why_not(CRIU)
#: The marks of such tests.
NEEDS_CRIU = [
    pytest.mark.hibernation,
    pytest.mark.skipif(bool(_WHY), reason=f"kernels cannot sleep here: {_WHY} CRIU names the program."),
]


def images(env: JupyterEnv) -> list[Path]:
    """Return what is on disk of kernels."""
    return list((env.folder / "asleep").glob("*/image"))


def state(km: AsyncKernelManager) -> State:
    found: State = km.provisioner.session.state
    return found


async def asleep(km: AsyncKernelManager, within: float = 120) -> None:
    """Return once a kernel sleeps."""
    await eventually(lambda: state(km) is State.HIBERNATED, within=within)


async def tried_to_sleep(km: AsyncKernelManager) -> None:
    """Return once a kernel was to sleep and is awake."""
    await eventually(lambda: state(km) is State.PARKED and km.provisioner.session.hibernates_at is None)


@asynccontextmanager
async def sleeper(
    env: JupyterEnv, manager: Managers, after: float = 0.5, name: str = "sleeper", **config: Any
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Start a kernel that may sleep, with a page that shows it."""
    folder = str(env.folder / "asleep")
    config = {"criu": CRIU, "hibernation_folder": folder, **config}
    async with page_of(manager(env.install(name, "50%", hibernate_after=after, **config))) as (km, page):
        yield km, page


def install_keeper(env: JupyterEnv, name: str = "keeper", size: str = "40%", **more: Any) -> str:
    """Write a kernelspec whose kernels outlive their server, and two notebooks."""
    (env.folder / "notebooks").mkdir(exist_ok=True)
    for notebook in ("week1.ipynb", "week2.ipynb"):
        (env.folder / "notebooks" / notebook).write_text("{}")
    folder = str(env.folder / "asleep")
    config = {"hibernate_with_server": True, "criu": CRIU, "hibernation_folder": folder}
    return env.install(name, size, **{**config, **more})


@asynccontextmanager
async def notebook(
    env: JupyterEnv, manager: Managers, kernel: str, name: str = "week1.ipynb"
) -> AsyncIterator[AsyncKernelManager]:
    """Start the kernel of a notebook, as a server does."""
    km = manager(kernel)
    path = env.folder / "notebooks" / name
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(path)})
    yield km


async def end_with_server(km: AsyncKernelManager) -> None:
    """End a kernel as the server's extension does, and then the server."""
    assert await km.provisioner.leave_image() == ""
    await km.shutdown_kernel()


async def left_one(env: JupyterEnv, manager: Managers, code: str = "kept = 1", **config: Any) -> str:
    """Leave a kernel on disk; return the name of its kernelspec."""
    kernel = install_keeper(env, **config)
    async with notebook(env, manager, kernel) as km, frontend(km) as found:
        await printed(found, code)
        await end_with_server(km)
    assert len(images(env)) == 1
    return kernel


#: Starts the kernel of a notebook, runs a cell, waits until it sleeps, and ends as with kill -9. With a
#: fourth word it has forked a child before, which lives on, and says its pid.
STARTER = """
import asyncio, os, signal, sys
from jupyter_client.manager import AsyncKernelManager
from gpu_pool_provisioner.session import State

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": sys.argv[2]})
    client = km.client()
    client.start_channels()
    await client.wait_for_ready()
    await client.execute_interactive(sys.argv[3])
    while km.provisioner.session.state is not State.HIBERNATED:
        await asyncio.sleep(0.05)
    if len(sys.argv) > 4:
        child = os.fork()
        if not child:
            os.close(1)
            signal.pause()
        print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def started(env: JupyterEnv, kernel: str, code: str) -> asyncio.subprocess.Process:
    """Start a server's process that runs a cell; see :data:`STARTER`."""
    path = str(env.folder / "notebooks" / "week1.ipynb")
    return await asyncio.create_subprocess_exec(sys.executable, "-c", STARTER, kernel, path, code)
