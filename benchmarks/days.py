"""Whether anything grows over school days, simulated one after the other by the code that grants slices.

``python -m benchmarks.days --minutes 60`` goes on for an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path

import psutil

from benchmarks.report import Line, percentile
from benchmarks.sizes import sized
from gpu_pool.clock import Clock
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import Device, EndReason, Holder, Process, parse_request

DEVICES = [Device(f"SIM-{n}", n, "V100-SXM2-32GB", 32768, simulated=True) for n in range(4)]
USERS, A_DAY = sized((500, 2_000), (50, 100))
#: What is asked for, and for how long on average, in seconds; more than there is at noon.
SIZES = [parse_request(text) for text in ("2%", "2%", "2%", "2%", "5%", "10%")]
HELD, DAY = 1_200.0, 86_400.0
MINUTES = sized(2.0, 0.0)


@dataclass(frozen=True, slots=True)
class Day:
    """What one day came to."""

    #: Milliseconds of work for a decision, by percentile. Those of each would be a growth of our own.
    took: dict[int, float]
    #: How many of these put somebody in the queue.
    waited: int
    memory_mib: float
    files: int
    store_kib: float


class School:
    """A pool in simulated time, and who uses it."""

    def __init__(self, path: Path) -> None:
        self._now, self._days = 1e9, 0
        self._path, self._database = path, Database(path)
        clock = Clock(lambda: self._now, lambda: self._now)
        self._store = StoreContext(self._database, PoolSettings(attach_within=DAY), clock)
        registration.register(self._store, DEVICES)
        self._chance = random.Random(0)

    def close(self) -> None:
        """Close the store."""
        self._database.close()

    def day(self) -> Day:
        """Let everybody come, ask and leave again; return what that came to."""
        began, took, waited = self._now, list[float](), 0
        # Most come about noon. Whoever has a lease's id comes to give it back.
        moments = [(began + self._chance.gauss(DAY / 2, DAY / 12), number, "") for number in range(A_DAY)]
        heapify(moments)
        while moments:
            self._now, number, lease_id = heappop(moments)
            before = time.thread_time()
            if lease_id:
                leases.end_lease(self._store, lease_id, EndReason.RELEASED)
            else:
                lease_id, is_held = self._ask(f"{self._days}-{number}")
                waited += not is_held
                stays = self._chance.expovariate(1 / HELD)
                heappush(moments, (self._now + stays, number, lease_id))
            took.append(time.thread_time() - before)
        self._now, self._days = began + DAY, self._days + 1
        with contextlib.closing(sqlite3.connect(self._path)) as store:
            store.execute("PRAGMA wal_checkpoint(PASSIVE)")
        me, size = psutil.Process(), self._path.stat().st_size
        work = {percent: percentile(took, percent / 100) * 1e3 for percent in (50, 99)}
        return Day(work, waited, me.memory_info().rss / 2**20, me.num_fds(), size / 1024)

    def _ask(self, key: str) -> tuple[str, bool]:
        user = f"user-{self._chance.randrange(USERS)}"
        holder = Holder(user, process=Process.current())
        lease = requests.decide(self._store, self._chance.choice(SIZES), holder, key)
        return lease.id, bool(lease.slices)


def days(minutes: float) -> list[Day]:
    """Simulate days for so long, three at least: in the first, everything is met for the first time."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        school, found = School(Path(folder) / "store.db"), list[Day]()
        while len(found) < 3 or time.monotonic() < end:
            found.append(school.day())
        school.close()
    return found


def run(minutes: float = MINUTES) -> Iterator[Line]:
    """Measure and yield the report's lines."""
    found = days(minutes)
    second, last = found[1], found[-1]
    load = f"{A_DAY:,} leases of {USERS} users a day, {last.waited:,} of the last day's from the line"
    for percent, now in last.took.items():
        then = second.took[percent]
        what = f"a decision after {len(found)} simulated days, to the second day: percentile {percent}"
        yield Line(
            what, now / then, f"{load}; {now:.2f} to {then:.2f} ms", ours=now, yardstick=then, unit="ms"
        )
    for what, unit, now, then in (
        ("memory", "MiB", last.memory_mib, second.memory_mib),
        ("open files", "files", float(last.files), float(second.files)),
    ):
        made_of = f"{load}; {now:.1f} to {then:.1f} {unit}"
        yield Line(
            f"{what} then, to the second day", now / then, made_of, 1.1, ours=now, yardstick=then, unit=unit
        )
    each = (last.store_kib - second.store_kib) / (A_DAY * (len(found) - 2))
    made_of = f"{last.store_kib / 1024:.1f} MiB in all; what has ended is kept"
    yield Line("the store's file, for each lease that has ended", each, made_of, ours=each, unit="KiB")


def main() -> None:
    """Run for as long as is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.days", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    for line in run(parser.parse_args().minutes):
        print(line)


if __name__ == "__main__":
    main()
