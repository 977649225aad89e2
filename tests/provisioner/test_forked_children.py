"""A server that was killed answers nowhere any more, though a child that was forked from it lives on."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from support.jupyter_env import TINY, JupyterEnv, eventually
from support.killed_parents import killed

pytestmark = pytest.mark.timeout(300)

#: Starts a kernel, to which a frontend is connected, and says where both look for it.
STARTS = """
import asyncio, json, psutil
from jupyter_client.manager import AsyncKernelManager

async def start():
    km = AsyncKernelManager(kernel_name=%r, connection_file=%r)
    await km.start_kernel()
    client = km.client()
    client.start_channels()
    await client.wait_for_ready(300)
    return km, client

km, client = asyncio.run(start())
folder = psutil.Process(km.provisioner.pid).environ()["GPU_POOL_RESIZE_DIR"]
stay(json.dumps([list(km.ports), folder]))
"""


def open_at(pid: int, ports: list[int]) -> list[object]:
    """Return a process' sockets at these ports of its own, whether it listens there or is connected to."""
    found = psutil.Process(pid).net_connections("tcp")
    return [each for each in found if each.laddr.port in ports]


def is_read(pipe: Path) -> bool:
    """Whether anybody reads what is written there."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def is_written(pipe: Path) -> bool:
    """Whether anybody may still write there."""
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return bool(os.read(reading, 1))
    except BlockingIOError:
        return True
    finally:
        os.close(reading)


@pytest.mark.parametrize("argv", [None, TINY], ids=["IPython", "another language"])
async def test_nobody_answers_at_a_kernels_ports_or_hears_its_requests(
    jupyter_env: JupyterEnv, argv: tuple[str, ...] | None
) -> None:
    kernel = jupyter_env.install("burst", "10%..50%", **({"argv": argv} if argv else {}))
    with killed(STARTS % (kernel, str(jupyter_env.folder / "kernel-1.json"))) as (child, said):
        ports, folder = json.loads(said)
        await eventually(lambda: open_at(child, ports), lambda found: not found)
        await eventually(lambda: not is_read(Path(folder, "requests")))
        if argv is None:
            await eventually(lambda: not is_written(Path(folder, "changes")))
        for port in ports:  # another server can have them at once
            socket.create_server(("127.0.0.1", port)).close()
