"""Kernels on their way to disk or back when their server is stopped, by a real CRIU: none of them is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import GpuPoolError, LeaseState, PoolUnreachable
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.hibernation.program.gpu_pool_hibernation.running import KERNEL
from gpu_pool_provisioner.session import State
from support.frontend import Frontend, frontend, listening, printed
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.kernels_on_disk import CRIU, NEEDS_CRIU, images, install_keeper
from support.server import Server

pytestmark = NEEDS_CRIU


def install(env: JupyterEnv, size: str = "60%", **more: Any) -> str:
    """Write a kernelspec whose kernels sleep soon and outlive their server, and a notebook."""
    return install_keeper(env, "stopped", size, **{"hibernate_after": 0.3, **more})


@asynccontextmanager
async def notebook(
    env: JupyterEnv, manager: Managers, kernel: str
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Start the kernel of a notebook, as a server does, with a page that shows it."""
    km = manager(kernel)
    path = env.folder / "notebooks" / "week1.ipynb"
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(path)})
    async with frontend(km) as page:
        yield km, page


async def until_it_is(km: AsyncKernelManager, state: State) -> None:
    await eventually(lambda: km.provisioner.session.state is state)


@asynccontextmanager
async def sleeper(
    env: JupyterEnv, manager: Managers, kernel: str
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Open the notebook, and return once its kernel is on disk, with a variable."""
    async with notebook(env, manager, kernel) as (km, page):
        await printed(page, "kept = 41")
        await until_it_is(km, State.HIBERNATED)
        yield km, page


async def is_left_to_the_next(env: JupyterEnv, manager: Managers, kernel: str) -> None:
    """See that the next server goes on with the kernel of the notebook."""
    assert len(images(env)) == 1
    async with notebook(env, manager, kernel) as (km, page):
        assert km.provisioner.session.state is State.HIBERNATED
        assert "41\n" in await printed(page, "print(kept)")
        await km.shutdown_kernel(now=True)


async def test_one_that_is_awake_and_waits_for_a_slice_goes_to_disk_again(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install(jupyter_env)
    other = manager(jupyter_env.install("other", "60%"))
    async with sleeper(jupyter_env, manager, kernel) as (km, page):
        await other.start_kernel()
        async with frontend(other) as its:
            await printed(its, "1")
            cell = page.run("kept += 1")
            await eventually(lambda: km.provisioner.session.wait is not None)
            assert not images(jupyter_env)
            assert await km.provisioner.leave_image() == ""
            assert "Jupyter server ends" in "".join((await cell.done()).outputs)
        await km.shutdown_kernel()
    await other.shutdown_kernel(now=True)
    await eventually(jupyter_env.is_empty)
    await is_left_to_the_next(jupyter_env, manager, kernel)


async def test_one_that_is_just_to_go_on_goes_to_disk_again(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install(jupyter_env)
    async with sleeper(jupyter_env, manager, kernel) as (km, _):
        await in_background(km.provisioner.driver.resume())
        assert await km.provisioner.leave_image() == ""
        assert (await jupyter_env.only_lease()).state is LeaseState.PARKED
        await km.shutdown_kernel()
    await is_left_to_the_next(jupyter_env, manager, kernel)


def stopping(folder: Path) -> tuple[Path, Path]:
    """Return a CRIU that stops a kernel once it has come back while the second file is there."""
    program, stops = folder / "criu", folder / "stops"
    program.write_text(
        f'#!/bin/sh\n{CRIU} "$@"\nstatus=$?\n'
        f"if [ $1 = restore ] && [ -e {stops} ]; then kill -STOP {KERNEL}; fi\nexit $status\n"
    )
    program.chmod(0o755)
    return program, stops


@pytest.mark.parametrize("is_left", [False, True])
async def test_one_that_came_back_and_did_not_answer_is_kept_and_can_be_woken_again_at_once(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path, is_left: bool
) -> None:
    program, stops = stopping(tmp_path)
    kernel = install(jupyter_env, criu=str(program), ready_timeout=10)
    async with sleeper(jupyter_env, manager, kernel) as (km, page):
        if is_left:
            assert await km.provisioner.leave_image() == ""
            await km.shutdown_kernel()
        else:
            await does_not_come_back(km, page, stops)
            assert "41\n" in await printed(page, "print(kept)")
            await until_it_is(km, State.HIBERNATED)
            await does_not_come_back(km, page, stops)
            assert await km.provisioner.leave_image() == ""
            await km.shutdown_kernel()
    if is_left:
        async with notebook(jupyter_env, manager, kernel) as (km, page):
            await does_not_come_back(km, page, stops)
            assert await km.provisioner.leave_image() == ""
            await km.shutdown_kernel()
    await is_left_to_the_next(jupyter_env, manager, kernel)


async def does_not_come_back(km: AsyncKernelManager, page: Frontend, stops: Path) -> None:
    """Run a cell that finds its kernel stopped."""
    await asyncio.to_thread(stops.touch)
    assert "Nothing of it is lost" in await printed(page, "print(kept)")
    assert km.provisioner.session.state is State.HIBERNATED
    await asyncio.to_thread(stops.unlink)


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """Let this process open so few more files, as a server that has nearly as many open as it may.

    What it runs has none of them open.
    """
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    most = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + count + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(opened.pop())
        yield
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_server_that_can_open_too_few_files_says_so_and_loses_nothing(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install(jupyter_env)
    async with sleeper(jupyter_env, manager, kernel) as (km, page):
        with few_files(11):  # enough for the kernel to come back, and too few to connect to it
            said = await printed(page, "print(kept)")
        assert "it could not be reached (Too many open files). Nothing of it is lost" in said
        assert km.provisioner.session.state is State.HIBERNATED
        assert len(images(jupyter_env)) == 1
        assert "41\n" in await printed(page, "print(kept)")
        await km.shutdown_kernel(now=True)


@asynccontextmanager
async def serving(env: JupyterEnv) -> AsyncIterator[Server]:
    """Run a server, and stop it."""
    server = Server(env)
    try:
        await eventually(server.started)
        yield server
        server.process.terminate()
        await server.ended()
    finally:
        server.process.kill()
        server.process.wait()


def of_a_slow_disk(env: JupyterEnv, name: str, program: str) -> str:
    """Write a kernelspec with a CRIU of its own, and a notebook."""
    criu, notebook = env.folder / f"criu-{name}", env.folder / "notebooks" / f"{name}.ipynb"
    criu.write_text(program)
    criu.chmod(0o755)
    notebook.parent.mkdir(exist_ok=True)
    notebook.write_text("{}")
    config = {"hibernate_with_server": True, "hibernation_folder": str(env.folder / "asleep")}
    return env.install(name, "20%", criu=str(criu), **config)


def server_ends_within(seconds: int) -> None:
    config = Path(os.environ["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps({"GPUPoolServer": {"leave_within": seconds}}))


async def test_a_large_one_goes_to_disk_after_a_small_one_and_is_told_of_where_it_was_too_late(
    jupyter_env: JupyterEnv, tmp_path: Path
) -> None:
    begun, together = tmp_path / "begun", tmp_path / "together"
    small = (
        f"#!/bin/sh\nif [ $1 = dump ]; then for each in $(seq 30); do sleep 0.1; "
        f'if [ -e {begun} ]; then touch {together}; fi; done; fi\nexec {CRIU} "$@"\n'
    )
    large = f'#!/bin/sh\nif [ $1 = dump ]; then touch {begun}; sleep 20; fi\nexec {CRIU} "$@"\n'
    programs = {"small": small, "large": large}
    kernels = {name: of_a_slow_disk(jupyter_env, name, text) for name, text in programs.items()}
    server_ends_within(12)

    async def said(server: Server, name: str, code: str) -> str:
        session = await server.open_notebook(f"{name}.ipynb", kernels[name])
        async with listening(server.client_of(session)) as page:
            return " ".join((await printed(page, code)).split())

    async with serving(jupyter_env) as server:
        await said(server, "large", "kept = bytes(range(256)) * 1_200_000")
        await said(server, "small", "kept = 41")
    assert len(images(jupyter_env)) == 1
    assert begun.exists()
    assert not together.exists()
    async with serving(jupyter_env) as server:
        assert "41" in await said(server, "small", "print(kept)")
        told = await said(server, "large", "print('kept' in globals())")
        assert "False" in told
        assert "it ended with its server. It was not on disk within 12 seconds." in told


@pytest.mark.parametrize("parked", [False, True], ids=["with its slice", "parked"])
@pytest.mark.parametrize("error", [PoolUnreachable, GpuPoolError], ids=["away", "broken"])
async def test_one_whose_pool_fails_when_its_server_ends_goes_to_disk_all_the_same(
    jupyter_env: JupyterEnv,
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
    error: type[GpuPoolError],
    parked: bool,
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise error("The GPU pool does not do that.")

    kernel = install(jupyter_env, hibernate_after=0.0)
    async with notebook(jupyter_env, manager, kernel) as (km, page):
        await printed(page, "kept = 41")
        if parked:
            await in_background(km.provisioner.driver.give_back())
            await eventually(lambda: km.provisioner.session.state is State.PARKED)
        with monkeypatch.context() as patch:
            for verb in ("activity", "attach", "get_lease", "park"):
                patch.setattr(type(jupyter_env.pool), verb, away)
            assert await km.provisioner.leave_image() == ""
        await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)
    gc.collect()  # a server that ends holds nothing; what it holds here goes with what has caught the error
    await is_left_to_the_next(jupyter_env, manager, kernel)
