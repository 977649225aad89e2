"""Whether a grant stays as quick when much is held and much is remembered."""

from __future__ import annotations

import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Line
from gpu_pool.ledger.book import Book
from gpu_pool.ledger.database import Database
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, EndReason, Holder, Process, parse_request

DEVICES = [Device(f"SIM-{n}", n, "H100-SXM5-80GB", 81920, simulated=True) for n in range(128)]
FEW, MANY, REMEMBERED = 10, 10_000, 1_000_000
ROUNDS = 400


def prepare(path: Path, held: int, remembered: int) -> tuple[Database, Book]:
    """Make a ledger with that many held leases and ended ones."""
    database = Database(path)
    book = Book(database, PoolSettings(compute_overcommit=10.0))
    book.register(DEVICES)
    with sqlite3.connect(path) as filling:
        filling.executemany(
            "INSERT INTO history VALUES "
            "(?, ?, ?, '1%', 10, 'ada', '', NULL, 0, 0, 1, 1, 10, 'released', '', ?, NULL, NULL, NULL, NULL)",
            (
                (n, f"{n}-00000000", f"past-{n}", json.dumps([[1, 10, 819, 0]]))
                for n in range(1, remembered + 1)
            ),
        )
    filling.close()
    for number in range(held):
        book.request(parse_request("1%"), Holder("ada", process=Process.current()), f"held-{number}")
    return database, book


def acquire(book: Book, key: str) -> float:
    """Return the seconds that one acquire takes; its release is not counted."""
    began = time.perf_counter()
    lease = book.request(parse_request("1%"), Holder("ada", process=Process.current()), key)
    seconds = time.perf_counter() - began
    book.release(lease.id, EndReason.RELEASED)
    return seconds


def run() -> Iterator[Line]:
    """Measure the two ledgers alternately and yield the report's line."""
    with tempfile.TemporaryDirectory() as name:
        small = prepare(Path(name) / "small.db", FEW, 0)
        large = prepare(Path(name) / "large.db", MANY, REMEMBERED)
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(ROUNDS):
            for (_, book), taken in zip((small, large), times, strict=True):
                taken.append(acquire(book, f"key-{number}"))
        for database, _ in (small, large):
            database.close()
    few, many = (statistics.median(taken) for taken in times)
    yield Line(
        f"one acquire at {MANY:,} held and {REMEMBERED:,} ended to {FEW} held",
        many / few,
        f"median of {ROUNDS} interleaved: {many * 1e6:.0f} to {few * 1e6:.0f} µs, {len(DEVICES)} devices",
        1.5,
    )
