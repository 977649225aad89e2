"""One kernel's slice from start to shutdown, on real kernels."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import KernelManager
from traitlets import TraitError

from gpu_pool_client import EndReason, GpuPoolError, LeaseGone, LeaseState, Process
from support.jupyter_env import (
    SLEEPER,
    JupyterEnv,
    Managers,
    answer,
    eventually,
    kill,
    restarting_soon,
    started_kernel,
)


@pytest.mark.parametrize("now", [False, True])
async def test_a_kernel_holds_its_slice_until_it_is_shut_down(
    jupyter_env: JupyterEnv, manager: Managers, now: bool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    lease = await jupyter_env.only_lease()
    assert lease.process == Process.of(km.provisioner.pid)
    assert lease.holder.process == Process.current()
    assert lease.holder.kernel == f"two [{km.kernel_id[:8]}]"
    await answer(km)
    await km.shutdown_kernel(now=now)
    assert await jupyter_env.is_empty()
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.RELEASED


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_keeps_the_lease(jupyter_env: JupyterEnv, manager: Managers, now: bool) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    before = await jupyter_env.only_lease()
    await answer(km)
    await km.restart_kernel(now=now)
    await answer(km)
    after = await jupyter_env.only_lease()
    assert after.id == before.id
    assert after.process == Process.of(km.provisioner.pid) != before.process


async def test_a_restart_on_a_full_pool_keeps_its_place(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("half", "50%")))
    await jupyter_env.fill("50%")
    waiting = await jupyter_env.fill("50%")
    await answer(km)
    await km.restart_kernel()
    await answer(km)
    assert (await jupyter_env.pool.get_lease(waiting.id)).state is LeaseState.WAITING


@pytest.mark.long
async def test_new_ports_on_request_reach_the_restarted_kernel(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km)
    await km.restart_kernel(newports=True)
    assert await answer(km, "print(6 * 7)") == "42\n"


async def test_an_automatic_restart_keeps_the_lease(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = manager(jupyter_env.install("two"), AsyncIOLoopKernelManager, config=restarting_soon())
    await km.start_kernel()
    await answer(km)
    before = await jupyter_env.only_lease()
    restarted = asyncio.Event()
    km.add_restart_callback(restarted.set)
    kill(km.provisioner.pid)

    async def is_on_a_new_process() -> bool:
        return restarted.is_set() and (await jupyter_env.only_lease()).process not in (before.process, None)

    await eventually(is_on_a_new_process)
    await answer(km)
    assert (await jupyter_env.only_lease()).id == before.id


@pytest.mark.long
async def test_a_manager_can_be_started_again_and_gets_a_new_slice(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    first = await jupyter_env.only_lease()
    await answer(km)
    await km.shutdown_kernel()
    await km.start_kernel()
    await answer(km)
    assert (await jupyter_env.only_lease()).id != first.id


async def test_a_restart_without_its_slice_is_refused_until_shutdown(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km)
    await jupyter_env.pool.release((await jupyter_env.only_lease()).id, EndReason.REVOKED)
    for _ in range(2):
        with pytest.raises(LeaseGone, match=r"(?s)2 percent.*revoked.*start\sit\sagain"):
            await km.restart_kernel(now=True)
        assert await jupyter_env.is_empty()
        assert not km.has_kernel
    await km.cleanup_resources()
    await km.start_kernel()
    assert (await jupyter_env.only_lease()).state is LeaseState.HELD


@pytest.mark.long
def test_a_blocking_manager_works_as_well(jupyter_env: JupyterEnv) -> None:
    km = KernelManager(kernel_name=jupyter_env.install("two", ready_timeout=120))
    km.start_kernel()
    lease = asyncio.run(jupyter_env.only_lease())
    client = km.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    assert km.is_alive()
    km.restart_kernel()
    client.wait_for_ready(timeout=120)
    assert asyncio.run(jupyter_env.only_lease()).id == lease.id
    client.stop_channels()
    km.shutdown_kernel()
    assert asyncio.run(jupyter_env.is_empty())


FORKING = """
import os, sys
from jupyter_client.manager import start_new_kernel
def run():
    km, client = start_new_kernel(kernel_name=sys.argv[1])
    print(km.is_alive(), flush=True)
    client.stop_channels()
    km.shutdown_kernel(now=True)
run()
child = os.fork()
if child == 0:
    run()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.long
def test_a_forked_child_starts_kernels_of_its_own(jupyter_env: JupyterEnv) -> None:
    """As papermill in a multiprocessing pool does."""
    kernel = jupyter_env.install("two", ready_timeout=120)
    command = [sys.executable, "-W", "ignore", "-c", FORKING, kernel]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "True\nTrue\n", done.stderr
    assert asyncio.run(jupyter_env.is_empty())


async def test_a_kernel_that_never_answers_is_ended_and_gives_its_slice_back(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("deaf", argv=SLEEPER, ready_timeout=1)))
    lease = await jupyter_env.only_lease()
    await eventually(jupyter_env.is_empty)
    assert (await jupyter_env.pool.get_lease(lease.id)).end_reason is EndReason.NOT_READY
    await eventually(km.is_alive, lambda alive: not alive)


async def test_the_first_reply_lifts_the_deadline(jupyter_env: JupyterEnv, manager: Managers) -> None:
    await started_kernel(manager(jupyter_env.install("two")))
    with sqlite3.connect(jupyter_env.folder / "pool" / "store.db") as store:
        (deadline,) = store.execute("SELECT deadline FROM lease").fetchone()
        assert deadline is not None
        await eventually(lambda: store.execute("SELECT deadline FROM lease").fetchone() == (None,))
    store.close()


async def test_what_the_kernel_is_told_about_its_slice(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = manager(jupyter_env.install("two", env={"CUDA_VISIBLE_DEVICES": "all", "MINE": "kept"}))
    await km.start_kernel()
    lease = await jupyter_env.only_lease()
    names = ["CUDA_VISIBLE_DEVICES", "GPU_POOL_LEASE", "GPU_POOL_URL", "GPU_POOL_KERNEL_DIRS", "MINE"]
    code = f"import os; print([os.environ[name] for name in {names}])"
    device, lease_id, url, folders, mine = eval(await answer(km, code))
    assert (device, lease_id) == (lease.slices[0].device.uuid, lease.id)
    assert (url, mine) == (jupyter_env.url, "kept")
    assert str(jupyter_env.folder / "data" / "kernels") in folders.split(os.pathsep)


@pytest.mark.parametrize("transport", ["ipc", "curve"])
async def test_other_transports_become_ready_too(
    jupyter_env: JupyterEnv, manager: Managers, transport: str
) -> None:
    traits = {"transport": "ipc"} if transport == "ipc" else {"transport_encryption": "required"}
    km = manager(jupyter_env.install("two"), **traits)
    km.kernel_spec.metadata["supported_encryption"] = "curve"
    await km.start_kernel()
    assert await answer(km, "print('well')") == "well\n"
    assert await km.is_alive()


async def test_another_provisioner_can_continue_a_kernels_lease(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    info = await km.provisioner.get_provisioner_info()
    heir = type(km.provisioner)(kernel_spec=km.kernel_spec, parent=km, slice="2%")
    await heir.load_provisioner_info(info)
    await heir.cleanup(restart=False)
    assert await jupyter_env.is_empty()


@pytest.mark.parametrize(
    ("size", "words"),
    [("2%%", "(?s)not a GPU slice.*2 percent or 0.02"), (9, "(?s)asked for 9.*at\\smost\\s1")],
)
async def test_a_slice_that_cannot_be_is_refused_in_words(
    jupyter_env: JupyterEnv, manager: Managers, size: str, words: str
) -> None:
    km = manager(jupyter_env.install("odd", size))
    with pytest.raises(GpuPoolError, match=words) as refused:
        await km.start_kernel()
    assert max(map(len, str(refused.value).splitlines())) <= 76
    assert await jupyter_env.is_empty()


@pytest.mark.parametrize("name", ["\ud800 odd\n", "x" * 10**6], ids=["odd", "long"])
async def test_a_name_that_cannot_be_shown_does_not_keep_a_kernel_from_starting(
    jupyter_env: JupyterEnv, manager: Managers, name: str
) -> None:
    km = manager(jupyter_env.install("two"))
    km.kernel_spec.display_name = name
    await km.start_kernel()
    shown = (await jupyter_env.only_lease()).holder.kernel
    assert shown.isprintable()
    assert len(shown) <= 200
    assert shown.endswith(f"[{km.kernel_id[:8]}]")


@pytest.mark.parametrize("value", [float("nan"), "nan", float("inf"), -1, 1e9, "1d", None])
@pytest.mark.parametrize("setting", ["wait_timeout", "ready_timeout", "restart_grace"])
async def test_a_time_that_cannot_be_is_refused_in_words(
    jupyter_env: JupyterEnv, manager: Managers, setting: str, value: object
) -> None:
    km = manager(jupyter_env.install("odd", **{setting: value}))
    with pytest.raises(
        TraitError, match=rf"{setting} is .*; it must be a number of seconds from \d+ to \d+,\nor a"
    ):
        await km.start_kernel()
    assert await jupyter_env.is_empty()
