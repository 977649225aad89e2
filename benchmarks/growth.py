"""What grows with what: grants, looks, files and memory with leases that are held, from 1 to 10,000."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Line
from benchmarks.service import running
from benchmarks.sizes import sized
from gpu_pool.devices import discover
from gpu_pool.settings import PoolSettings
from gpu_pool.store.database import Database
from gpu_pool.store.leases import LeaseStore
from gpu_pool_client import EndReason, Holder, Process, connect, parse_request

#: Room for 12,800 slices.
SIMULATED = {"GPU_POOL_DEVICES": "H100-SXM5-80GB:128"}
HELD = sized((1, 10, 100, 1_000, 10_000), (1, 10))
REMEMBERED = sized(1_000_000, 1_000)
ROUNDS = sized(400, 20)
LOOKS = sized(20, 3)
SIZE = parse_request("1%")

Points = tuple[tuple[float, float], ...]


def prepare(path: Path, held: int, remembered: int = 0) -> tuple[Database, LeaseStore]:
    """Make a store with that many held leases and ended ones."""
    database = Database(path)
    book = LeaseStore(database, PoolSettings())
    book.register(discover(SIMULATED).devices)
    with sqlite3.connect(path) as filling:
        filling.executemany(
            "INSERT INTO history VALUES "
            "(?, ?, ?, '1%', 10, 'ada', '', NULL, 0, 0, 1, 1, 10, 'released', '', ?, "
            "NULL, NULL, NULL, NULL, '')",
            (
                (n, f"{n}-00000000", f"past-{n}", json.dumps([[1, 10, 819, 0]]))
                for n in range(1, remembered + 1)
            ),
        )
    filling.close()
    this = Process.current()
    for number in range(held):
        lease = book.request(SIZE, Holder("ada", process=this), f"held-{number}")
        # What nobody uses would be taken back meanwhile.
        book.attach(lease.id, this, None, 0)
    return database, book


def acquire(book: LeaseStore, key: str) -> float:
    """Return the processor's seconds that one acquire takes; its release is not counted."""
    began = time.process_time()
    lease = book.request(SIZE, Holder("ada", process=Process.current()), key)
    seconds = time.process_time() - began
    book.release(lease.id, EndReason.RELEASED)
    return seconds


def look(book: LeaseStore, _: str) -> float:
    """Return the processor's seconds that it takes to see everything that is held, by whom."""
    began = time.process_time()
    book.status("")
    return time.process_time() - began


def in_turn(books: list[LeaseStore], act: Callable[[LeaseStore, str], float], rounds: int) -> list[float]:
    """Do it with each book in turn; return the median milliseconds of each."""
    taken: list[list[float]] = [[] for _ in books]
    for number in range(rounds):
        for book, times in zip(books, taken, strict=True):
            times.append(1000 * act(book, f"key-{number}"))
    return [statistics.median(times) for times in taken]


async def see_all(url: str) -> int:
    """Ask the service for everything, twice; return how many leases it has."""
    async with connect(url) as pool:
        await pool.status()
        return len((await pool.status()).leases)


def memory(store: Path, held: int) -> float:
    """Return the MiB of a service that has told somebody of all leases of a store."""
    (store.parent / "gpu_pool_config.py").write_text("c.ServeApp.log_level = 'WARN'")
    where = store.with_suffix(".sock")
    command = [sys.executable, "-m", "gpu_pool.cli", "serve", f"--socket={where}", f"--store={store}"]
    environment = {**SIMULATED, "JUPYTER_CONFIG_DIR": os.fspath(store.parent)}
    with running(command, where, environment) as service:
        assert asyncio.run(see_all(f"unix:{where}")) == held
        return float(service.memory_info().rss) / 2**20


def run() -> Iterator[Line]:
    """Measure all sizes in turn and yield the report's lines."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{held}.db" for held in HELD]
        stores = [prepare(path, held) for path, held in zip(paths, HELD, strict=True)]
        old = prepare(Path(name) / "old.db", HELD[-1], REMEMBERED)
        books = [book for _, book in stores]
        *grants, remembering = in_turn([*books, old[1]], acquire, ROUNDS)
        looks = in_turn(books, look, LOOKS)
        for database, _ in (*stores, old):
            database.close()
        files = [path.stat().st_size / 1024 for path in paths]
        mib = [memory(path, held) for path, held in zip(paths, HELD, strict=True)]
    few, many = HELD[0], HELD[-1]
    of = f"the processor's time, median of {ROUNDS}, all sizes in turn; 128 devices"
    yield _curve(f"one acquire at {many:,} held, to {few} held", "ms", grants, of)
    yield Line(
        f"one acquire at {many:,} held and {REMEMBERED:,} ended, to {few} held",
        remembering / grants[0],
        of,
        1.5,
        ours=remembering,
        yardstick=grants[0],
        unit="ms",
    )
    yield _curve(f"one look at all of {many:,} leases, to {few}", "ms", looks, f"the same, median of {LOOKS}")
    yield _curve(f"a store of {many:,} leases, to {few}", "KiB", files, "the file, closed")
    yield _curve(f"a service of {many:,} leases, to {few}", "MiB", mib, "resident, once it has told of all")
    for what, sizes in (("store", files), ("service's memory", [1024 * each for each in mib])):
        each = (sizes[-1] - sizes[0]) / (many - few)
        yield Line(f"a lease in the {what}", each, f"from {few} to {many:,} held", ours=each, unit="KiB")


def _curve(what: str, unit: str, values: list[float], made_of: str) -> Line:
    points = tuple(zip(map(float, HELD), values, strict=True))
    ratio = values[-1] / values[0]
    return Line(what, ratio, made_of, ours=values[-1], yardstick=values[0], unit=unit, points=points)
