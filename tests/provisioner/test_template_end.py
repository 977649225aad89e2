"""A template ends with its server, and when memory is short; its kernels do not notice."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_pool_kernels.inkernel import free_memory
from gpu_pool_kernels.launching import LAUNCHER, TEMPLATE
from gpu_pool_provisioner.templates import TemplateProcess
from support.jupyter_env import JupyterEnv, eventually, is_running

#: Starts a kernel, tells its template's pid, starts another one and runs a cell in it whenever a line comes.
SERVER = """
import asyncio, sys
from jupyter_client.manager import AsyncKernelManager
from gpu_pool_provisioner import templates as module
from support.jupyter_env import answer
ballast = b"x" * int(sys.argv[2])
async def main():
    module.STARTS_AFTER = 0.0
    module._ANSWERS_WITHIN = 20.0
    first = AsyncKernelManager(kernel_name=sys.argv[1])
    await first.start_kernel()
    while not module.templates().all():
        await asyncio.sleep(0.01)
    (template,) = module.templates().all()
    print(template.pid, flush=True)
    while template.is_importing:
        await asyncio.sleep(0.01)
    print(template.has_ended, flush=True)
    second = AsyncKernelManager(kernel_name=sys.argv[1])
    await second.start_kernel()
    await answer(second)
    print(type(second.provisioner.process).__name__, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(await answer(second, "print(6 * 7)"), end="", flush=True)
    await first.shutdown_kernel(now=True)
    await second.shutdown_kernel(now=True)
asyncio.run(main())
"""


class Server:
    """A process with two kernels, of which the second is warm."""

    def __init__(self, kernel: str, folder: Path, ballast: int = 0) -> None:
        (folder / "server.py").write_text(SERVER)
        self.process = subprocess.Popen(
            [sys.executable, folder / "server.py", kernel, str(ballast)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def says(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 120)).strip()

    async def asks_its_kernel(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return await self.says()


@pytest.fixture
async def start(jupyter_env: JupyterEnv, tmp_path: Path) -> AsyncIterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(kernel: str, ballast: int = 0) -> Server:
        started.append(Server(kernel, tmp_path, ballast))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


async def has_ended(pid: int) -> None:
    await eventually(lambda: not is_running(pid))


@pytest.mark.long
async def test_one_that_still_imports_ends_with_its_server(
    jupyter_env: JupyterEnv, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "endless.py").write_text(
        f"open({str(tmp_path / 'begun')!r}, 'w').close()\nimport time\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(modules))
    server = start(jupyter_env.install("warm", preload=["endless"]))
    pid = int(await server.says())
    await eventually(lambda: (tmp_path / "begun").exists())
    server.process.kill()
    await has_ended(pid)


def test_one_whose_server_has_gone_meanwhile_ends_without_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        command = [sys.executable, str(LAUNCHER), TEMPLATE, str(theirs.fileno()), "json", "600", ""]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, check=False, timeout=120
        )
    assert (done.returncode, b"Error" in done.stderr) == (0, False)


#: A template on a machine whose memory is short.
SHORT = """
from gpu_pool_kernels.inkernel import free_memory, template
free_memory.is_short = lambda: True
template.main()
"""


async def test_where_memory_is_short_nothing_is_imported_and_the_next_kernel_may_try_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def command(control: int) -> list[str]:
        return [sys.executable, "-c", SHORT, "template", str(control), "no_such_module", "600", ""]

    with caplog.at_level(logging.INFO):
        made = TemplateProcess(command, os.environ, max_mib=4096)
        assert not await asyncio.to_thread(made.wait_until_ready, 120)
    assert (made.has_ended, made.refusal) == (True, "")
    assert "too little memory is free" in caplog.text
    made.end()


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a cgroup of which the memory can be limited."""
    for folder, files in free_memory.groups_of("/proc/self"):
        made = folder / f"gpu-pool-test-{os.getpid()}"
        with suppress(OSError):
            made.mkdir()
            if (made / files.limits[0]).exists():
                yield made
                for pid in (made / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
                while (made / "cgroup.procs").read_text():
                    pass
                made.rmdir()
                return
            made.rmdir()
    pytest.skip("no cgroup whose memory can be limited can be made here")


def limit(group: Path, part: float) -> None:
    """Let the processes of a cgroup have so much of the memory that they use now."""
    (files,) = {files for folder, files in free_memory.groups_of("/proc/self") if folder == group.parent}
    kinds = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    droppable = sum(int(size) for kind, size in kinds if kind in files.droppable)
    used = int((group / files.used).read_text()) - droppable
    (group / files.limits[0]).write_text(str(round(part * used)))


@pytest.mark.long
async def test_one_whose_servers_memory_is_nearly_used_up_ends_and_its_kernel_goes_on(
    jupyter_env: JupyterEnv, start: Callable[..., Server], group: Path
) -> None:
    server = start(jupyter_env.install("warm", preload=[]), ballast=2**29)
    (group / "cgroup.procs").write_text(str(server.process.pid))
    pid = int(await server.says())
    assert [await server.says(), await server.says()] == ["False", "ForkedProcess"]
    limit(group, 1.03)
    await has_ended(pid)
    assert await server.asks_its_kernel() == "42"
