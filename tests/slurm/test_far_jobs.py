"""Kernels as jobs on a node that is another machine: its own network, host name and temporary files."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from support.frontend import frontend
from support.jupyter_env import JupyterEnv, eventually
from support.slurm_far import FarSite, far_site
from support.slurm_login import Login

_SHOW = "import os, socket; print(socket.gethostname(), os.environ['SLURM_JOB_ID'], os.getpid())"


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarSite]:
    with far_site(tmp_path_factory.mktemp("far")) as found:
        yield found


@pytest.fixture
def site(module_site: FarSite) -> Iterator[FarSite]:
    module_site.slurm.cancel_all()
    yield module_site
    module_site.slurm.cancel_all()


@contextmanager
def logged_in(site: FarSite, own: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    """Be on the first node, whose kernels are jobs; only what is in a home is on the other one, too."""
    home, url = site.folder(), f"slurm:{own}/slurm.db"
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, site.slurm.environment[name])
    monkeypatch.setenv("GPU_POOL_URL", url)
    for name, folder in {"PATH": "data", "DATA_DIR": "data", "CONFIG_DIR": "config"}.items():
        monkeypatch.setenv(f"JUPYTER_{name}", f"{home}/{folder}")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", f"{own}/runtime")
    (home / "config").mkdir()
    found = Login(site.slurm, JupyterEnv(home, url), [])
    found.configure()
    yield found


@pytest.fixture
async def login(site: FarSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Login]:
    with logged_in(site, tmp_path, monkeypatch) as found:
        yield found
        await found.close()


async def _whole_life(login: Login, site: FarSite) -> None:
    async with frontend(manager := await login.start("40% model=t4")) as page:
        before = (await page.run(_SHOW).done()).outputs[-1].split()
        assert before[:2] == ["far", login.jobs()[0]]
        assert (await page.run("print('x' * 3_000_000)").done()).outputs[-1].count("x") == 3_000_000
        asked = await page.run("print(input('What? '))", allow_stdin=True).done()
        assert (page.questions, asked.outputs[-1]) == (["What? "], "an answer\n")
        cell = page.run("import time; print('began')\nwhile True: time.sleep(0.05)")
        await cell.shows("began")
        await manager.interrupt_kernel()
        await cell.shows("KeyboardInterrupt")
        await manager.restart_kernel(now=True)
        await page.is_connected()
        after = (await page.run(_SHOW).done()).outputs[-1].split()
        assert (after[:2], after[2] != before[2]) == (before[:2], True)
        assert len(site.temporary()) == 1
    await manager.shutdown_kernel(now=True)

    async def is_empty() -> bool:
        left = list((login.env.folder / "data" / "gpu-pool-jobs").iterdir())
        return not (left or login.jobs() or site.temporary()) and await login.env.is_empty()

    await eventually(is_empty)


async def test_a_kernel_lives_on_another_machine_that_the_server_can_reach(
    login: Login, site: FarSite
) -> None:
    with site.closed(outwards=True):
        await _whole_life(login, site)


async def test_a_kernel_lives_on_another_machine_that_can_reach_the_server(
    login: Login, site: FarSite
) -> None:
    with site.closed(inwards=True):
        await _whole_life(login, site)


async def test_a_job_that_cannot_be_reached_either_way_is_cancelled_and_the_cell_says_why(
    login: Login, site: FarSite
) -> None:
    with site.closed(inwards=True, outwards=True):
        async with frontend(await login.start("40% model=t4")) as page:
            cell = page.run("1")
            await cell.shows("Its job runs on n2, which cannot be reached from here, and has not connected")
            [job] = login.jobs()
            told = f"Slurm job {job} was given up, and is cancelled: for 30 s its kernel on n2 could not be"
            await cell.shows(told)
            await eventually(login.env.is_empty)
            await eventually(lambda: _has_no_job(login))
            [ended] = await login.env.pool.history()
            assert ended.reason == "taken-by-cluster"
            assert ended.note.startswith(told)


async def test_whoever_has_no_key_is_refused_at_the_ports_of_the_node(login: Login, site: FarSite) -> None:
    async with frontend(await login.start("40% model=t4")) as page:
        await page.run("1").done()
        [folder] = (login.env.folder / "data" / "gpu-pool-jobs").iterdir()
        ports = json.loads((folder / "address.json").read_text())
        for name in ("shell_port", "control_port", "stdin_port", "iopub_port"):
            assert await _is_refused(f"tcp://{site.far.address}:{ports[name]}"), name
        reader, writer = await asyncio.open_connection(site.far.address, ports["supervisor"])
        await reader.readuntil()
        writer.write(b'{"n": 1, "verb": "signal", "number": 9}\n')
        assert await reader.read() == b""
        writer.close()
        assert (await page.run("print(6 * 7)").done()).outputs[-1] == "42\n"


async def _is_refused(address: str) -> bool:
    """Whether a socket without the kernel's key is let in nowhere, once that is decided."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
        told = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        stranger.linger = 0
        stranger.connect(address)
        event = (await recv_monitor_message(told))["event"]
        stranger.disable_monitor()
        told.close()
    return bool(event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


_KILLED = """
import asyncio, os, signal
from jupyter_client.manager import AsyncKernelManager
from gpu_pool.slurm import backend
backend.ALONE = 20
async def main():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    await client.wait_for_ready(timeout=100)
    await client.execute_interactive("1", timeout=100)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize("closed", ["inwards", "outwards"])
async def test_the_job_of_a_server_that_was_killed_ends_by_itself(
    login: Login, site: FarSite, closed: str
) -> None:
    with site.closed(**{closed: True}):
        code = _KILLED.format(name=login.env.install("GPU", "40% model=t4"))
        server = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        assert await server.wait() == -signal.SIGKILL
        [job] = login.jobs()
        await eventually(lambda: _has_no_job(login))
        assert (login.slurm.state(job), site.temporary()) == ("FAILED", [])


async def test_a_node_that_dies_is_told_of_and_the_next_cell_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    with (
        far_site(tmp_path / "site", "SlurmdTimeout=5\n") as site,
        logged_in(site, tmp_path, monkeypatch) as login,
    ):
        manager = await login.start("40%")  # of the type of which n2 has one
        try:
            async with frontend(manager) as page:
                assert (await page.run(_SHOW).done()).outputs[-1].startswith("far ")
                [job] = login.jobs()
                cell = page.run("import time\nwhile True: time.sleep(0.05)")
                site.far.die()
                told = f"Slurm job {job} ended since its node failed."
                await cell.shows(f"The kernel was ended. {told}")
                [ended] = await login.env.pool.history()
                assert (ended.reason, ended.note) == ("taken-by-cluster", told)
                again = page.run("1")
                await again.shows("A node that it needs is down, reserved or in use.")
                await again.shows("with model=v100 it would start sooner")
        finally:
            await login.close()


async def _has_no_job(login: Login) -> bool:
    return not login.jobs()
