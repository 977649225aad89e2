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

from benchmarks.report import Line, compared
from benchmarks.service import running
from benchmarks.sizes import sized
from gpu_pool.devices import discover
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import EndReason, Holder, Process, connect, parse_request

#: Room for 12,800 slices.
SIMULATED = {"GPU_POOL_DEVICES": "H100-SXM5-80GB:128"}
HELD = sized((1, 10, 100, 1_000, 10_000), (1, 10))
REMEMBERED = sized(1_000_000, 1_000)
ROUNDS = sized(400, 20)
LOOKS = sized(20, 3)
SIZE = parse_request("1%")

Points = tuple[tuple[float, float], ...]


def prepare(path: Path, held: int, remembered: int = 0) -> tuple[Database, StoreContext]:
    """Make a store with that many held leases and ended ones."""
    database = Database(path)
    store = StoreContext(database, PoolSettings())
    registration.register(store, discover(SIMULATED).devices)
    with sqlite3.connect(path) as filling:
        filling.executemany(
            "INSERT INTO history (number, id, key, request, milli, user, course, requested_at, held_at, "
            "ended_at, held_seconds, used, reason, slices) "
            "VALUES (?, ?, ?, '1%', 10, 'ada', '', 0, 0, 1, 1, 10, 'released', ?)",
            (
                (n, f"{n}-00000000", f"past-{n}", json.dumps([[1, 10, 819, 0]]))
                for n in range(1, remembered + 1)
            ),
        )
    filling.close()
    this = Process.current()
    for number in range(held):
        lease = requests.decide(store, SIZE, Holder("ada", process=this), f"held-{number}")
        # What nobody uses would be taken back meanwhile.
        leases.bind_process(store, lease.id, this, None, 0)
    return database, store


def acquire(store: StoreContext, key: str) -> float:
    """Return the processor's seconds that one acquire takes; its release is not counted."""
    began = time.process_time()
    lease = requests.decide(store, SIZE, Holder("ada", process=Process.current()), key)
    seconds = time.process_time() - began
    leases.end_lease(store, lease.id, EndReason.RELEASED)
    return seconds


def look(store: StoreContext, _: str) -> float:
    """Return the processor's seconds that it takes to see everything that is held, by whom."""
    began = time.process_time()
    leases.status(store, "")
    return time.process_time() - began


def in_turn(
    stores: list[StoreContext], act: Callable[[StoreContext, str], float], rounds: int
) -> list[list[float]]:
    """Do it with each store in turn; return the milliseconds of each."""
    taken: list[list[float]] = [[] for _ in stores]
    for number in range(rounds):
        for store, times in zip(stores, taken, strict=True):
            times.append(1000 * act(store, f"key-{number}"))
    return taken


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
        opened = [prepare(path, held) for path, held in zip(paths, HELD, strict=True)]
        old = prepare(Path(name) / "old.db", HELD[-1], REMEMBERED)
        stores = [store for _, store in opened]
        *grants, remembering = in_turn([*stores, old[1]], acquire, ROUNDS)
        looks = in_turn(stores, look, LOOKS)
        for database, _ in (*opened, old):
            database.close()
        files = [path.stat().st_size / 1024 for path in paths]
        mib = [memory(path, held) for path, held in zip(paths, HELD, strict=True)]
    few, many = HELD[0], HELD[-1]
    of = f"the processor's time, medians of {ROUNDS}, all sizes in turn; 128 devices"
    medians, seen = ([statistics.median(times) for times in each] for each in (grants, looks))
    yield _curve(f"one acquire at {many:,} held, to {few} held", "ms", medians, of)
    what = f"one acquire at {many:,} held and {REMEMBERED:,} ended, to {few} held"
    yield compared(what, list(zip(remembering, grants[0], strict=True)), of, 1.5, unit="ms")
    yield _curve(f"one look at all of {many:,} leases, to {few}", "ms", seen, f"the same, medians of {LOOKS}")
    yield _curve(f"a store of {many:,} leases, to {few}", "KiB", files, "the file, closed")
    yield _curve(f"a service of {many:,} leases, to {few}", "MiB", mib, "resident, once it has told of all")
    for what, sizes in (("store", files), ("service's memory", [1024 * each for each in mib])):
        each = (sizes[-1] - sizes[0]) / (many - few)
        yield Line(f"a lease in the {what}", each, f"from {few} to {many:,} held", ours=each, unit="KiB")


def _curve(what: str, unit: str, values: list[float], made_of: str) -> Line:
    points = tuple(zip(map(float, HELD), values, strict=True))
    ratio = values[-1] / values[0]
    return Line(what, ratio, made_of, ours=values[-1], yardstick=values[0], unit=unit, points=points)
