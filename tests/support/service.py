"""Services in processes of their own, started often and fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu_pool_client import Pool, Process, connect
from gpu_pool_client._processes import boot_id, pid_namespace
from support.pools import eventually, running

DEVICES = "V100-SXM2-32GB:1"
#: Reads what to run, a line of JSON each, and forks: importing the program takes most of a second. The
#: garbage collector does not look through what is imported: every child would, at the latest when it ends.
_FORK_SERVER = """
import asyncio, atexit, contextlib, gc, json, os, signal, sys, threading, time
import gpu_pool.service.app
import gpu_pool_kernels.installer
import gpu_pool_client._remote.client
from gpu_pool.cli import main
from gpu_pool.cli.app import cli, subcommands
from gpu_pool_client import *
from gpu_pool_client._remote.exchange import ask
from gpu_pool.store.schema import migrations, queries
with contextlib.suppress(ImportError):  # without the extra [hub]
    import gpu_pool.service.site
# Another user may be unable to read what is imported later.
subcommands(cli), migrations(), queries()
import jupyter_client.kernelspec, pynvml, rich.progress, rich.table, traitlets.config
gc.collect(), gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgrp()
        os.environ.update(job["environment"])
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job["uid"]:
            os.setgroups([])
            os.setgid(job["uid"])
            os.setuid(job["uid"])
        exec(job["code"], globals())
        sys.stdout.flush()
        os._exit(0)
    print(pid, flush=True)
"""
#: Run in such a process: the program with these words and nothing else of this process, to its end.
_PROGRAM = """
status = os.path.join({folder!r}, "status")
pid = os.fork()
if pid:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(status, "w") as place:
        place.write(str(code))
    os._exit(0)
os.chdir({cwd!r})
os.environ.clear()
os.environ.update({environment!r})
for number, name in enumerate(("stdin", "stdout", "stderr")):
    place = os.open(os.path.join({folder!r}, name), os.O_RDWR)
    os.dup2(place, number)
    os.close(place)
sys.stdin, sys.argv = open(0, closefd=False), ["gpu-pool", *{words!r}]
try:
    code = main({words!r})
except SystemExit as end:
    code = end.code
if isinstance(code, str):
    sys.exit(code)
# As an interpreter ends, but for taking all modules to pieces, which takes longer than most commands.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush(), sys.stderr.flush()
os._exit(code or 0)
"""


class ForkServer:
    """Runs code in processes of its own, that have all of the program imported."""

    def __init__(self, more: str = "", libraries: str = "") -> None:
        """``more`` is run before: what else is to be imported. ``libraries`` is its ``LD_LIBRARY_PATH``."""
        self._more = more
        self._others: dict[str, ForkServer] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", more + _FORK_SERVER],
            env={**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def finding(self, libraries: str) -> ForkServer:
        """Return one whose processes find libraries there, which the loader reads when a process starts."""
        if not libraries:
            return self
        if libraries not in self._others:
            self._others[libraries] = ForkServer(self._more, libraries)
        return self._others[libraries]

    def start(self, code: str, environment: dict[str, str], log: Path, uid: int = 0) -> Process:
        """Run code, as another user if ``uid`` is not 0; what it prints is appended to ``log``."""
        assert self._process.stdin
        assert self._process.stdout
        job = {"code": code, "environment": environment, "log": str(log), "uid": uid}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        # One that has ended already is like one that never was.
        return Process.of(pid) or Process(pid, 0, boot_id(), pid_namespace())

    def run(
        self, *words: str, environment: dict[str, str], cwd: Path | None = None, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gpu-pool WORDS`` to its end, with this environment alone."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for each, text in {"stdin": given, "stdout": "", "stderr": ""}.items():
                (folder / each).write_text(text)
            os.mkfifo(folder / "status")
            place = str(cwd or Path.cwd())
            code = _PROGRAM.format(folder=name, cwd=place, environment=environment, words=list(words))
            self.start(code, {}, folder / "log")
            status = int((folder / "status").read_text())
            said = ((folder / each).read_text() for each in ("stdout", "stderr"))
            return subprocess.CompletedProcess(words, status, *said)

    def close(self) -> None:
        self._process.communicate()
        for each in self._others.values():
            each.close()


@pytest.fixture(scope="session")
def children() -> Iterator[ForkServer]:
    """Where services and their clients come from."""
    children = ForkServer()
    yield children
    children.close()


@pytest.fixture(scope="session")
def cluster_children() -> Iterator[ForkServer]:
    """Where services of clusters come from: what they import takes a second and more."""
    children = ForkServer("import gpu_pool.cluster.backend")
    yield children
    children.close()


@dataclass
class Service:
    """``gpu-pool serve`` over one simulated V100 with 32 GiB, in a folder of its own."""

    children: ForkServer
    folder: Path
    arguments: tuple[str, ...] = ()
    uid: int = 0
    process: Process | None = None
    environment: dict[str, str] = field(default_factory=dict)
    #: Code that its process runs first.
    prelude: str = ""

    @property
    def socket(self) -> Path:
        return self.folder / "pool.sock"

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def configure(self, text: str) -> None:
        self.folder.mkdir(mode=0o755, exist_ok=True)
        (self.folder / "gpu_pool_config.py").write_text(text)
        (self.folder / "log").touch()

    def launch(self) -> Process:
        """Start it, and do not wait until it listens."""
        arguments = ["serve", f"--socket={self.socket}", f"--store={self.folder / 'store.db'}"]
        environment = {
            "JUPYTER_CONFIG_DIR": str(self.folder),
            "GPU_POOL_DEVICES": DEVICES,
            **self.environment,
        }
        code = f"{self.prelude}\nmain({[*arguments, *self.arguments]!r})"
        self.process = self.children.start(code, environment, self.folder / "log", self.uid)
        return self.process

    async def start(self) -> None:
        before = self.log.count(": Serving ")
        process = self.launch()
        await eventually(lambda: self.log.count(": Serving ") > before or not process.is_alive())
        assert process.is_alive(), self.log

    def answers(self) -> bool:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    async def end(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal, and return once it is gone."""
        process = self.process
        assert process is not None
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
                os.kill(process.pid, signum)
        await eventually(lambda: not process.is_alive())


@asynccontextmanager
async def serving(
    children: ForkServer,
    folder: Path,
    settings: str = "",
    *arguments: str,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Service]:
    """Serve with these settings, the text of a ``gpu_pool_config.py``."""
    service = Service(children, folder, arguments, environment=environment or {})
    service.configure(settings)
    await service.start()
    try:
        yield service
    finally:
        await asyncio.shield(service.end(signal.SIGKILL))


_ASKER = """
import asyncio, os, sys, uuid
from gpu_pool_client import Holder, connect, parse_request

os.environ["GPU_POOL_DEVICES"] = {devices!r}

async def ask(url, sizes):
    async with connect(url) as pool:
        for size in sizes:
            print((await pool.request(parse_request(size), Holder("ada"), uuid.uuid4().hex)).id, flush=True)

asyncio.run(ask({url!r}, {sizes!r}))
sys.stdin.read()
"""


@contextmanager
def asking(url: str, *sizes: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a process that asks for these slices itself, and lives on; also return the leases' ids."""
    with running(_ASKER.format(url=url, sizes=sizes, devices=DEVICES)) as process:
        assert process.stdout
        yield process, [process.stdout.readline().strip() for _ in sizes]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that other users can come through, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def service(children: ForkServer, open_folder: Path) -> AsyncIterator[Service]:
    """Serve every user of the machine."""
    async with serving(children, open_folder / "pool", "", "--mode=0666") as service:
        yield service


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[Pool]:
    """Connect as an administrator: whoever runs the service."""
    async with connect(service.url) as pool:
        yield pool
