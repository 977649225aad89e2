"""Ports that somebody else takes, and what is sent there: nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool_provisioner.ports import PortReservation
from support import port_thief
from support.frontend import frontend, page_of
from support.jupyter_env import IPYKERNEL, TINY, WRAP, JupyterEnv, Managers, eventually, started_kernel
from support.ports import write_connection

#: A user without rights, on every Linux.
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

#: A kernel before which another user is at its ports the first times that it is launched.
LATE = """
import json, os, subprocess, sys
folder, times, thief, connection_file, *kernel = sys.argv[1:]
launches = len(os.listdir(folder))
open(f"{folder}/{launches}", "w").close()
if launches < int(times):
    info = json.load(open(connection_file))
    ports = [str(port) for name, port in info.items() if name.endswith("_port")]
    heard = os.open(f"{folder}/{launches}", os.O_WRONLY | os.O_APPEND)
    words = [sys.executable, thief, "65534", str(heard), info["ip"], *ports]
    other = subprocess.Popen(words, pass_fds=[heard], process_group=0)
    with open(f"{folder}.pids", "a") as pids:
        print(other.pid, file=pids)
    while not open(f"{folder}/{launches}").read():
        pass
os.execv(kernel[0], kernel)
"""


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """The folder with a file for each launch of a kernel; the others end with the test."""
    folder = tmp_path / "launches"
    folder.mkdir()
    yield folder
    pids = folder.with_suffix(".pids")  # another test's, which runs beside this one, are not ended
    for pid in pids.read_text().split() if pids.exists() else ():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if "port_thief" in " ".join(process.cmdline()):
                process.kill()


def thief() -> str:
    return port_thief.__file__


def heard(folder: Path) -> list[str]:
    """Return what the others have to say of each launch, in the order of the alphabet."""
    return sorted(each.read_text() for each in folder.iterdir())


@needs_root
def test_no_other_user_can_listen_on_a_kernel_s_ports_from_when_they_are_chosen() -> None:
    reservation = PortReservation("127.0.0.1", 50, listening=True)
    try:
        reading, writing = os.pipe()
        where = ["127.0.0.1", *map(str, reservation.ports)]
        command = [sys.executable, thief(), str(NOBODY), str(writing), *where]
        other = subprocess.Popen(command, pass_fds=[writing])
        assert os.read(reading, 100) == b"ready 0\n"
        other.wait()
    finally:
        reservation.close()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_a_python_kernel_listens_where_no_other_user_comes(
    jupyter_env: JupyterEnv, manager: Managers, transport: str
) -> None:
    async with page_of(manager(jupyter_env.install("two"), transport=transport)) as (km, page):
        code = "from ipykernel.kernelapp import IPKernelApp\nkernel = IPKernelApp.instance()\n"
        (printed,) = (await page.run(f"{code}print(kernel.transport, kernel.ip)").done()).outputs
    is_used, place = printed.split()
    assert (km.transport, is_used) == (transport, "ipc")
    assert Path(place).parent.stat().st_mode & 0o077 == 0
    await km.shutdown_kernel()
    assert not Path(place).parent.exists()


async def test_nobody_listens_on_the_ports_of_an_independent_kernel_before_its_proxy_does(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")), independent=True)
    for port in km.ports:  # its proxy has just been started, and is still importing what it needs
        with pytest.raises(OSError, match="in use"), socket.create_server((km.ip, port)):
            pass
    async with frontend(km) as page:
        assert (await page.run("print(6 * 7)").done()).outputs == ["42\n"]
        before = km.ports
        await km.restart_kernel(now=True)
        assert (await page.run("print(6 * 8)").done()).outputs == ["48\n"]
    assert km.ports == before
    # Nobody is to connect to a process that answers for no kernel once the proxy has ended.
    here = psutil.Process().net_connections("inet")
    assert not {each.laddr.port for each in here if each.status == "LISTEN"} & set(before)


@needs_root
async def test_a_kernel_whose_ports_others_take_is_launched_elsewhere_and_nothing_is_read(
    jupyter_env: JupyterEnv, manager: Managers, taken: Path
) -> None:
    argv = [sys.executable, "-c", LATE, str(taken), "3", thief(), "{connection_file}", *TINY]
    async with page_of(manager(jupyter_env.install("late", argv=argv, language="tiny"))) as (km, page):
        assert (await page.run("well").done()).outputs == ["WELL on 2%"]
    assert heard(taken) == ["", *["ready 5\n"] * 3]
    lease = await jupyter_env.only_lease()
    assert lease.process is not None
    assert lease.process.pid == km.provisioner.pid


async def test_a_restarted_kernel_listens_where_nobody_has_seen_it_yet(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    def listens() -> set[Any]:
        sockets = psutil.Process(km.provisioner.pid).net_connections("inet")
        return {each.laddr for each in sockets if each.status == "LISTEN"}

    async with page_of(manager(jupyter_env.install("tiny", argv=TINY, language="tiny"))) as (km, page):
        await page.run("well").done()
        before = listens()
        await km.restart_kernel(now=True)
        assert (await page.run("again").done()).outputs == ["AGAIN on 2%"]
    assert len(before) == 5
    assert before.isdisjoint(listens())


@needs_root
async def test_a_kernel_that_is_shut_down_is_not_launched_once_more(
    jupyter_env: JupyterEnv, manager: Managers, taken: Path
) -> None:
    argv = [sys.executable, "-c", LATE, str(taken), "1000", thief(), "{connection_file}", *TINY]
    km = await started_kernel(manager(jupyter_env.install("late", argv=argv, language="tiny")))
    await eventually(lambda: len(heard(taken)) > 1)
    await km.shutdown_kernel(now=True)
    assert await jupyter_env.is_empty()
    assert not await km.is_alive()


@needs_root
@pytest.mark.long
async def test_a_kernel_whose_ports_others_always_take_says_so(
    jupyter_env: JupyterEnv, manager: Managers, taken: Path
) -> None:
    argv = [sys.executable, "-c", LATE, str(taken), "1000", thief(), "{connection_file}", *TINY]
    async with page_of(manager(jupyter_env.install("late", argv=argv, language="tiny"))) as (_, page):
        (told,) = (await page.run("well").done()).outputs
    assert "Another user of this machine took the ports" in told
    assert set(heard(taken)) == {"ready 5\n"}
    assert await jupyter_env.is_empty()


def test_a_wrapped_kernel_whose_port_is_taken_ends_at_once_and_says_so(jupyter_env: JupyterEnv) -> None:
    place, info = write_connection(jupyter_env.folder / "kernel-1.json")
    with socket.create_server(("127.0.0.1", info["shell_port"])):
        words = [word.format(connection_file=place) for word in (*WRAP, "--slice", "2%", "--", *IPYKERNEL)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert f"Another program listens at tcp://127.0.0.1:{info['shell_port']}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (jupyter_env.folder / "pool").exists()


async def test_a_port_that_is_asked_for_and_taken_is_told_to_whoever_starts_the_kernel(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        km = manager(jupyter_env.install("two"), cache_ports=False, shell_port=other.getsockname()[1])
        with pytest.raises(OSError, match="Another program listens at tcp://"):
            await km.start_kernel()
    assert await jupyter_env.is_empty()
