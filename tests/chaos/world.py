"""The world that is broken: a service on a disk of its own, Jupyter servers, and their kernels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any, Final, NamedTuple

from jupyter_client.asynchronous.client import AsyncKernelClient
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from chaos.points import MARK, STRIKES
from gpu_pool_client import Pool, _procfs, connect
from gpu_pool_kernels.launching import TEMPLATE
from support.jupyter_env import IPYKERNEL, TINY, eventually

TOKEN: Final = "a token for this test"
#: Slices that the kernels of this world ask for.
SIZES: Final = ("5%", "20%..60%", "45%..90%")
#: The kinds of kernels in this world by how often they are asked for, and their settings. One of the
#: templates has to make room for the third.
KINDS: Final = {"warm": 6, "soon": 2, "rare": 1, "tiny": 3}
_CONFIG: Final[dict[str, dict[str, Any]]] = {
    "warm": {"preload": ["decimal", "chaos.preloaded"], "max_templates": 2},
    "soon": {"preload": ["chaos.preloaded"], "max_templates": 2, "preload_with_server": True},
    "rare": {"preload": ["decimal"], "max_templates": 2},
    "tiny": {},
}
#: What every kernel of this world is submitted: the tiny one takes anything.
_CELL: Final = "cell = 6 * 7"
_SETTINGS: Final = """
c.PoolSettings.courses = {"lab": {"yield_after": "1s", "idle_limit": "3s", "warn_before": "1s"}}
"""
#: A server whose templates start as soon as they are wanted.
_SERVER: Final = """
from gpu_pool_provisioner import templates
templates.STARTS_AFTER = templates.PAUSES_WITHIN = 0.0
from jupyter_server.serverapp import main
main(sys.argv[1:])
"""
_START: Final = """
import sys
from pathlib import Path
from chaos import points
points.arm(points.{points}, Path({strikes!r}))
{start}
"""
_RELEASE: Final = """
from gpu_pool.cli import main
points.be_of_release(Path({strikes!r}))
sys.exit(main({arguments!r}))
"""
#: SQLite's log alone grows to 16 MiB before it is used anew, where nobody ends in peace.
_DISK_MIB: Final = 32


class Seen(NamedTuple):
    """A process."""

    pid: int
    parent: int
    environment: dict[str, str]
    command: list[str]

    def has(self, word: str) -> bool:
        """Whether this is a word of its command."""
        return word in self.command


def spec_name(kind: str, size: str) -> str:
    """Return the name of a kernelspec."""
    return f"{kind}{size.replace('%', '')}"


@dataclass(repr=False)
class School:
    """A Jupyter server."""

    folder: Path
    environment: dict[str, str]
    strikes: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        for old in self.folder.glob("runtime/*"):
            old.unlink() if old.is_file() else shutil.rmtree(old)
        (self.folder / "notebooks").mkdir(parents=True, exist_ok=True)
        code = _START.format(
            points="SERVER",
            strikes=str(self.strikes),
            start=_SERVER,
        )
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--no-browser", "--allow-root", "--port=0"],
                cwd=self.folder / "notebooks",
                env={**self.environment, "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime")},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    async def ask(self, method: str, path: str, body: Any = None, within: float = 60) -> Any:
        """Ask the server; return what it says, or None where it does not answer with success."""
        try:
            (found,) = self.folder.glob("runtime/jpserver-*.json")
            url = json.loads(found.read_text())["url"]
            request = HTTPRequest(
                url + path,
                method=method,
                headers={"Authorization": f"token {TOKEN}"},
                body=json.dumps(body) if method == "POST" else None,
                request_timeout=within,
            )
            answer = await AsyncHTTPClient().fetch(request)
            return json.loads(answer.body or b"null") or {}
        except (OSError, ValueError, HTTPClientError):  # it is stopped, dead or just starting
            return None

    async def answers(self) -> bool:
        return not self.alive or await self.ask("GET", "api", within=5) is not None

    async def kernels(self, within: float = 60) -> list[str]:
        """Return the ids of its kernels, as far as it answers."""
        return sorted(each["id"] for each in await self.ask("GET", "api/kernels", within=within) or ())

    async def work(self, kernel: str) -> None:
        """Submit a cell to a kernel, and stay for a moment."""
        with contextlib.suppress(OSError, ValueError, Empty):  # it may be ending
            await self.run(kernel, _CELL, within=3)

    async def run(self, kernel: str, code: str, within: float, **expressions: str) -> dict[str, Any]:
        """Run a cell; return the reply to it. Raises ``Empty`` where there is none in time."""
        client = AsyncKernelClient()
        try:
            client.load_connection_file(str(self.folder / "runtime" / f"kernel-{kernel}.json"))
            client.start_channels(stdin=False, hb=False, control=False)
            client.execute(code, user_expressions=expressions)
            reply = await client.get_shell_msg(timeout=within)
            return dict(reply["content"])
        finally:
            client.stop_channels()


@dataclass(repr=False)
class World:
    """Everything, and how each part of it is broken and mended."""

    folder: Path
    schools: list[School] = field(default_factory=list)
    service: subprocess.Popen[bytes] | None = None
    stopped: set[int] = field(default_factory=set)
    mounted: bool = False
    #: Releases that came out so far, each with a schema of its own.
    releases: int = 0

    def __post_init__(self) -> None:
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True)
        # Only root can have a disk of its own; without one it is not broken.
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m,mode=700", "tmpfs", str(self.disk)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.strikes = self.folder / STRIKES
        self.strikes.mkdir()
        self.environment = self._environment()
        (self.folder / "config").mkdir()
        (self.folder / "config" / "gpu_pool_config.py").write_text(_SETTINGS)
        for kind in KINDS:
            for size in SIZES:
                self._install(kind, size)
        for number in range(2):
            place = self.folder / f"school{number}"
            place.mkdir()
            self.schools.append(School(place, self.environment, self.strikes))

    @property
    def store(self) -> Path:
        return self.disk / "store.db"

    @property
    def url(self) -> str:
        return f"unix:{self.folder / 'pool.sock'}"

    def pool(self) -> Pool:
        return connect(self.url)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            MARK: str(self.folder),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "JUPYTER_TOKEN": TOKEN,
            "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
            "GPU_POOL_URL": self.url,
            "GPU_POOL_COURSE": "lab",
        }

    def _install(self, kind: str, size: str) -> None:
        stanza = {"provisioner_name": "gpu-pool", "config": {"slice": size, **_CONFIG[kind]}}
        is_tiny = kind == "tiny"
        spec = {
            "argv": TINY if is_tiny else IPYKERNEL,
            "display_name": f"{kind} {size}",
            "language": "tiny" if is_tiny else "python",
            "metadata": {"kernel_provisioner": stanza},
        }
        folder = self.folder / "data" / "kernels" / spec_name(kind, size)
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec))

    # -- Mending -----------------------------------------------------------

    async def mend(self) -> None:
        """Let everything run and answer again."""
        self.spare()
        self.fill_disk(full=False)
        self.lock_disk(read_only=False)
        self.slow_network(0.0)
        for pid in (*self.stopped, *(seen.pid for seen in self.processes())):
            self.go_on(pid)
        await eventually(self.answers)

    def revive(self) -> None:
        """Start what has ended, as a machine's system would."""
        if self.service is None or self.service.poll() is not None:
            self.start_service()
        for school in self.schools:
            if not school.alive:
                school.start()

    async def answers(self) -> bool:
        self.revive()  # what began while the disk was full may only now find out
        with contextlib.suppress(Exception):  # whatever it is, it is asked again
            async with self.pool() as pool:
                await pool.status()
            return all([await school.answers() for school in self.schools])
        return False

    def start_service(self) -> None:
        arguments = ["serve", f"--socket={self.folder / 'pool.sock'}", f"--store={self.store}"]
        code = _START.format(
            points="SERVICE",
            strikes=str(self.strikes),
            start=_RELEASE.format(strikes=str(self.strikes), arguments=arguments),
        )
        with open(self.folder / "service.log", "a") as log:
            self.service = subprocess.Popen(
                [sys.executable, "-c", code], env=self.environment, stdout=log, stderr=log
            )

    def spare(self) -> None:
        """Let nobody be struck any more."""
        for point in self.strikes.glob("*:*"):
            point.unlink(missing_ok=True)

    # -- Breaking ----------------------------------------------------------

    def fill_disk(self, *, full: bool) -> None:
        """Leave no byte free on the store's disk, or give them back."""
        if not self.mounted:
            return
        filler = self.disk / "filler"
        filler.unlink(missing_ok=True)
        with contextlib.suppress(OSError), open(filler if full else os.devnull, "wb", buffering=0) as file:
            while full:
                file.write(bytes(4096))

    def lock_disk(self, *, read_only: bool) -> None:
        """Make the store's disk read-only, if nothing is open for writing, or writable."""
        if self.mounted:
            how = "remount,ro" if read_only else "remount,rw"
            subprocess.run(["mount", "-o", how, str(self.disk)], capture_output=True, check=False)

    def release(self) -> None:
        """Let the service be of a later release from its next start on."""
        self.releases += 1
        (self.strikes / "release").write_text(str(self.releases))

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock of service and servers ahead of the true one."""
        (self.strikes / "clock").write_text(str(seconds))

    def slow_network(self, seconds: float) -> None:
        """Let what servers ask the service, and what it answers, be under way for so long."""
        (self.strikes / "slow").write_text(str(seconds))

    def stop(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stopped.add(pid)

    def go_on(self, pid: int) -> None:
        self.stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def kernels(self) -> dict[int, str]:
        """Return the live kernels' pids with the leases that they were launched on; empty for none."""
        return {
            seen.pid: seen.environment.get("GPU_POOL_LEASE", "")
            for seen in self.processes()
            if "GPU_POOL_LEASE" in seen.environment or seen.has(IPYKERNEL[2]) or seen.has(TINY[1])
        }

    def templates(self) -> list[Seen]:
        """Return the templates, and what they have just forked."""
        return [seen for seen in self.processes() if seen.has(TEMPLATE)]

    def processes(self) -> Iterator[Seen]:
        """Yield the processes of this world."""
        for pid in _procfs.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(word.split("=", 1) for word in words if "=" in word)
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                found = _procfs.stat(pid)
                if environment.get(MARK) == str(self.folder) and found and not found.has_ended:
                    yield Seen(pid, found.parent, environment, command)

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in (*self.stopped, *(seen.pid for seen in self.processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.service, *(school.process for school in self.schools)):
            if process is not None:
                process.wait()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.disk)], capture_output=True, check=False)


async def gone(process: subprocess.Popen[bytes]) -> None:
    """Return once a child has ended."""
    await asyncio.to_thread(process.wait)
