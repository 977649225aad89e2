"""A kernel that is asked to outlive the process that started it, and may be managed by another one then."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import GpuPoolError
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from support.jupyter_env import (
    IPYKERNEL,
    TINY,
    JupyterEnv,
    Managers,
    answer,
    eventually,
    is_running,
    printed_by,
    started_kernel,
)

#: Starts a kernel, says how to go on with it, and ends.
STARTER = """
import asyncio, json, os, shutil, signal, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1], connection_file=sys.argv[5])
    await km.start_kernel(independent=True)
    client = km.client()
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    if sys.argv[3] == "runs":
        await client.execute("kept = 42", reply=True, timeout=120)
    client.stop_channels()
    info = await km.provisioner.get_provisioner_info()
    with open(sys.argv[2], "w") as file:
        json.dump([km.connection_file, info], file, default=bytes.decode)
    if sys.argv[4] == "away":
        shutil.rmtree(os.path.dirname(km.connection_file))
    if sys.argv[4] != "normally":
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def left_behind(
    jupyter_env: JupyterEnv, kernel: str, what: str = "runs", end: str = "killed"
) -> tuple[str, dict[str, object]]:
    """Return the connection file of a kernel whose starter has gone, and what the starter said of it."""
    said = jupyter_env.folder / "said.json"
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, kernel, str(said), what, end, ""
    )
    assert await starter.wait() == (-signal.SIGKILL if end == "killed" else 0)
    connection_file, info = json.loads(said.read_text())

    async def is_there() -> bool:
        return Path(connection_file).exists()  # noqa: ASYNC240 - one look

    await eventually(is_there)  # a starter that ends normally has removed it
    return connection_file, info


def client_of(connection_file: str) -> AsyncKernelClient:
    client = AsyncKernelClient(connection_file=connection_file)
    client.load_connection_file()
    return client


async def shut_down(connection_file: str) -> None:
    """Ask for the kernel's end as any frontend may: on its control channel."""
    client = client_of(connection_file)
    client.start_channels(hb=False)
    try:
        await client.shutdown(reply=True, timeout=60)
    finally:
        client.stop_channels()


async def continued(jupyter_env: JupyterEnv, manager: Managers) -> tuple[AsyncKernelManager, int]:
    """Return the manager of a kernel that another process has started, and the pid of the kernel's proxy."""
    kernel = jupyter_env.install("two")
    connection_file, info = await left_behind(jupyter_env, kernel)
    km = manager(kernel, connection_file=connection_file)
    km.load_connection_file()
    km.provisioner = GPUPoolProvisioner(kernel_spec=km.kernel_spec, parent=km, slice="2%")
    await km.provisioner.load_provisioner_info(info)
    return km, int(str(info["pid"]))


@pytest.mark.parametrize("end", ["normally", "killed"])
@pytest.mark.parametrize("argv", [IPYKERNEL, TINY], ids=["python", "tiny"])
async def test_it_keeps_its_slice_and_its_proxy_until_a_frontend_shuts_it_down(
    jupyter_env: JupyterEnv, argv: tuple[str, ...], end: str
) -> None:
    connection_file, info = await left_behind(jupyter_env, jupyter_env.install("two", argv=argv), end=end)
    lease = await jupyter_env.only_lease()
    assert lease.request.size == "2%"
    if argv is IPYKERNEL:
        assert await printed_by(client_of(connection_file), "print(kept)") == "42\n"
    await shut_down(connection_file)

    async def has_ended() -> bool:
        return not is_running(int(str(info["pid"]))) and await jupyter_env.is_empty()

    await eventually(has_ended)
    ended = [each for each in await jupyter_env.pool.history() if each.id == lease.id]
    assert len(ended) == 1


async def test_it_lives_on_where_its_connection_file_cannot_be_written_again_at_once(
    jupyter_env: JupyterEnv,
) -> None:
    said, folder = jupyter_env.folder / "said.json", jupyter_env.folder / "files"
    folder.mkdir()
    log, ends = jupyter_env.folder / "log", ("runs", "away", str(folder / "kernel.json"))
    with log.open("wb") as file:
        starter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STARTER, jupyter_env.install("two"), str(said), *ends), stderr=file
        )
    assert await starter.wait() == -signal.SIGKILL
    await eventually(lambda: "is written later: " in log.read_text())
    connection_file, _ = json.loads(said.read_text())
    folder.mkdir()
    await eventually(Path(connection_file).exists)
    assert await printed_by(client_of(connection_file), "print(kept)") == "42\n"
    await shut_down(connection_file)
    await eventually(jupyter_env.is_empty)


async def test_one_that_waits_keeps_its_place_and_has_its_slice_when_it_is_free(
    jupyter_env: JupyterEnv,
) -> None:
    held = await jupyter_env.fill("1")
    connection_file, _ = await left_behind(jupyter_env, jupyter_env.install("two"), what="waits")
    await eventually(jupyter_env.has_queue)  # its proxy answers before the pool has
    await jupyter_env.pool.release(held.id)
    assert await printed_by(client_of(connection_file), "print(6 * 7)") == "42\n"
    assert (await jupyter_env.only_lease()).request.size == "2%"
    await shut_down(connection_file)
    await eventually(jupyter_env.is_empty)


async def test_one_that_waits_can_be_shut_down(jupyter_env: JupyterEnv) -> None:
    held = await jupyter_env.fill("1")
    connection_file, info = await left_behind(jupyter_env, jupyter_env.install("two"), what="waits")
    await shut_down(connection_file)

    async def has_left() -> bool:
        return not is_running(int(str(info["pid"]))) and not await jupyter_env.has_queue()

    await eventually(has_left)
    await jupyter_env.pool.release(held.id)


async def test_another_manager_goes_on_with_it(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km, pid = await continued(jupyter_env, manager)
    lease = await jupyter_env.only_lease()
    assert await answer(km, "print(kept)") == "42\n"
    assert await km.is_alive()
    assert (await jupyter_env.only_lease()).id == lease.id
    await km.provisioner.kill()
    await km.provisioner.wait()
    await km.provisioner.cleanup(restart=False)
    assert not is_running(pid)
    await eventually(jupyter_env.is_empty)


async def test_another_manager_sees_that_it_has_ended_meanwhile(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km, pid = await continued(jupyter_env, manager)
    os.killpg(pid, signal.SIGKILL)
    await km.provisioner.wait()
    await km.provisioner.cleanup(restart=False)
    assert not await km.is_alive()
    await eventually(jupyter_env.is_empty)


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
@pytest.mark.long
async def test_who_has_started_it_interrupts_it_and_ends_it_with_what_it_has_started(
    jupyter_env: JupyterEnv, manager: Managers, now: bool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")), independent=True)
    started = await answer(
        km, "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid)"
    )
    (kernel,) = psutil.Process(km.provisioner.pid).children()
    client = km.client()
    client.start_channels()
    client.execute("import time\nprint('begun')\ntime.sleep(600)")
    while (await client.get_iopub_msg(timeout=60))["msg_type"] != "stream":
        pass
    await km.interrupt_kernel()
    assert (await client.get_shell_msg(timeout=60))["content"]["ename"] == "KeyboardInterrupt"
    client.stop_channels()
    await km.shutdown_kernel(now=now)
    assert not is_running(kernel.pid)
    assert await jupyter_env.is_empty()
    if now:  # whoever is only asked to end may leave something behind, as with the stock provisioner
        assert not is_running(int(started))
    else:
        with suppress(ProcessLookupError):
            os.kill(int(started), signal.SIGKILL)


async def test_it_can_be_restarted(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")), independent=True)
    await answer(km, "kept = 42")
    await km.restart_kernel()
    assert await answer(km, "print('kept' in globals())") == "False\n"
    assert (await jupyter_env.only_lease()).request.size == "2%"
    await km.shutdown_kernel()
    await eventually(jupyter_env.is_empty)


async def test_a_slice_that_cannot_be_is_refused_before_it_starts(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = manager(jupyter_env.install("odd", "9"))
    with pytest.raises(GpuPoolError, match=r"(?s)asked for 9.*at\smost\s1"):
        await km.start_kernel(independent=True)
    assert await jupyter_env.is_empty()
