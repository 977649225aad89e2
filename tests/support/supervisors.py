"""Supervisors of kernels as the pods of a cluster have them, as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import port_names, write_connection_file

from gpu_pool_kernels.inkernel.commands import PLACE
from gpu_pool_kernels.launching import supervisor_files
from gpu_pool_provisioner.environment import kernel_command
from gpu_pool_provisioner.launchers.supervised import SupervisorAway, SupervisorConnection
from support.pools import eventually
from support.ports import free_ports

KEY = b"the-key-of-this-kernel"
#: That of the port of a supervisor whose kernel is yet to begin.
PREPARED_KEY = b"the-key-of-a-prepared-pod"
#: Whether the kernel in which this is evaluated was forked from a template.
IS_FORKED = "'_gpu_pool_inkernel.template' in __import__('sys').modules"
IPYKERNEL = ("python3", "-m", "ipykernel_launcher", "-f", "{connection_file}")


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is no such process, and for what has ended."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return 0 if state == "Z" else int(parent)
    return 0


def children_of(pid: int) -> list[int]:
    """Return the children of a process, also those that have ended and were not waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> bytes:
    """Return the command line of a process; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def until_gone(pid: int) -> None:
    """Return once a process has ended."""
    await eventually(lambda: parent_of(pid) == 0)


@dataclass
class Supervised:
    """A supervisor and its kernel."""

    process: subprocess.Popen[bytes]
    port: int
    connection_file: str
    #: What the file says: a kernel writes it anew when it starts.
    connection: dict[str, Any]
    log: Path
    #: When it was started, of ``time.perf_counter()``.
    began_at: float
    connections: list[SupervisorConnection] = field(default_factory=list)

    async def connect(self, key: bytes = KEY) -> SupervisorConnection:
        """Connect as the notebook server does, once it listens."""
        while True:
            try:
                found = await SupervisorConnection.connect("127.0.0.1", key, port=self.port, within=60)
            except SupervisorAway:  # noqa: PERF203 - what is waited for takes longer
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.01)
            else:
                self.connections.append(found)
                return found

    def beginning(self, *argv: str, folder: str | None = None, **environment: str) -> str:
        """Return what it is told of its first kernel; by default one of ipykernel."""
        words = [word.format(connection_file=self.connection_file) for word in argv or IPYKERNEL]
        told = {"connection": self.connection, "argv": kernel_command(words, installed=True)}
        return json.dumps({**told, "environment": environment, "folder": folder})

    async def asked(self, code: str, *, reply: bool = True, **options: Any) -> dict[str, Any]:
        """Submit a cell, with a client of its own; return the content of the reply, if there is to be one."""
        client = AsyncKernelClient()
        client.load_connection_info(self.connection)
        client.start_channels(stdin=False, hb=False)
        try:
            if not reply:
                await client.kernel_info(reply=True, timeout=120)  # what is said to nobody is lost
                client.execute(code, **options)
                return {}
            found = await client.execute(code, reply=True, timeout=120, **options)
            content: dict[str, Any] = found["content"]
            assert content["status"] == "ok", content
            return content
        finally:
            client.stop_channels()

    async def value(self, expression: str) -> str:
        """Return what a kernel of Python says that an expression is."""
        content = await self.asked("", user_expressions={"it": expression})
        return str(content["user_expressions"]["it"]["data"]["text/plain"])

    async def pid(self) -> int:
        """Return the pid of a kernel of Python."""
        return int(await self.value("__import__('os').getpid()"))

    async def ended(self) -> int:
        """Return the supervisor's status once it has ended."""
        await eventually(lambda: self.process.poll() is not None)
        assert self.process.returncode is not None
        return self.process.returncode


def write_supervisor(folder: Path) -> None:
    """Write the supervisor's files into a folder, as they lie in a pod."""
    for path, content in supervisor_files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)


def start(
    folder: Path,
    options: Sequence[str],
    argv: Sequence[str],
    python: str,
    environment: Mapping[str, str],
    *,
    encrypts: bool = True,
    isolated: bool = False,
    prepared: bool = False,
    stderr: int | None = None,
    started_by: Callable[[list[str]], list[str]] = list,
) -> Supervised:
    """Start one, with what lies in a folder as it does in a pod, and nothing else of ours.

    An ``isolated`` one is not started as its kernel is, so that it starts another Python for the template.
    A ``prepared`` one knows its own key, and nothing of a kernel's connection. ``started_by`` returns the
    command that becomes it. A variable that is given as empty is not set.
    """
    files, ports = folder / "supervisor", free_ports(1 + len(port_names))
    write_supervisor(files)
    port, named = ports[0], dict(zip(port_names, ports[1:], strict=True))
    file, _ = write_connection_file(str(folder / "connection.json"), ip="127.0.0.1", key=KEY, **named)
    connection = json.loads(Path(file).read_text())
    if encrypts:
        public, secret = (each.decode() for each in zmq.curve_keypair())
        connection |= {"curve_publickey": public, "curve_secretkey": secret}
        Path(file).write_text(json.dumps(connection))
    if prepared:
        Path(file).write_text(json.dumps({"key": PREPARED_KEY.decode()}))
    words = kernel_command([word.format(connection_file=file) for word in argv], installed=True)
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {
        **os.environ,
        PLACE: " " * 16_384,
        "PATH": path,
        "IPYTHONDIR": str(folder / "ipython"),
        **environment,
    }
    with (folder / "log").open("wb") as log:
        began_at = time.perf_counter()
        process = subprocess.Popen(
            started_by(
                [
                    *([python, "-I", "-S"] if isolated else ["python3", "-Xfrozen_modules=off"]),
                    *(str(files / "launch.py"), "supervisor", "--connection", file),
                    *("--port", str(port), *options, "--", *words),
                ]
            ),
            env={name: value for name, value in {**variables, **environment}.items() if value},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log if stderr is None else stderr,
        )
    return Supervised(process, port, file, connection, folder / "log", began_at)


@asynccontextmanager
async def supervised(
    folder: Path,
    *options: str,
    argv: Sequence[str] = IPYKERNEL,
    python: str = sys.executable,
    encrypts: bool = True,
    isolated: bool = False,
    prepared: bool = False,
    stderr: int | None = None,
    started_by: Callable[[list[str]], list[str]] = list,
    **environment: str,
) -> AsyncIterator[Supervised]:
    """Supervise a kernel; nothing of it is left afterwards."""
    options = (*options, "--prepared", "600") if prepared and "--prepared" not in options else options
    how = {"encrypts": encrypts, "isolated": isolated, "prepared": prepared}
    made = start(folder, options, argv, python, environment, **how, stderr=stderr, started_by=started_by)
    try:
        yield made
    finally:
        for each in made.connections:
            each.close()
        groups = children_of(made.process.pid)
        made.process.kill()
        made.process.wait()
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
