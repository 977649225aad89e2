"""Decisions per second and their fairness, against bare SQLite under the same lock."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.report import Kind, Line, compared, interval, percentile, until_decided
from benchmarks.sizes import sized
from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.store.locks import FairLock
from gpu_pool_client import Device, Holder, LeaseState, parse_request

PROCESSES = 50
SECONDS = sized(4.0, 1.0)
ROUNDS = sized(5, 1)
MOST_ROUNDS = sized(15, 1)
DEVICE = Device("SIM-bench", 0, "A100-SXM4-80GB", 81920, simulated=True)
#: The rows, and their entries in indexes, that one acquire and one release write. A test counts them.
SAME_ROWS = """
CREATE TABLE lease (number INTEGER PRIMARY KEY, key TEXT UNIQUE, state TEXT, facts TEXT);
CREATE INDEX lease_held ON lease (state);
CREATE TABLE device (id INTEGER PRIMARY KEY, held INTEGER);
CREATE TABLE history (
    number INTEGER PRIMARY KEY, key TEXT UNIQUE, user TEXT, ended_at REAL, facts TEXT, place INTEGER
);
CREATE INDEX history_by_user ON history (user, ended_at);
CREATE INDEX history_by_end ON history (ended_at);
CREATE INDEX history_by_place ON history (place);
CREATE TABLE use (course TEXT, user TEXT, used REAL, PRIMARY KEY (course, user)) WITHOUT ROWID;
CREATE TABLE week_use (course TEXT, user TEXT, used REAL, PRIMARY KEY (course, user)) WITHOUT ROWID;
CREATE TABLE course_use (course TEXT PRIMARY KEY, used REAL) WITHOUT ROWID;
INSERT INTO device VALUES (1, 0);
INSERT INTO use VALUES ('', 'bench', 0);
INSERT INTO week_use VALUES ('', 'bench', 0);
INSERT INTO course_use VALUES ('', 0);
"""
#: What else is in a lease's row, or as long as it.
FACTS = "x" * 300

#: Does one piece of work, and sets it up at first, for each step. In an event loop that goes on, as a
#: provisioner's does: starting one anew for each piece would take a tenth of the processor.
Work = Callable[[Path, int], AsyncIterator[None]]
Told = SimpleQueue[tuple[int, list[float]]]


@dataclass(frozen=True, slots=True)
class Result:
    """What fifty processes did in one run."""

    per_second: float
    #: The least served process's share of the most served one's.
    evenness: float
    #: 99th percentile of the time of one piece of work, over its mean.
    tail: float


async def ours(folder: Path, worker: int) -> AsyncIterator[None]:
    """Acquire and release through the contract, as a provisioner does."""
    request, holder, count = parse_request("1%"), Holder("bench"), 0
    devices = Inventory((DEVICE,), "benchmark")
    async with local_pool(folder / "store.db", find_devices=lambda: devices) as pool:
        await pool.status()
        while True:
            yield
            lease = await pool.request(request, holder, f"{worker}-{count}")
            assert lease.state is LeaseState.HELD
            await pool.release(lease.id)
            count += 1


async def one_row(folder: Path, worker: int) -> AsyncIterator[None]:
    """Write one row per transaction: the least that SQLite can do."""
    with closing(bare(folder)) as connection, closing(FairLock(folder / "lock")) as lock:
        while True:
            yield
            with lock:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO lease (facts) VALUES (?)", (worker,))
                connection.execute("COMMIT")


async def same_rows(folder: Path, worker: int) -> AsyncIterator[None]:
    """Write the rows that an acquire and a release would, alternately, one transaction each."""
    with closing(bare(folder)) as connection, closing(FairLock(folder / "lock")) as lock:
        for number in itertools.count():
            yield
            with lock:
                row = acquired(connection, f"{worker}-{number}")
            yield
            with lock:
                released(connection, row)


def acquired(connection: sqlite3.Connection, key: str) -> int | None:
    """Write what an acquire does; return the number of its lease."""
    connection.execute("BEGIN IMMEDIATE")
    lease = "INSERT INTO lease (key, state, facts) VALUES (?, 'held', ?)"
    row = connection.execute(lease, (key, FACTS)).lastrowid
    connection.execute("UPDATE device SET held = held + 1")
    connection.execute("COMMIT")
    return row


def released(connection: sqlite3.Connection, row: int | None) -> None:
    """Write what a release does."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        "INSERT INTO history (key, user, ended_at, facts, place) "
        "SELECT key, 'bench', ?, facts, number FROM lease WHERE number = ?",
        (time.time(), row),
    )
    connection.execute("DELETE FROM lease WHERE number = ?", (row,))
    connection.execute("UPDATE device SET held = held - 1")
    for table in ("use", "week_use"):
        connection.execute(f"UPDATE {table} SET used = used + 1 WHERE course = '' AND user = 'bench'")
    connection.execute("UPDATE course_use SET used = used + 1 WHERE course = ''")
    connection.execute("COMMIT")


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
    told.put(asyncio.run(_times(work(folder, number), start)))
    # What the work has open ends with the process.
    os._exit(0)


async def _times(work: AsyncIterator[None], start: Barrier) -> tuple[int, list[float]]:
    times = []
    await anext(work)
    start.wait()
    end = time.monotonic() + SECONDS
    while (began := time.monotonic()) < end:
        await anext(work)
        times.append(time.monotonic() - began)
    return len(times), times


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
