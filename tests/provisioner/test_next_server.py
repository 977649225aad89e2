"""Kernels that outlive their server on disk, by a real CRIU and real Jupyter servers, one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tornado.httpclient import HTTPResponse

from gpu_pool_client import LeaseState
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.hibernation import program as privileged
from gpu_pool_provisioner.session import State
from support.frontend import Frontend, frontend, listening, printed
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, kill
from support.kernels_on_disk import (
    CRIU,
    NEEDS_CRIU,
    STARTER,
    asleep,
    end_with_server,
    images,
    install_keeper,
    left_one,
    notebook,
    started,
)
from support.server import Server

pytestmark = NEEDS_CRIU


def configure(**more: Any) -> None:
    """Write the servers' configuration."""
    path = Path(os.environ["JUPYTER_CONFIG_DIR"], "jupyter_server_config.json")
    path.parent.mkdir(exist_ok=True)
    # A busy machine may need longer than a server has by default.
    path.write_text(json.dumps({"GPUPoolServer": {"leave_within": 120}, **more}))


@asynccontextmanager
async def serving(
    env: JupyterEnv, stop: signal.Signals = signal.SIGTERM, **more: Any
) -> AsyncIterator[Server]:
    """Run a server; it is stopped by a signal, as a JupyterHub does, which sends SIGINT to local ones."""
    configure(**more)
    server = Server(env)
    try:
        await eventually(server.started)
        yield server
        server.process.send_signal(stop)
        await server.ended()
    finally:
        server.process.kill()
        server.process.wait()


@asynccontextmanager
async def page(server: Server, session: HTTPResponse) -> AsyncIterator[Frontend]:
    async with listening(server.client_of(session)) as found:
        yield found


async def test_a_stopped_servers_kernel_goes_on_with_the_next_one(jupyter_env: JupyterEnv) -> None:
    kernel = install_keeper(jupyter_env)
    async with serving(jupyter_env) as server:
        session = await server.open_notebook("week2.ipynb", kernel)
        async with page(server, session) as found:
            await printed(found, "kept = list(range(1000))")
        # It is renamed, as pages do it.
        notebooks = jupyter_env.folder / "notebooks"
        (notebooks / "week2.ipynb").rename(notebooks / "week1.ipynb")
        renamed = {"path": "week1.ipynb", "name": "week1.ipynb", "type": "notebook"}
        await server.ask("PATCH", f"api/sessions/{json.loads(session.body)['id']}", renamed)
    assert len(images(jupyter_env)) == 1
    await eventually(jupyter_env.is_empty)
    async with serving(jupyter_env, signal.SIGINT) as server:
        session = await server.open_notebook("week1.ipynb", kernel)
        assert not await jupyter_env.leases()
        state = json.loads((await server.ask("GET", "gpu-pool/api/slices")).body)
        assert state["slices"][0]["state"] == "asleep"
        assert state["slices"][0]["message"].startswith("Your kernel from ")
        assert state["slices"][0]["left_kernel"].startswith("from today ")
        async with page(server, session) as found:
            told = await printed(found, "print(sum(kept), len(In))")
            assert "499500 3\n" in told
            assert "This is your kernel from " in told
            assert "(1 variable, " in told
            assert not images(jupyter_env)
            state = json.loads((await server.ask("GET", "gpu-pool/api/slices")).body)
            assert (state["slices"][0]["state"], state["slices"][0]["left_kernel"]) == ("held", "")
            assert (await jupyter_env.only_lease()).state is LeaseState.HELD
            code = "import json, IPython, traitlets as t; other = sum(kept); print(1)"
            assert await printed(found, code) == "1\n"
    assert len(images(jupyter_env)) == 1
    async with serving(jupyter_env) as server:
        session = await server.open_notebook("week1.ipynb", kernel)
        state = json.loads((await server.ask("GET", "gpu-pool/api/slices")).body)
        assert "(IPython, traitlets, 2 variables, " in state["slices"][0]["message"]
        await server.ask("DELETE", f"api/sessions/{json.loads(session.body)['id']}")
        assert not images(jupyter_env)
    assert "is on disk" not in server.log


async def test_a_kernel_goes_on_once_its_machine_was_started_anew(jupyter_env: JupyterEnv) -> None:
    """A reboot leaves what is on disk: no process, no folder of sockets, and the system has another id."""
    kernel = install_keeper(jupyter_env)
    async with serving(jupyter_env) as server:
        session = await server.open_notebook("week1.ipynb", kernel)
        async with page(server, session) as found:
            await printed(found, "kept = list(range(1000))")
    [image] = images(jupyter_env)
    await eventually(jupyter_env.is_empty)
    said = json.loads((image.parent / "kernel.json").read_text())
    said["run"].update(boot="another", first=os.getpid(), started=1)  # another process has the number
    (image.parent / "kernel.json").write_text(json.dumps(said))
    note = json.loads((image.parent / "note.json").read_text())["note"]
    assert not Path(note["record"]["sockets"]).parent.exists()
    async with serving(jupyter_env) as server:
        session = await server.open_notebook("week1.ipynb", kernel)
        async with page(server, session) as found:
            assert "499500\n" in await printed(found, "print(sum(kept))")
            assert (await jupyter_env.only_lease()).state is LeaseState.HELD
            assert not images(jupyter_env)


async def test_an_older_kernel_gives_way_to_one_that_would_be_lost_and_its_notebook_says_so(
    jupyter_env: JupyterEnv,
) -> None:
    kernel = install_keeper(jupyter_env)
    spec = jupyter_env.folder / "data" / "kernels" / kernel / "kernel.json"
    async with (
        serving(jupyter_env) as server,
        page(server, await server.open_notebook("week1.ipynb", kernel)) as found,
    ):
        await printed(found, "import os; kept = os.urandom(100_000_000)")
    [older] = images(jupyter_env)
    has = sum(each.stat().st_blocks * 512 for each in older.iterdir()) // 2**20
    said = json.loads(spec.read_text())
    said["metadata"]["kernel_provisioner"]["config"]["hibernation_mib"] = has + 60
    spec.write_text(json.dumps(said))
    async with (
        serving(jupyter_env) as server,
        page(server, await server.open_notebook("week2.ipynb", kernel)) as found,
    ):
        await printed(found, "kept = 1")
    [newer] = images(jupyter_env)
    assert newer != older
    async with serving(jupyter_env) as server:
        async with page(server, await server.open_notebook("week1.ipynb", kernel)) as found:
            told = " ".join((await printed(found, "print('kept' in globals())")).split())
            assert "False" in told
            assert "Your kernel from today " in told
            assert "(1 variable, " in told
            assert "is gone: there was no room on disk for it and for that of week2.ipynb" in told
            assert "is gone" not in await printed(found, "print(1)")
        async with page(server, await server.open_notebook("week2.ipynb", kernel)) as found:
            assert "1\n" in await printed(found, "print(kept)")


async def test_one_that_worked_as_its_server_was_stopped_is_told_of_in_its_notebook(
    jupyter_env: JupyterEnv,
) -> None:
    kernel = install_keeper(jupyter_env)
    async with (
        serving(jupyter_env) as server,
        page(server, await server.open_notebook("week1.ipynb", kernel)) as found,
    ):
        await found.run("import time\nprint(1, flush=True)\ntime.sleep(600)").shows("1")
    assert not images(jupyter_env)
    async with (
        serving(jupyter_env) as server,
        page(server, await server.open_notebook("week1.ipynb", kernel)) as found,
    ):
        told = " ".join((await printed(found, "print(2)")).split())
        assert "Your kernel from today " in told
        assert " is gone: it ended with its server. It was at work." in told
        assert "is gone" not in await printed(found, "print(3)")


@pytest.fixture
def outside() -> Iterator[socket.socket]:
    """Return what listens outside of a kernel: one that is connected to it has to stay awake."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@asynccontextmanager
async def kept_from_culler(server: Server, session: HTTPResponse) -> AsyncIterator[Frontend]:
    """Have a page open, as long as which a kernel is not culled."""
    channels = await server.connect(f"api/kernels/{json.loads(session.body)['kernel']['id']}/channels")
    async with page(server, session) as found:
        yield found
    channels.close()


async def test_jupyters_culler_passes_over_what_goes_to_disk_and_culls_what_stays_awake(
    jupyter_env: JupyterEnv, outside: socket.socket
) -> None:
    sleeps = install_keeper(jupyter_env, hibernate_after=0.3)
    awake = install_keeper(jupyter_env, "later", hibernate_after=600)
    culls = {"cull_idle_timeout": 5, "cull_interval": 1}
    async with serving(jupyter_env, MappingKernelManager=culls) as server:
        first = await server.open_notebook("week1.ipynb", sleeps)
        async with kept_from_culler(server, first) as found:
            await printed(found, "kept = 41")
        await eventually(lambda: len(images(jupyter_env)) == 1)
        goes = [first, await server.open_notebook("week2.ipynb", awake)]
        async with kept_from_culler(server, goes[1]) as found:
            await printed(found, "kept = 42")
        # They are looked at after those that were idle before them.
        async with kept_from_culler(server, await server.open_notebook("connected.ipynb", sleeps)) as found:
            await printed(found, f"import socket; there = socket.create_connection({outside.getsockname()})")
        await server.open_notebook("stays.ipynb", jupyter_env.install("stays", "10%"))

        async def are_culled() -> bool:
            kernels = json.loads((await server.ask("GET", "api/kernels")).body)
            left = {json.loads(each.body)["kernel"]["id"] for each in goes}
            return {each["id"] for each in kernels} == left

        await eventually(are_culled, within=60)
        assert len(images(jupyter_env)) == 1
        async with page(server, first) as found:
            assert await printed(found, "print(kept)") == "41\n"


# -- What servers do, by their kernels' managers -----------------------------------


async def test_a_cell_that_comes_while_the_server_ends_does_not_wake_what_is_left(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install_keeper(jupyter_env, hibernate_after=0.3)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        await printed(found, "kept = 1")
        await asleep(km)
        assert await km.provisioner.leave_image() == ""
        assert "its server ends, and the next one goes on with it" in await printed(found, "kept = 2")
        await km.shutdown_kernel()
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert "1\n" in await printed(found, "print(kept)")


async def test_one_that_its_user_shuts_down_leaves_nothing(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = await left_one(jupyter_env, manager)
    async with notebook(jupyter_env, manager, kernel) as km:
        assert km.provisioner.session.state is State.HIBERNATED
        await km.shutdown_kernel()
    assert not images(jupyter_env)


async def test_a_restart_begins_afresh_and_leaves_nothing(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = await left_one(jupyter_env, manager)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        await km.restart_kernel()
        assert await printed(found, "print('kept' in globals())") == "False\n"
        assert not images(jupyter_env)


async def test_nobody_asks_for_it_and_the_next_server_has_it(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = await left_one(jupyter_env, manager)
    async with notebook(jupyter_env, manager, kernel) as km:
        await end_with_server(km)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert "1\n" in await printed(found, "print(kept)")
        # What was its slice's, and its server's, is the new ones'; its history goes on.
        code = "import os; print(os.path.isdir(os.environ['GPU_POOL_RESIZE_DIR']))"
        assert await printed(found, code) == "True\n"
        assert await printed(found, "get_ipython().history_manager.writeout_cache(); print(2)") == "2\n"


async def test_a_start_that_fails_leaves_it_to_the_next(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = await left_one(jupyter_env, manager)

    async def fails(*_: object, **__: object) -> None:
        raise OSError("no port is free")

    with monkeypatch.context() as patch:
        patch.setattr(SessionDriver, "open", fails)
        with pytest.raises(OSError, match="no port is free"):
            await notebook(jupyter_env, manager, kernel).__aenter__()
    async with notebook(jupyter_env, manager, kernel) as km:
        assert km.provisioner.session.state is State.HIBERNATED


async def test_one_that_nobody_watches_begins_anew(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = await left_one(jupyter_env, manager)
    unwatched = manager(kernel)
    path = str(jupyter_env.folder / "notebooks" / "week1.ipynb")
    spec = jupyter_env.folder / "data" / "kernels" / kernel / "kernel.json"
    spec.write_text(spec.read_text().replace('"unattended": false', '"unattended": true'))
    await unwatched.start_kernel(env={**os.environ, "JPY_SESSION_NAME": path})
    assert await answer(unwatched, "print('kept' in globals())") == "False\n"
    assert len(images(jupyter_env)) == 1


async def test_of_two_servers_one_has_it(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = await left_one(jupyter_env, manager)
    async with notebook(jupyter_env, manager, kernel) as one, notebook(jupyter_env, manager, kernel) as other:
        assert one.provisioner.session.state is State.HIBERNATED
        async with frontend(other) as found:
            assert await printed(found, "print('kept' in globals())") == "False\n"
        async with frontend(one) as found:
            assert "1\n" in await printed(found, "print(kept)")


async def test_of_two_that_were_left_the_newer_goes_on_and_says_that_the_older_is_gone(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install_keeper(jupyter_env)
    async with notebook(jupyter_env, manager, kernel) as one, notebook(jupyter_env, manager, kernel) as other:
        for km, code in ((one, "kept = 'older'; more = 1"), (other, "kept = 'newer'")):
            async with frontend(km) as found:
                await printed(found, code)
                await end_with_server(km)
    assert len(images(jupyter_env)) == 2
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert len(images(jupyter_env)) == 1
        told = " ".join((await printed(found, "print(kept)")).split())
        assert "newer" in told
        assert "(2 variables, " in told
        assert "is gone: this notebook has a newer one, which was left on disk after it." in told
        assert "is gone" not in await printed(found, "print(1)")


async def test_another_notebook_or_kernel_has_its_own(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = await left_one(jupyter_env, manager)
    other = install_keeper(jupyter_env, "other")
    async with notebook(jupyter_env, manager, other) as km:
        assert km.provisioner.session.state is not State.HIBERNATED
    async with notebook(jupyter_env, manager, kernel, "week2.ipynb") as km:
        assert km.provisioner.session.state is not State.HIBERNATED
    assert len(images(jupyter_env)) == 1


async def test_one_whose_file_changed_says_so_and_stays(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    kernel = await left_one(jupyter_env, manager, f"kept = open({str(log)!r})")
    log.write_text("one\ntwo\n")
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        cell = await found.run("print(kept.readline())").done()
        assert cell.status == "error"
        assert f"the file {log} changed" in "".join(cell.outputs)
        await eventually(jupyter_env.is_empty)
        log.write_text("one\n")
        assert "one\n" in await printed(found, "print(kept.readline())")


async def test_a_killed_server_leaves_what_sleeps(jupyter_env: JupyterEnv, manager: Managers) -> None:
    kernel = install_keeper(jupyter_env, hibernate_after=0.3)
    starter = await started(jupyter_env, kernel, "kept = 1")
    await starter.wait()
    await eventually(jupyter_env.is_empty)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        assert "1\n" in await printed(found, "print(kept)")


async def test_a_child_of_a_killed_server_that_lives_on_keeps_nothing_of_its_kernels(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install_keeper(jupyter_env, hibernate_after=0.3)
    notebook_path = str(jupyter_env.folder / "notebooks" / "week1.ipynb")
    code = "import socket; listening = socket.create_server(('127.0.0.1', 0)); kept = 1"
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, kernel, notebook_path, code, "forks"), stdout=asyncio.subprocess.PIPE
    )
    assert starter.stdout is not None
    child = psutil.Process(int(await starter.stdout.readline()))
    try:
        await starter.wait()
        await eventually(jupyter_env.is_empty)
        async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
            assert km.provisioner.session.state is State.HIBERNATED
            assert "1\n" in await printed(found, "print(kept)")
        assert child.is_running()
    finally:
        child.kill()


async def test_a_server_that_is_killed_while_a_kernel_comes_back_leaves_one_of_it(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    begun, may = tmp_path / "begun", tmp_path / "may"
    program = tmp_path / "criu"
    program.write_text(
        f"#!/bin/sh\nif [ $1 = restore ]; then touch {begun}; while [ ! -e {may} ]; do sleep 0.02; done; fi\n"
        f'exec {CRIU} "$@"\n'
    )
    program.chmod(0o755)
    # The thread of a kernel that goes on says so.
    goes_on, log = tmp_path / "goes on", tmp_path / "log"
    code = f"""
import threading, time
from pathlib import Path
def says():
    while True:
        time.sleep(0.01)
        if Path({str(goes_on)!r}).exists(): Path({str(log)!r}).touch()
threading.Thread(target=says, daemon=True).start()
kept = 1
"""
    kernel = await left_one(jupyter_env, manager, code, criu=str(program))
    starter = await started(jupyter_env, kernel, "kept")
    await eventually(begun.exists)
    (image,) = images(jupyter_env)
    words = (privileged.FOLDER, "restore", image.parent.name)
    keeper = next(
        each
        for each in psutil.process_iter(["cmdline"])
        if all(word in " ".join(each.info["cmdline"] or ()) for word in words)
    )
    kill(starter.pid)
    await starter.wait()
    await eventually(lambda: not keeper.is_running())  # it ends with its server, and CRIU with it
    may.touch()
    goes_on.touch()
    async with notebook(jupyter_env, manager, kernel) as km:
        assert km.provisioner.session.state is State.HIBERNATED
        assert not log.exists()
        async with frontend(km) as found:
            assert "1\n" in await printed(found, "print(kept)")
            await eventually(log.exists)


async def test_a_kernel_whose_program_is_missing_ends_nobody_else(jupyter_env: JupyterEnv) -> None:
    """The kernel has no process then, and its server leads a process group."""
    argv = ["/nowhere/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, install_keeper(jupyter_env, argv=argv), "", ""),
        start_new_session=True,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await starter.communicate()
    assert starter.returncode == 1
    assert b"FileNotFoundError" in said


async def test_one_that_works_ends_with_its_server_and_it_is_said(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    kernel = install_keeper(jupyter_env)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        await found.run("import time\nprint(1, flush=True)\ntime.sleep(600)").shows("1")
        assert await km.provisioner.leave_image() == "It was at work."
        await km.shutdown_kernel(now=True)
    assert not images(jupyter_env)
