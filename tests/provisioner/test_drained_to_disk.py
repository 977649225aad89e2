"""``gpu-pool drain --hibernate`` over real kernels, by a real CRIU: a machine is emptied, and used again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.session import State, texts
from support.frontend import Frontend, listening, page_of, printed
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.kernels_on_disk import CRIU, NEEDS_CRIU
from support.server import Server

pytestmark = NEEDS_CRIU


@asynccontextmanager
async def kernel(
    env: JupyterEnv, manager: Managers, name: str, **config: Any
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Start a kernel, by default one that may sleep, though not before an hour; and a page that shows it."""
    folder = str(env.folder / "asleep")
    config = config or {"hibernate_after": 3600, "criu": CRIU, "hibernation_folder": folder}
    async with page_of(manager(env.install(name, "10%", **config))) as (km, page):
        yield km, page


async def program(env: JupyterEnv, *words: str) -> Process:
    command = sys.executable, "-m", "gpu_pool.cli", *words
    there = {**os.environ, "GPU_POOL_URL": env.url}
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=there)


async def said(env: JupyterEnv, *words: str) -> tuple[int | None, dict[str, Any]]:
    """Return how a command ended, and the JSON that it printed."""
    process = await program(env, *words, "--json")
    output, _ = await process.communicate()
    return process.returncode, json.loads(output)


async def test_idle_kernels_go_to_disk_those_that_work_follow_and_it_is_told_which_stay_awake(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    goes_on = tmp_path / "goes on"
    async with (
        kernel(jupyter_env, manager, "idle") as (idle, its),
        kernel(jupyter_env, manager, "busy") as (busy, works),
        kernel(jupyter_env, manager, "plain", outage_timeout=1) as (plain, _),
    ):
        await printed(its, "kept = 41")
        cell = works.run(
            f"import os, time\nprint('begun')\n"
            f"while not os.path.exists({str(goes_on)!r}): time.sleep(0.05)\nn = 7"
        )
        await cell.shows("begun")
        draining = await program(jupyter_env, "drain", "--hibernate", "--timeout", "5min", "--json")
        assert draining.stderr is not None
        while b"1 of 3 kernels are on disk" not in (line := await draining.stderr.readline()):
            assert line, "it ended before the idle kernel was on disk"
        assert b"it is at work" in line
        goes_on.touch()
        output, _ = await draining.communicate()
        told = {each["lease"]: each for each in json.loads(output)["kernels"]}
        of_idle, of_busy, of_plain = (told[km.provisioner.session.lease_id] for km in (idle, busy, plain))
        assert draining.returncode == 1
        assert min(of_idle["image_mib"], of_busy["image_mib"]) > 10
        assert of_plain["image_mib"] is None
        assert "does not put kernels to disk" in of_plain["why"]
        assert "hibernate_with_server" in of_idle["why"]
        assert [each.provisioner.session.state for each in (idle, busy)] == [State.HIBERNATED] * 2
        assert plain.provisioner.session.state is State.RUNNING

        assert texts.MACHINE_IS_EMPTIED in await printed(its, "print(kept)")
        assert idle.provisioner.session.state is State.HIBERNATED
        status, undrained = await said(jupyter_env, "undrain")
        assert (status, len(undrained["devices"])) == (0, 1)
        await eventually(lambda: not any(each.provisioner.session.lease.hibernates for each in (idle, busy)))
        assert await printed(its, "print(kept + 1)") == "42\n"
        assert await printed(works, "print(n)") == "7\n"


async def test_one_that_cannot_go_is_told_with_its_reason_and_tried_again_by_the_next_drain(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with kernel(jupyter_env, manager, "connected") as (km, page):
        await printed(page, "import socket; listener = socket.create_server(('127.0.0.1', 0))")
        # No connection comes back from disk.
        ends: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, end: ends.append(end), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await printed(page, f"outside = socket.create_connection(('127.0.0.1', {port}))")
        for _ in range(2):
            status, told = await said(jupyter_env, "drain", "--hibernate")
            ((why, mib),) = [(each["why"], each["image_mib"]) for each in told["kernels"]]
            assert (status, mib) == (1, None)
            assert why.startswith("it has an open connection to 127.0.0.1 port ")
            await said(jupyter_env, "undrain")
        assert km.provisioner.session.state is State.PARKED
        await printed(page, "outside.close()")
        status, told = await said(jupyter_env, "drain", "--hibernate")
        ((why, mib),) = [(each["why"], each["image_mib"]) for each in told["kernels"]]
        assert mib > 10
        # It is on disk, and would not be there after a restart of the machine.
        assert (status, "hibernate_with_server" in why) == (1, True)
        assert km.provisioner.session.state is State.HIBERNATED
        for end in ends:
            end.close()
        server.close()


async def test_after_a_drain_a_server_leaves_its_kernels_and_the_next_one_goes_on_with_them(
    jupyter_env: JupyterEnv,
) -> None:
    (jupyter_env.folder / "notebooks").mkdir()
    (jupyter_env.folder / "notebooks" / "week1.ipynb").write_text("{}")
    folder = str(jupyter_env.folder / "asleep")
    name = jupyter_env.install(
        "keeper", "10%", hibernate_with_server=True, criu=CRIU, hibernation_folder=folder
    )
    server = Server(jupyter_env)
    try:
        await eventually(server.started)
        session = await server.open_notebook("week1.ipynb", name)
        async with listening(server.client_of(session)) as page:
            await printed(page, "kept = 41")
        status, told = await said(jupyter_env, "drain", "--hibernate")
        assert (status, [each["outlives_server"] for each in told["kernels"]]) == (0, [True])
        server.process.terminate()
        await server.ended()
        await eventually(jupyter_env.is_empty)
        await said(jupyter_env, "undrain")
        server = Server(jupyter_env)
        await eventually(server.started)
        session = await server.open_notebook("week1.ipynb", name)
        async with listening(server.client_of(session)) as page:
            assert "42\n" in await printed(page, "print(kept + 1)")
    finally:
        server.process.kill()
        server.process.wait()
