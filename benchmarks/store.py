"""Decisions per second and their fairness, against bare SQLite under the same lock."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.report import Kind, Line, compared, interval, percentile, until_decided
from benchmarks.sizes import sized
from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool.store.locks import FairLock
from gpu_pool_client import Device, Holder, LeaseState, parse_request

PROCESSES = 50
SECONDS = sized(4.0, 1.0)
ROUNDS = sized(5, 1)
MOST_ROUNDS = sized(15, 1)
DEVICE = Device("SIM-bench", 0, "A100-SXM4-80GB", 81920, simulated=True)
#: What one acquire and one release write, without any decision, as two bare transactions.
SAME_ROWS = """
CREATE TABLE lease (number INTEGER PRIMARY KEY, key TEXT UNIQUE, facts TEXT);
CREATE TABLE device (id INTEGER PRIMARY KEY, held INTEGER);
CREATE TABLE history (number INTEGER PRIMARY KEY, key TEXT UNIQUE, facts TEXT);
INSERT INTO device VALUES (1, 0);
"""

Work = Callable[[Path, int], Iterator[None]]
Told = SimpleQueue[tuple[int, list[float]]]


@dataclass(frozen=True, slots=True)
class Result:
    """What fifty processes did in one run."""

    per_second: float
    #: The least served process's share of the most served one's.
    evenness: float
    #: 99th percentile of the time of one piece of work, over its mean.
    tail: float


def ours(folder: Path, worker: int) -> Iterator[None]:
    """Acquire and release through the contract, as a provisioner does."""
    pool = EmbeddedPool(folder / "store.db", find_devices=lambda: Inventory((DEVICE,), "benchmark"))
    request, holder, count = parse_request("1%"), Holder("bench"), 0

    async def pair(key: str) -> None:
        lease = await pool.request(request, holder, key)
        assert lease.state is LeaseState.HELD
        await pool.release(lease.id)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(pool.status())
    while True:
        yield
        loop.run_until_complete(pair(f"{worker}-{count}"))
        count += 1


def one_row(folder: Path, worker: int) -> Iterator[None]:
    """Write one row per transaction: the least that SQLite can do."""
    connection, lock = bare(folder), FairLock(folder / "lock")
    while True:
        yield
        with lock:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO lease (facts) VALUES (?)", (worker,))
            connection.execute("COMMIT")


def same_rows(folder: Path, worker: int) -> Iterator[None]:
    """Write the rows that an acquire and a release would, alternately, one transaction each."""
    connection, lock, count = bare(folder), FairLock(folder / "lock"), 0
    facts = "x" * 300
    while True:
        key = f"{worker}-{count}"
        yield
        with lock:
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute("INSERT INTO lease (key, facts) VALUES (?, ?)", (key, facts)).lastrowid
            connection.execute("UPDATE device SET held = held + 1")
            connection.execute("COMMIT")
        yield
        with lock:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT INTO history (key, facts) SELECT key, facts FROM lease WHERE number = ?", (row,)
            )
            connection.execute("DELETE FROM lease WHERE number = ?", (row,))
            connection.execute("UPDATE device SET held = held - 1")
            connection.execute("COMMIT")
        count += 1


def bare(folder: Path) -> sqlite3.Connection:
    """Open a bare database with the store's durability."""
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None, timeout=60)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def measure(work: Work) -> Result:
    """Let fifty processes do one kind of work at once, each as often as it can."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        connection = bare(folder)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(SAME_ROWS)
        context = multiprocessing.get_context("fork")
        told, start = context.SimpleQueue(), context.Barrier(PROCESSES)
        workers = [
            context.Process(target=_worker, args=(work, folder, number, told, start))
            for number in range(PROCESSES)
        ]
        for worker in workers:
            worker.start()
        counts, times = zip(*(told.get() for _ in workers), strict=True)
        for worker in workers:
            worker.join()
        connection.close()
    each = [seconds for some in times for seconds in some]
    tail = percentile(each, 0.99) / statistics.mean(each)
    return Result(sum(counts) / SECONDS, min(counts) / max(counts), tail)


def _worker(work: Work, folder: Path, number: int, told: Told, start: Barrier) -> None:
    task, times = work(folder, number), []
    next(task)
    start.wait()
    end = time.monotonic() + SECONDS
    while (began := time.monotonic()) < end:
        next(task)
        times.append(time.monotonic() - began)
    told.put((len(times), times))
    # The generator's loop and connections end with the process.
    os._exit(0)


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    return iter(until_decided(_round, _lines, ROUNDS, MOST_ROUNDS))


def _round() -> tuple[Result, Result, Result]:
    return measure(ours), measure(same_rows), measure(one_row)


def _lines(rounds: Sequence[tuple[Result, Result, Result]]) -> list[Line]:
    pairs = [each for each, _, _ in rounds]
    return [
        compared(
            "acquire+release pairs to bare transactions of the same rows",
            [(each.per_second, rows.per_second) for each, rows, _ in rounds],
            f"{PROCESSES} processes; a pair is two transactions",
            0.25,
            "at least",
            unit="1/s",
        ),
        compared(
            "acquire+release pairs to bare one-row transactions",
            [(each.per_second, least.per_second) for each, _, least in rounds],
            "the least that SQLite can do",
            unit="1/s",
        ),
        _alone("least served process to most served", [each.evenness for each in pairs], 1 / 3, "at least"),
        _alone("99th percentile of a pair to its mean", [each.tail for each in pairs], 3.0, "at most"),
    ]


def _alone(what: str, ratios: list[float], promise: float, kind: Kind) -> Line:
    low, high = interval(ratios)
    made_of = f"{PROCESSES} processes; 95% interval {low:.2g} to {high:.2g}, of {len(ratios)}"
    return Line(what, statistics.median(ratios), made_of, promise, kind, interval=(low, high))
