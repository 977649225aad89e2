"""Kernels that sleep on disk, by a real CRIU: what they had is there when they wake, or they never slept."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool_client import GpuPoolError, Lease, LeaseState, Process
from gpu_pool_provisioner.session import State, events
from support.frontend import Cell, Frontend, frontend, page_of, printed
from support.jupyter_env import JupyterEnv, Managers, eventually, is_running, kill
from support.kernels_on_disk import CRIU, NEEDS_CRIU, asleep, images, sleeper, state, tried_to_sleep

pytestmark = NEEDS_CRIU


#: Starts a kernel, says its process, and ends as with kill -9.
STARTER = """
import asyncio, os, signal, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel()
    print(km.provisioner.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@asynccontextmanager
async def working(page: Frontend, folder: Path, code: str) -> AsyncIterator[Cell]:
    """Run code in a cell that goes on for as long as this does, so that its kernel does not sleep again."""
    may_end = folder / "may end"
    cell = page.run(f"{code}\nimport os, time\nwhile not os.path.exists({str(may_end)!r}): time.sleep(0.01)")
    yield cell
    await asyncio.to_thread(may_end.touch)
    await cell.done()


async def test_an_idle_kernel_sleeps_without_process_or_slice_and_the_next_cell_wakes_it(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    read = tmp_path / "read"
    read.write_text("one\ntwo\n")
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(
            page,
            f"""
import subprocess, threading, time, os
kept, count = list(range(1000)), 0
def counts():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=counts, daemon=True).start()
child = subprocess.Popen(['sleep', '600'])
file = open({str(read)!r}); file.readline()
""",
        )
        pid = km.provisioner.process.pid
        await asleep(km)
        assert not is_running(pid)
        assert (await jupyter_env.only_lease()).state is LeaseState.PARKED
        assert await km.is_alive()
        (image,) = images(jupyter_env)
        assert image.parent.stat().st_mode & 0o777 == 0o700
        async with working(
            page, tmp_path, "print(sum(kept), count > 0, child.poll(), file.readline())"
        ) as told:
            await told.shows("499500 True None two")
            assert not images(jupyter_env)
            assert (await jupyter_env.only_lease()).state is LeaseState.HELD
        # It goes on: its thread runs, and it sleeps and wakes again.
        await printed(page, "before = count")
        await asleep(km)
        assert await printed(page, "print(count > before, len(In) > 1)") == "True True\n"
    await km.shutdown_kernel(now=True)
    await eventually(jupyter_env.is_empty)


@pytest.mark.parametrize(("setting", "sleeps_after"), [(0.0, 1.0), (600.0, 600.0)])
async def test_a_course_says_when_its_kernels_sleep_unless_their_server_does(
    jupyter_env: JupyterEnv,
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: float,
    sleeps_after: float,
) -> None:
    settings = {"PoolSettings": {"default_course": {"hibernate_after": "1s"}}}
    (tmp_path / "gpu_pool_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    async with sleeper(jupyter_env, manager, setting) as (km, page):
        await printed(page, "kept = 1")
        assert km.provisioner.session.to_disk.after == sleeps_after
        if not setting:
            await asleep(km)
            assert await printed(page, "print(kept)") == "1\n"
            await km.restart_kernel(now=True)
            await asleep(km)


async def test_a_kernel_that_is_not_kept_after_one_that_was_is_not_to_sleep(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no path of a socket fits it listens at ports, which it could not have again."""
    async with sleeper(jupyter_env, manager, 600.0) as (km, page):
        await printed(page, "kept = 1")
        assert km.provisioner.session.to_disk
        long = jupyter_env.folder / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        await km.restart_kernel(now=True)
        assert await printed(page, "print('kept' in globals())") == "False\n"
        assert km.provisioner.session.to_disk is None


async def test_who_administers_the_machine_sees_what_sleeps_and_can_remove_it(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = manager(jupyter_env.install("usual folder", "50%", hibernate_after=0.5, criu=CRIU))
    await km.start_kernel()

    async def program(*words: str) -> str:
        command = sys.executable, "-m", "gpu_pool.cli", *words
        there = {**os.environ, "GPU_POOL_URL": jupyter_env.url}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=there)
        output, _ = await process.communicate()
        return output.decode()

    async with frontend(km) as page:
        await printed(page, "kept = 1")
        await asleep(km)
        lease = await jupyter_env.only_lease()
        (image,) = json.loads(await program("hibernated", "--json"))["images"]
        assert (image["lease"], image["kernel"]) == (lease.id, lease.holder.kernel)
        on_disk = km.provisioner.session.on_disk
        assert on_disk.image_mib == -(-image["image_bytes"] // 2**20) > 10
        shown = json.loads(await program("status", "--json"))["asleep"]
        assert shown == [{"lease": lease.id, "image_mib": on_disk.image_mib}]
        assert f"asleep, {on_disk.image_mib}MiB" in await program("status")
        await program("hibernated", "--remove", lease.id)
        assert json.loads(await program("hibernated", "--json"))["images"] == []
        cell = await page.run("print(kept)").done()
        assert "was removed: its variables are gone" in "".join(cell.outputs)
        await km.restart_kernel(now=True)
        assert await printed(page, "print(1)") == "1\n"


async def test_what_others_write_to_the_history_meanwhile_does_not_keep_it_asleep(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        # IPython stops the thread that writes it at each fork.
        await printed(page, "import os; kept = 1; os.waitpid(os.fork() or os._exit(0), 0);")
        await asleep(km)
        async with page_of(manager(jupyter_env.install("other", "40%"))) as (_, its):
            await printed(its, f"long = {'x' * 300_000!r}")
            await printed(its, "get_ipython().history_manager.writeout_cache()")
        assert await printed(page, "print(kept)") == "1\n"
        assert await printed(page, "get_ipython().history_manager.writeout_cache(); print(2)") == "2\n"


async def test_it_ends_by_a_signal_and_what_it_leaves_behind_is_reaped_before_and_after_it_slept(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    leaves = """
import os, subprocess, time
left = int(subprocess.run(['sh', '-c', 'sleep 0.01 & echo $!'], stdout=subprocess.PIPE).stdout)
try:
    while True:
        os.kill(left, 0)
        time.sleep(0.01)
except ProcessLookupError:
    print('reaped')
"""
    async with sleeper(jupyter_env, manager) as (km, page):
        assert await printed(page, leaves) == "reaped\n"
        await asleep(km)
        assert await printed(page, leaves) == "reaped\n"
        pid = km.provisioner.process.pid
        page.run("os.kill(os.getpid(), 15)")
        await eventually(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("module", "before", "after", "expected"),
    [
        ("numpy", "kept = numpy.arange(10_000_000)", "kept.sum()", "49999995000000"),
        (
            "pandas",
            "kept = pandas.DataFrame({'a': [1, 1, 2], 'b': [3, 4, 5]}).groupby('a')",
            "kept.b.sum().tolist()",
            "[7, 5]",
        ),
        (
            "matplotlib",
            "import io, matplotlib.pyplot as plt; kept, axes = plt.subplots(); axes.plot([1, 3, 2])",
            "len(axes.lines), bool(kept.savefig(io.BytesIO()) is None)",
            "1 True",
        ),
        (
            "multiprocessing",
            "kept = multiprocessing.get_context('fork').Pool(2); kept.map(abs, [-1, -2])",
            "kept.map(abs, [-3, -4])",
            "[3, 4]",
        ),
        (
            "torch",
            "kept = torch.ones(3, requires_grad=True); loss = (kept ** 2).sum()",
            "loss.backward() or kept.grad.tolist()",
            "[2.0, 2.0, 2.0]",
        ),
    ],
)
async def test_what_libraries_have_is_there_when_it_wakes(
    jupyter_env: JupyterEnv, manager: Managers, module: str, before: str, after: str, expected: str
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, f"import {module}; {before};")
        await asleep(km)
        assert (await printed(page, f"print({after})")).splitlines()[-1] == expected


async def test_the_ports_at_which_it_listens_are_kept_while_it_sleeps(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        listens = (
            "import socket; server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1])"
        )
        port = int(await printed(page, listens))
        await asleep(km)
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(("127.0.0.1", port))
        await printed(page, "server")
        with socket.create_connection(("127.0.0.1", port)):
            assert await printed(page, "print(server.accept()[1][0])") == "127.0.0.1\n"


FORKS = """
import os
child = os.fork()
if child == 0:
    print('from the child', flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


async def test_a_kernel_has_no_port_of_its_own_while_it_sleeps_and_hears_its_children_when_it_wakes(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        await page.run(FORKS).shows("from the child")
        await asleep(km)
        (image,) = images(jupyter_env)
        assert json.loads((image / "header.json").read_text())["listens"] == []
        await page.run(FORKS).shows("from the child")


async def test_what_children_of_before_write_is_heard_when_they_come_back(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    older = """
import os
hears, tells = os.pipe()
if os.fork() == 0:
    os.close(tells)
    os.read(hears, 1)
    print('from an older child', flush=True)
    os._exit(0)
"""
    async with sleeper(jupyter_env, manager) as (km, page):
        forked = await page.run(older).done()
        await asleep(km)
        await page.run("os.close(tells); os.wait()").done()
        await forked.shows("from an older child")
        await page.run(FORKS).shows("from the child")


async def test_a_port_that_is_taken_meanwhile_is_told_of_and_nothing_is_lost(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        # At which several may listen: ours comes too late to keep it.
        listens = (
            "import socket; server = socket.create_server(('127.0.0.1', 0), reuse_port=True); "
            "print(server.getsockname()[1])"
        )
        port = int(await printed(page, listens))
        with socket.create_server(("127.0.0.1", port), reuse_port=True):
            await asleep(km)
            told = await printed(page, "print('woke')")
            assert f"it listened at 127.0.0.1, port {port}, which another program" in told
        assert await printed(page, "print('woke')") == "woke\n"


async def test_a_kernel_that_waits_for_input_stays_awake(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sleeper(jupyter_env, manager, after=0.2) as (km, page):
        waits: list[str] = []
        monkeypatch.setattr(page.client, "input", waits.append)
        driver, looked = km.provisioner.driver, 0
        post = driver.post

        def counted(event: events.Event) -> None:
            nonlocal looked
            looked += isinstance(event, events.Observed)
            post(event)

        cell = page.run("print(input('Who? '))")
        await eventually(lambda: waits)
        monkeypatch.setattr(driver, "post", counted)
        await eventually(lambda: looked > 2)
        assert state(km) is State.RUNNING
        monkeypatch.undo()
        page.client.input("ada")
        assert (await cell.done()).outputs == ["ada\n"]


async def test_a_changed_file_is_told_and_nothing_is_lost(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, f"kept = 1; file = open({str(log)!r})")
        await asleep(km)
        log.write_text("one\ntwo\n")
        cell = await page.run("print(kept)").done()
        assert cell.status == "error"
        assert state(km) is State.HIBERNATED
        said = "".join(cell.outputs)
        assert f"the file {log} changed" in said
        assert "Nothing of it is lost" in said
        log.write_text("one\n")
        assert await printed(page, "print(kept)") == "1\n"


async def test_a_damaged_image_is_not_restored(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, "kept = 1")
        await asleep(km)
        (image,) = images(jupyter_env)
        part = max(image.glob("pages-*.img"), key=lambda each: each.stat().st_size)
        whole = part.read_bytes()
        part.write_bytes(whole[:-1])
        cell = await page.run("print(kept)").done()
        assert "what is on disk is damaged" in "".join(cell.outputs)
        part.write_bytes(whole)
        assert await printed(page, "print(kept)") == "1\n"


async def test_a_restart_begins_afresh_and_removes_what_was_on_disk(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, "kept = 1")
        await asleep(km)
        await km.restart_kernel(now=True)
        async with working(page, tmp_path, "print('kept' in globals())") as told:
            await told.shows("False")
            assert not images(jupyter_env)
        await asleep(km)
    await km.shutdown_kernel()
    assert not list((jupyter_env.folder / "asleep").iterdir())
    await eventually(jupyter_env.is_empty)


async def test_a_kernel_with_an_open_connection_stays_awake_and_says_why(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, f"import socket; there = socket.create_connection(('127.0.0.1', {port}))")
        await tried_to_sleep(km)
        told = await printed(page, "print(there.getpeername()[1])")
        assert f"{port}\n" in told
        assert f"stayed awake: it has an open connection to 127.0.0.1 port {port}: it can sleep once" in told
        assert not images(jupyter_env)
    listening.close()


async def test_one_that_stays_awake_goes_on_while_its_pool_fails(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, failed = jupyter_env.pool.attach, list[Process]()
    listening = socket.create_server(("127.0.0.1", 0))

    async def fails_at_kernels(lease_id: str, process: Process, **more: Any) -> None:
        if state(km) is State.HIBERNATING and process != Process.current() and len(failed) < 2:
            failed.append(process)
            raise GpuPoolError("Internal error in the pool.")
        await attach(lease_id, process, **more)

    async with sleeper(jupyter_env, manager) as (km, page):
        port = listening.getsockname()[1]
        monkeypatch.setattr(jupyter_env.pool, "attach", fails_at_kernels)
        await printed(page, f"import socket; there = socket.create_connection(('127.0.0.1', {port}))")
        await tried_to_sleep(km)
        assert f"{port}\n" in await printed(page, "print(there.getpeername()[1])")
    assert len(failed) == 2
    listening.close()


async def test_one_on_disk_stays_there_while_its_pool_fails(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, watch = asyncio.Event(), jupyter_env.pool.watch

    async def fails_once_on_disk(lease_id: str) -> AsyncIterator[Lease]:
        async for lease in watch(lease_id):
            yield lease
            if images(jupyter_env) and not failed.is_set():
                failed.set()
                raise GpuPoolError("Internal error in the pool.")

    monkeypatch.setattr(jupyter_env.pool, "watch", fails_once_on_disk)
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, "kept = 41")
        await asleep(km)
        await eventually(failed.is_set)
        assert await printed(page, "print(kept)") == "41\n"
    await km.shutdown_kernel()


async def test_a_kernel_that_may_sleep_ends_with_its_server(jupyter_env: JupyterEnv) -> None:
    folder = str(jupyter_env.folder / "asleep")
    kernel = jupyter_env.install("two", hibernate_after=60, criu=CRIU, hibernation_folder=folder)
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, kernel), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await starter.communicate()
    await eventually(lambda: not is_running(int(output)))
    await eventually(jupyter_env.is_empty)


async def test_a_criu_that_is_killed_leaves_the_running_kernel_or_has_ended_it(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    """The first is killed once it writes; later ones are not."""
    killed, first = tmp_path / "criu", tmp_path / "first"
    written = f"{jupyter_env.folder}/asleep/*/image.new/*.img"
    killed.write_text(
        f'#!/bin/sh\nif [ $1 != dump ] || [ -e {first} ]; then exec {CRIU} "$@"; fi\n'
        f'touch {first}\n{CRIU} "$@" &\n'
        f"while kill -0 $! && ! ls {written}; do sleep 0.01; done >/dev/null 2>&1\n"
        f"kill -9 $!\nexit 137\n"
    )
    killed.chmod(0o755)
    async with sleeper(jupyter_env, manager, criu=str(killed)) as (km, page):
        await printed(page, "kept = bytearray(300_000_000)")

        async def is_over() -> bool:
            found = km.provisioner.session
            return first.exists() and (
                found.state is State.DOWN or (found.state is State.PARKED and found.hibernates_at is None)
            )

        await eventually(is_over)
        if state(km) is State.DOWN:  # its own code just ran in the kernel
            said = km.provisioner.session.exit_message
            assert "The kernel ended while it was being written to disk" in said
            assert not images(jupyter_env)
            return
        assert "stayed awake" in await printed(page, "print(len(kept))")
        await asleep(km)
        assert await printed(page, "print(len(kept))") == "300000000\n"


async def test_a_kernel_whose_program_is_killed_goes_on_from_a_whole_image(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, "kept = bytearray(300_000_000)")
        reaper = psutil.Process(km.provisioner.process.pid).parent()
        assert reaper is not None
        first = reaper.parent()
        assert first is not None
        kill(first.ppid())
        await asleep(km)
        assert await printed(page, "print(len(kept))") == "300000000\n"


async def test_an_interrupt_while_it_sleeps_fails_nothing_and_wakes_nobody(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager) as (km, page):
        await printed(page, "kept = 1")
        await asleep(km)
        await km.interrupt_kernel()
        assert state(km) is State.HIBERNATED
        assert await printed(page, "print(kept)") == "1\n"
        cell = page.run("import time\nwhile True: time.sleep(0.01)")
        await eventually(
            lambda: state(km) is State.RUNNING and km.provisioner.driver.state.idle.idle_since is None
        )
        await km.interrupt_kernel()
        assert (await cell.done()).status == "error"
