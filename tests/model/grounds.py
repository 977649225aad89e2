"""The pools that are held to the model, each made so that the model knows all it depends on.

A ground is one way to reach a pool. Its clocks stand still until they are set,
its devices are named in a file, and its course files are written by the test;
all else is as for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import psutil

from gpu_pool.policy.queue import Policy, Usage
from gpu_pool.settings import PoolSettings
from gpu_pool.store import device_table
from gpu_pool_client import Device, Pool, Process, connect
from model.scenery import DEVICES
from model.still import Clocks, still_pool
from support.hub import ADMIN, Hub, url
from support.service import ForkServer, Service

ME: Final = psutil.Process().username()
#: The settings of every pool that is tried.
SETTINGS: Final[dict[str, Any]] = {
    "attach_within": 300.0,
    "drain_after": "25s",
    "max_waiting": 8,
    "courses": {
        "cs101": {"weight": 2, "per_user": {"slices": 6, "share": "4"}},
        "thesis": {"priority": 1, "longest_lease": "10min"},
        "grading": {"priority": 3, "batch": True},
    },
    "groups": {"staff": {"users": ["grace"], "priority": 2, "quota": {"memory": "40GiB"}}},
}
_TESTS: Final = Path(__file__).parents[1]


class Ground(ABC):
    """A pool in a folder of its own, and the processes around it."""

    #: Whether the pool sees the processes that are attached to its leases.
    sees = True
    #: Whether every process that asks reads the course files itself.
    reads_alone = False
    #: Who can ask: a service knows who does, and asks nobody.
    users: Sequence[str] = (ME,)
    #: All devices that there can be.
    devices: Sequence[Device] = DEVICES

    def __init__(self, children: ForkServer) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-pool-model-"))
        (self.folder / "courses").mkdir()
        self.store = self.folder / "store.db"
        self.clocks = Clocks(self.folder / "clocks")
        self.children = children
        self._parties: list[Process] = []
        self._reader: sqlite3.Connection | None = None

    # -- To be made for each -----------------------------------------------

    @abstractmethod
    async def open(self) -> Pool:
        """Return the pool, which begins or begins again."""

    @abstractmethod
    async def crash(self) -> None:
        """End the pool's own process, if it has one, without a word."""

    @abstractmethod
    def asking(self) -> str:
        """Return what opens the pool in another process, as Python."""

    # -- Around it ---------------------------------------------------------

    def show(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Let those be found by whoever looks next, and others that cannot be without them; return all."""
        found = json.dumps([device_table.write_device(each) for each in devices])
        (self.folder / "devices.json").write_text(found)
        return devices

    def write_course(self, name: str, text: str | None) -> None:
        path = self.folder / "courses" / f"{name}.yaml"
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)

    def settings(self) -> dict[str, Any]:
        return {**SETTINGS, "courses_dir": str(self.folder / "courses")}

    def party(self, size: str, user: str, course: str | None, key: str) -> tuple[Process, str]:
        """Have another process ask for a slice, and live on; return it and what it was told."""
        log = self.folder / f"party-{key}"
        log.touch()
        code = _PARTY.format(
            tests=str(_TESTS), open=self.asking(), size=size, user=user, course=course, key=key
        )
        process = self.children.start(code, self.environment(), log)
        self._parties.append(process)
        end = time.monotonic() + 60
        while not (answer := log.read_text()).endswith("\n"):
            assert time.monotonic() < end, f"waited in vain: {answer}"
            assert process.is_alive(), answer
            time.sleep(0.002)
        return process, answer.strip()

    def environment(self) -> dict[str, str]:
        return {}

    def usage(self) -> Usage:
        """Return what the store has of everybody's use, as of now."""
        wall, policy = self.clocks.read()[0], Policy()

        def faded(used: float, as_of: float, half_life: float) -> float:
            return float(used * 0.5 ** (abs(wall - as_of) / half_life))

        courses = {
            course: faded(used, as_of, policy.course_half_life)
            for course, used, as_of in self.rows("SELECT course, by_course, as_of FROM course_use")
        }
        users = {
            (course, user): faded(used, as_of, policy.user_half_life)
            for course, user, used, as_of in self.rows("SELECT course, user, by_user, as_of FROM use")
        }
        return Usage(courses, users)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Read the store past the pool."""
        if self._reader is None:
            self._reader = sqlite3.connect(f"file:{self.store}?mode=ro", uri=True)
        return self._reader.execute(query).fetchall()

    async def close(self) -> None:
        for process in self._parties:
            end(process)
        if self._reader is not None:
            self._reader.close()
        self.clocks.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_PARTY = """
import sys
sys.path.insert(0, {tests!r})
import asyncio, signal
from gpu_pool_client import GpuPoolError, Holder, connect, parse_request

async def ask():
    {open}
    try:
        return (await pool.request(parse_request({size!r}), Holder({user!r}, {course!r}), {key!r})).id
    except GpuPoolError as error:
        return type(error).__name__

print(asyncio.run(ask()), flush=True)
signal.pause()
"""


def end(process: Process) -> None:
    """End a process without a word, and return once it is gone."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while process.is_alive():
        assert time.monotonic() < until, "a killed process lives on"
        time.sleep(0.001)


class Embedded(Ground):
    """The pool within the process that asks."""

    reads_alone = True
    users = ("ada", "bob", "grace")

    def __init__(self, children: ForkServer) -> None:
        super().__init__(children)
        self._pool: Pool | None = None

    async def open(self) -> Pool:
        self._pool = still_pool(self.store, PoolSettings(**self.settings()))
        return self._pool

    async def crash(self) -> None:
        """Leave it: what a process did not write down before it died, it never did."""
        assert self._pool is not None
        await self._pool.close()

    def asking(self) -> str:
        # Of those that share a store one keeps the pool in order: here the process that compares it with the
        # model, so that a pass has been made whenever it looks. No other may take that up after a crash.
        settings = f"PoolSettings(**{self.settings()!r}, tuning=Tuning(passes_every=None))"
        opened = f"still_pool(Path({str(self.store)!r}), {settings})"
        names = "from gpu_pool.tuning import Tuning; from model.still import Path, PoolSettings, still_pool"
        return f"{names}; pool = {opened}"

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await super().close()


_SERVE = """
import sys
sys.path.insert(0, {tests!r})
import {where}
from {of} import {still}
{where}.{replaced} = {still}
"""


def serving_still(where: str, replaced: str, of: str, still: str) -> str:
    """Return code that has a service use, in place of a pool's class, the one of the tests."""
    return _SERVE.format(tests=str(_TESTS), where=where, replaced=replaced, of=of, still=still)


class Socket(Ground):
    """A service on a Unix socket."""

    def __init__(self, children: ForkServer) -> None:
        super().__init__(children)
        prelude = serving_still("gpu_pool.service.app", "local_pool", "model.still", "still_pool")
        self.service = Service(children, self.folder, prelude=prelude)

    def configuration(self) -> str:
        return "".join(f"c.PoolSettings.{name} = {value!r}\n" for name, value in self.settings().items())

    async def open(self) -> Pool:
        self.service.configure(self.configuration())
        await self.service.start()
        return connect(self.url())

    def url(self) -> str:
        return self.service.url

    async def crash(self) -> None:
        await self.service.end(signal.SIGKILL)

    def asking(self) -> str:
        return f"pool = connect({self.url()!r})"

    async def close(self) -> None:
        if self.service.process is not None:
            await self.crash()
        await super().close()


class Tcp(Socket):
    """The service behind a JupyterHub, over TCP: it sees no processes."""

    sees = False

    def __init__(self, children: ForkServer, hub: Hub, token: str) -> None:
        super().__init__(children)
        self._hub, self._token = hub, token
        self.service.environment = dict(hub.environment)

    def configuration(self) -> str:
        # A busy machine may be late with signs of life, which are not what is tried here.
        serve = f"c.ServeApp.bind = '127.0.0.1:{self._hub.service_port}'\nc.ServeApp.ttl = 3600\n"
        return serve + super().configuration()

    def url(self) -> str:
        return url(self._hub)

    def environment(self) -> dict[str, str]:
        return {"GPU_POOL_TOKEN": self._token}

    async def open(self) -> Pool:
        with patch.dict(os.environ, self.environment()):
            return await super().open()


#: What makes a ground for a test, by the name of the pool that is tried. A pool elsewhere adds its own here.
GROUNDS: dict[str, Callable[[ForkServer, Callable[[], Hub]], Ground]] = {
    "embedded": lambda children, _: Embedded(children),
    "unix": lambda children, _: Socket(children),
    "http": lambda children, hub: _behind(children, hub()),
}


def _behind(children: ForkServer, hub: Hub) -> Ground:
    return Tcp(children, hub, asyncio.run(hub.token(ADMIN)))
