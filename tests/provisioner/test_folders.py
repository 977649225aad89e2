"""What the kernels of a server that is killed have left is removed by the next kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jupyter_env import JupyterEnv

#: Starts a kernel, says its files, and ends: killed, or once its kernel has ended.
STARTER = """
import asyncio, os, signal, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel()
    client = km.client()
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    await client.execute("1", reply=True, timeout=120)
    client.stop_channels()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await km.shutdown_kernel()

asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder with a name that is short enough for sockets in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def folders(*parents: Path) -> list[str]:
    return [each.name for parent in parents for each in parent.iterdir() if "gpu-" in each.name]


async def test_the_next_kernel_removes_what_those_of_a_killed_server_have_left(
    jupyter_env: JupyterEnv, place: Path
) -> None:
    kernel = jupyter_env.install("two")
    runtime = jupyter_env.folder / "runtime"

    async def run(end: str) -> int:
        environment = {**os.environ, "TMPDIR": str(place)}
        words = (sys.executable, "-c", STARTER, kernel, end)
        return await (await asyncio.create_subprocess_exec(*words, env=environment)).wait()

    # Connection files and pipes are beside those that frontends read, wherever these are.
    beside = [place, runtime, jupyter_env.folder]
    assert await run("killed") == -signal.SIGKILL
    left = folders(*(each for each in beside if each.is_dir()))
    assert len(left) >= 1
    assert await run("shut down") == 0
    assert not folders(*(each for each in beside if each.is_dir()))
