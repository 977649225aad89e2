"""Whether a grant stays quick when a thousand wait in the queue, which is what the pool is made for."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Line
from benchmarks.sizes import sized
from gpu_pool.clock import Clock
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import Device, EndReason, Holder, Process, parse_request

#: The GPU that is waited for, and others.
WANTED = Device("SIM-A100", 0, "A100-SXM4-80GB", 81920, simulated=True)
OTHERS = [Device(f"SIM-{n}", n, "V100-SXM2-32GB", 32768, simulated=True) for n in range(1, 9)]
#: The processor's time, by which the pool sorts the queue from time to time too: others use the machine.
CLOCK = Clock(uptime=time.process_time)
WAITERS = sized(1_000, 300)
ROUNDS = sized(400, 20)


def prepare(path: Path, waiters: int) -> tuple[Database, StoreContext]:
    """Make a store where one lease holds the wanted GPU, and so many users wait for it."""
    database = Database(path)
    store = StoreContext(database, PoolSettings(), CLOCK)
    registration.register(store, [WANTED, *OTHERS])
    for number in range(waiters + 1):
        ask(store, "1 model=A100", f"user-{number}", f"waiter-{number}")
    return database, store


def ask(store: StoreContext, text: str, user: str, key: str) -> str:
    """Ask for a slice and return the lease's id."""
    return requests.decide(store, parse_request(text), Holder(user, process=Process.current()), key).id


def pair(store: StoreContext, key: str) -> float:
    """Return the seconds that it takes to get a slice that nobody waits for, and to give it back."""
    began = time.process_time()
    leases.end_lease(store, ask(store, "2%", "ada", key), EndReason.RELEASED)
    return time.process_time() - began


def turnover(store: StoreContext, number: int) -> float:
    """Return the seconds that it takes to end the lease that is waited for, and to grant it to the next."""
    began = time.process_time()
    leases.end_request(store, f"waiter-{number}", EndReason.RELEASED)
    return time.process_time() - began


def explain(store: StoreContext, lease_id: str) -> float:
    """Return the seconds that it takes to say why a lease waits."""
    began = time.process_time()
    requests.why_waiting(store, lease_id)
    return time.process_time() - began


def run() -> Iterator[Line]:
    """Measure the two stores alternately and yield the report's lines."""
    with tempfile.TemporaryDirectory() as name:
        empty = prepare(Path(name) / "empty.db", 0)
        long = prepare(Path(name) / "long.db", WAITERS)
        last = ask(long[1], "1 model=A100", f"user-{WAITERS}", f"waiter-{WAITERS}")
        beside_none, pairs, turns, explanations = [], [], [], []
        for number in range(ROUNDS):
            beside_none.append(pair(empty[1], f"pair-{number}"))
            pairs.append(pair(long[1], f"pair-{number}"))
            turns.append(turnover(long[1], number))
            # As many wait as before.
            ask(long[1], "1 model=A100", f"user-{WAITERS + 1 + number}", f"waiter-{WAITERS + 1 + number}")
            explanations.append(explain(long[1], last))
        for database, _ in (empty, long):
            database.close()
    # The mean: some decisions sort the whole queue, and that counts.
    none = statistics.fmean(beside_none)
    yield _line(f"one acquire and release beside {WAITERS:,} waiters to beside none", pairs, none, 20.0)
    yield _line(f"a release that grants to the first of {WAITERS:,} to such a pair", turns, none, 20.0)
    yield _line(f"saying why the last of {WAITERS:,} waits to such a pair", explanations, none, 2.0)


def _line(what: str, taken: list[float], none: float, promise: float) -> Line:
    mean, median = statistics.fmean(taken), statistics.median(taken)
    made_of = (
        f"processor time, mean of {ROUNDS} interleaved: {mean * 1e3:.2f} to {none * 1e3:.2f} ms; "
        f"median {median * 1e3:.2f}, longest {max(taken) * 1e3:.0f} ms"
    )
    return Line(what, mean / none, made_of, promise, ours=mean * 1e3, yardstick=none * 1e3, unit="ms")
