"""The kernel proxy as a process of its own, under the stock provisioner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import port_names
from jupyter_client.manager import AsyncKernelManager

from support.frontend import frontend, listening, page_of
from support.jupyter_env import IPYKERNEL, TINY, WRAP, JupyterEnv, Managers, eventually, is_running, kill
from support.ports import free_ports, write_connection


@pytest.fixture
def manager(manager: Managers) -> Managers:
    """Make managers whose ports nobody else is given: they choose them, and their kernel listens later."""

    def make(kernel: str, *arguments: Any, **traits: Any) -> AsyncKernelManager:
        ports = dict(zip(port_names, free_ports(len(port_names)), strict=True))
        return manager(kernel, *arguments, cache_ports=False, **{**ports, **traits})

    return make


def install(jupyter_env: JupyterEnv, argv: tuple[str, ...] = IPYKERNEL, size: str = "2%") -> str:
    """Write a kernelspec that needs no provisioner of ours."""
    folder = jupyter_env.folder / "data" / "kernels" / "wrapped"
    folder.mkdir(parents=True)
    spec = {"argv": [*WRAP, "--slice", size, "--", *argv], "display_name": "wrapped", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    return folder.name


def child_of(km: AsyncKernelManager) -> int:
    """Return the pid of the real kernel."""
    (kernel,) = psutil.Process(km.provisioner.pid).children()
    return kernel.pid


async def test_a_wrapped_kernel_waits_gives_up_waits_again_and_runs(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(install(jupyter_env))) as (km, page):
        cell = page.run("print('never')")
        await cell.shows("Waiting for a GPU slice of 2%. You are next in the queue")
        await km.interrupt_kernel()
        assert "You stopped waiting" in (await cell.done()).outputs[0]
        cell = page.run("import os; print(os.environ['GPU_POOL_SLICE'], os.environ['JPY_PARENT_PID'])")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == [f"2% {km.provisioner.pid}\n"]
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert (await cell.done()).status == "error"
    lease = await jupyter_env.only_lease()
    assert lease.process is not None
    assert lease.process.pid == child_of(km)
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)


@pytest.mark.parametrize(
    "named", ["link/kernel-1.json", "{folder}/link/kernel-1.json", "kernels/kernel-1.json"]
)
async def test_the_connection_file_may_be_named_in_other_ways(jupyter_env: JupyterEnv, named: str) -> None:
    folder = jupyter_env.folder / "kernels"
    folder.mkdir()
    (jupyter_env.folder / "link").symlink_to(folder)
    place, _ = write_connection(folder / "kernel-1.json")
    file = named.format(folder=jupyter_env.folder)
    words = [word.format(connection_file=file) for word in (*WRAP, "--slice", "2%", "--", *IPYKERNEL)]
    wrapper = await asyncio.create_subprocess_exec(*words, cwd=jupyter_env.folder)
    client = AsyncKernelClient(connection_file=place)
    client.load_connection_file()
    try:
        async with listening(client) as page:
            assert (await page.run("print('well')").done()).outputs == ["well\n"]
    finally:
        with suppress(ProcessLookupError):
            wrapper.terminate()
        await wrapper.wait()


def first_only(argv: list[str], file: str) -> list[str]:
    """Put a connection file into a command as VS Code does (microsoft/vscode-jupyter#7203)."""
    named = next(place for place, word in enumerate(argv) if "{connection_file}" in word)
    return [
        word.replace("{connection_file}", file) if place == named else word for place, word in enumerate(argv)
    ]


def whole_words(argv: list[str], file: str) -> list[str]:
    """Put it there as frontends do that compare words and do not look into them."""
    return [file if word == "{connection_file}" else word for word in argv]


@pytest.mark.parametrize(
    ("in_kernel", "put"),
    [
        ("@connection_file@", first_only),
        pytest.param("@connection_file@", whole_words, marks=pytest.mark.long),
        # As kernelspecs of before name it.
        pytest.param("{connection_file}", first_only, marks=pytest.mark.long),
        pytest.param("{connection_file}", whole_words, marks=pytest.mark.long),
    ],
)
async def test_frontends_replace_placeholders_as_they_like(
    jupyter_env: JupyterEnv, in_kernel: str, put: Callable[[list[str], str], list[str]]
) -> None:
    file, _ = write_connection(jupyter_env.folder / "kernel-1.json")
    words = put([*WRAP, "--slice", "2%", "--", *TINY[:-1], in_kernel], file)
    wrapper = await asyncio.create_subprocess_exec(*words, cwd=jupyter_env.folder)
    client = AsyncKernelClient(connection_file=file)
    client.load_connection_file()
    try:
        async with listening(client) as page:
            assert (await page.run("well").done()).outputs == ["WELL on 2%"]
    finally:
        with suppress(ProcessLookupError):
            wrapper.terminate()
        await wrapper.wait()


async def test_a_refusal_is_what_the_first_cell_reads(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with page_of(manager(install(jupyter_env, size="2x50%"))) as (_, page):
        (error,) = (await page.run("1").done()).outputs
    assert error.startswith("GpuSliceNotGranted: This cell did not run.")
    assert "2x50%" in error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("argv", [IPYKERNEL, TINY], ids=["python", "tiny"])
async def test_the_kernel_dies_with_its_wrapper(
    jupyter_env: JupyterEnv, manager: Managers, number: signal.Signals, argv: tuple[str, ...]
) -> None:
    async with page_of(manager(install(jupyter_env, argv))) as (km, page):
        await page.run("1").done()
    pid = child_of(km)
    os.kill(km.provisioner.pid, number)

    async def is_gone() -> bool:
        return not is_running(pid) and await jupyter_env.is_empty()

    await eventually(is_gone)


async def test_the_wrapper_dies_with_its_kernel(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    km = manager(install(jupyter_env))
    # In a folder of its own, where no other test's kernels come and go.
    km.connection_file = f"{tmp_path / 'kernel.json'}"
    await km.start_kernel()
    folder = Path(km.connection_file).parent
    async with frontend(km) as page:
        await page.run("1").done()
    others = set(folder.glob(".gpu-pool-*"))
    kill(child_of(km))
    await eventually(km.is_alive, lambda alive: not alive)
    assert km.provisioner.process is not None
    assert km.provisioner.process.poll() == 128 + signal.SIGKILL
    await eventually(jupyter_env.is_empty)
    assert len(others - set(folder.glob(".gpu-pool-*"))) == 1


def is_there(path: str) -> bool:
    return Path(path).exists()


async def test_a_wrapped_kernel_changes_its_size(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with page_of(manager(install(jupyter_env))) as (km, page):
        told = await page.run("%gpu use 10%").done()
        assert told.outputs[0].startswith("This kernel now has 10% of a GPU")
        assert "A restart brings back the size" in told.outputs[0]
        cell = page.run("import os; print(os.environ['GPU_POOL_SLICE'], os.environ['GPU_POOL_RESIZE_DIR'])")
        size, place = "".join((await cell.done()).outputs).split()
    assert size == "10%"
    assert is_there(place)
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)
    assert not is_there(place)


async def test_that_it_does_not_sleep_is_said_where_its_course_says_when_kernels_do(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"PoolSettings": {"default_course": {"hibernate_after": "1h"}}}
    (tmp_path / "gpu_pool_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    km = manager(install(jupyter_env, TINY))
    with (tmp_path / "log").open("w") as log:
        await km.start_kernel(stderr=log)
    async with frontend(km) as page:
        await page.run("hello").done()  # its proxy answers before it runs
    said = "Kernels do not sleep on disk (hibernate_after): those with a proxy of their own"
    assert said in (tmp_path / "log").read_text()
