"""The folders of a process that is killed are removed by the next one; those of one that lives are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_provisioner.folders import HeldFolder, remove_abandoned
from support.jupyter_env import JupyterEnv

#: Makes a folder, says where, and waits to be killed.
MAKER = """
import signal, sys
from gpu_pool_provisioner.folders import HeldFolder
held = HeldFolder(sys.argv[1], "made-")
print(held.path, flush=True)
signal.pause()
"""
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


def test_who_is_killed_leaves_a_folder_for_the_next_to_remove(tmp_path: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    theirs = Path(maker.stdout.readline().strip())
    (theirs / "kernel-1").write_text("a socket's stand-in")
    ours = HeldFolder(tmp_path, "made-")
    remove_abandoned(str(tmp_path), "made-")
    assert theirs.is_dir()
    assert Path(ours.path).stat().st_mode & 0o777 == 0o700
    maker.kill()
    maker.communicate()
    assert maker.returncode == -signal.SIGKILL
    remove_abandoned(str(tmp_path), "made-")
    assert sorted(tmp_path.iterdir()) == [Path(ours.path)]
    ours.close()
    ours.close()
    assert not list(tmp_path.iterdir())


def test_what_is_not_surely_ones_own_stays(tmp_path: Path) -> None:
    folder = HeldFolder(tmp_path, "made-")
    name = Path(folder.path).name
    folder.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{name}-link").symlink_to(elsewhere)
    (tmp_path / f"{name}-file").write_text("")
    (tmp_path / "made-0-other-machine").mkdir()
    (tmp_path / f"{name}-abandoned").mkdir()
    stays = {elsewhere.name, f"{name}-link", f"{name}-file", "made-0-other-machine"}
    if os.getuid() == 0:
        (tmp_path / f"{name}-theirs").mkdir()
        os.chown(tmp_path / f"{name}-theirs", 65534, 65534)
        stays.add(f"{name}-theirs")
    remove_abandoned(str(tmp_path), "made-")
    assert {each.name for each in tmp_path.iterdir()} == stays


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
