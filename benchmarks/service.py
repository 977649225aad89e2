"""Grants through the service's socket, against the least a tornado handler can do; what waiters cost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.report import Line, compared, until_decided
from benchmarks.sizes import sized
from gpu_pool_client import Holder, Pool, Process, connect, parse_request

CLIENTS = 50
SECONDS = sized(2.0, 0.5)
ROUNDS = sized(8, 1)
MOST_ROUNDS = sized(32, 1)
#: Longer than one poll, so that everybody asks anew once.
WATCHED_SECONDS = sized(30.0, 2.0)
WAITERS: tuple[tuple[int, float | None], ...] = sized(((200, None), (1_000, 0.1)), ((20, None),))
SETTINGS = (
    "c.ServeApp.max_connections = c.ServeApp.max_waits = c.PoolSettings.max_waiting = 5000\n"
    "c.ServeApp.log_level = 'WARN'\n"
)
#: A handler that commits one row, with the store's durability, and answers.
BARE = """
import asyncio, sqlite3, sys
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_unix_socket
from tornado.web import Application, RequestHandler

connection = sqlite3.connect(sys.argv[2], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = NORMAL")
connection.execute("CREATE TABLE lease (number INTEGER PRIMARY KEY, facts TEXT)")

class Commit(RequestHandler):
    def post(self):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO lease (facts) VALUES (?)", (self.request.body,))
        connection.execute("COMMIT")
        self.finish(self.request.body)

async def serve():
    server = HTTPServer(Application([("/", Commit)], log_function=lambda _: None))
    server.add_socket(bind_unix_socket(sys.argv[1]))
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@contextmanager
def ours(folder: Path) -> Iterator[tuple[Path, psutil.Process]]:
    """Run the service; yield its socket and its process."""
    (folder / "gpu_pool_config.py").write_text(SETTINGS)
    where = folder / "pool.sock"
    command = ["-m", "gpu_pool.cli", "serve", f"--socket={where}", f"--store={folder / 'store.db'}"]
    environment = {"JUPYTER_CONFIG_DIR": str(folder), "GPU_POOL_DEVICES": "A100-SXM4-80GB:1"}
    with running([sys.executable, *command], where, environment) as process:
        yield where, process


@contextmanager
def bare(folder: Path) -> Iterator[tuple[Path, psutil.Process]]:
    """Run the handler that only commits; yield its socket and its process."""
    where = folder / "bare.sock"
    with running([sys.executable, "-c", BARE, str(where), str(folder / "bare.db")], where, {}) as process:
        yield where, process


@contextmanager
def running(command: list[str], where: Path, environment: dict[str, str]) -> Iterator[psutil.Process]:
    """Run a server until it has been measured."""
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        while not answers(where):
            assert process.poll() is None
            time.sleep(0.01)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def answers(where: Path) -> bool:
    """Whether somebody listens there."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        return probe.connect_ex(str(where)) == 0


class Client:
    """A connection that is kept open: the least that a client can cost."""

    def __init__(self, where: Path) -> None:
        self._where = where

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._where))

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the body of the answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 2"), answer
        length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return await self._reader.readexactly(int(length or 0))


Work = Callable[[Client, str], Awaitable[None]]


async def pair(client: Client, key: str) -> None:
    """Ask for a slice, and give it back."""
    body = b'{"request": "1%%", "key": "%s", "kernel": "benchmark"}' % key.encode()
    lease = json.loads(await client.ask("POST", "/api/v1/leases", body))
    await client.ask("DELETE", f"/api/v1/leases/{lease['id']}")


async def commit(client: Client, key: str) -> None:
    """Have one row committed, of the size of a lease's."""
    await client.ask("POST", "/", key.encode() + b"x" * 300)


async def per_second(where: Path, work: Work, run: str) -> float:
    """Let fifty clients do one kind of work, each as often as it can."""
    end, done = time.monotonic() + SECONDS, 0

    async def repeat(number: int) -> None:
        nonlocal done
        client, count = Client(where), 0
        await client.open()
        while time.monotonic() < end:
            await work(client, f"{run}-{number}-{count}")
            count += 1
        done += count

    await asyncio.gather(*(repeat(number) for number in range(CLIENTS)))
    return done / SECONDS


async def pairs_of_the_client(url: str, run: str) -> float:
    """Return pairs per second of fifty callers of the real client, all in this process."""
    end, done = time.monotonic() + SECONDS, 0

    async def repeat(pool: Pool, number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            lease = await pool.request(parse_request("1%"), Holder("bench"), f"{run}-{number}-{done}")
            await pool.release(lease.id)
            done += 1

    async with connect(url) as pool:
        await asyncio.gather(*(repeat(pool, number) for number in range(CLIENTS)))
    return done / SECONDS


async def cpu_of_waiters(url: str, service: psutil.Process, count: int) -> float:
    """Return the part of a core that the service uses while so many wait and nothing happens."""
    async with connect(url) as pool:
        held = await pool.request(parse_request("1"), Holder("bench"), f"held-{count}")
        leases = [
            await pool.request(parse_request("1%"), Holder("bench"), f"waits-{count}-{number}")
            for number in range(count)
        ]
        await pool.attach(held.id, Process.current())
        waits = [asyncio.create_task(pool.wait(lease.id)) for lease in leases]
        await asyncio.sleep(3)
        before = sum(service.cpu_times()[:2])
        await asyncio.sleep(WATCHED_SECONDS)
        used = sum(service.cpu_times()[:2]) - before
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await pool.release(held.id)
    return used / WATCHED_SECONDS


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        where, service = stack.enter_context(ours(folder))
        least, _ = stack.enter_context(bare(folder))
        number = itertools.count()

        def measure() -> tuple[float, float, float]:
            run = next(number)
            commits = asyncio.run(per_second(least, commit, f"c{run}"))
            pairs = asyncio.run(per_second(where, pair, f"p{run}"))
            return pairs, commits, asyncio.run(pairs_of_the_client(f"unix:{where}", f"w{run}"))

        yield from until_decided(measure, _lines, ROUNDS, MOST_ROUNDS)
        for count, promise in WAITERS:
            share = asyncio.run(cpu_of_waiters(f"unix:{where}", service, count))
            words = f"seconds of the service's processor per second, over {WATCHED_SECONDS:.0f} s"
            yield Line(f"what {count} waiters use", share, words, promise, ours=share, unit="cores")


def _lines(rounds: Sequence[tuple[float, float, float]]) -> list[Line]:
    return [
        compared(
            "requests through the socket to a bare tornado handler's",
            [(2 * pairs, commits) for pairs, commits, _ in rounds],
            f"{CLIENTS} connections; each request is one transaction",
            0.5,
            "at least",
            unit="requests/s",
        ),
        compared(
            "pairs by the client, a connection each, to kept connections",
            [(whole, pairs) for pairs, _, whole in rounds],
            f"{CLIENTS} callers in one process",
            unit="pairs/s",
        ),
    ]
