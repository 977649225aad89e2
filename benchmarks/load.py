"""A big school: 500 users who take and give back 2,000 slices a minute while 1,000 others wait."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from benchmarks.report import Line, percentile
from benchmarks.rush import HubService, serving, students
from benchmarks.sizes import sized
from gpu_pool_client import Holder, Pool, connect, parse_request

USERS, A_MINUTE, WAITERS = sized((500, 2_000, 1_000), (20, 600, 300))
#: Seconds that each part is measured for.
SECONDS = sized(60.0, 3.0)
#: So many join the queue at once.
TOGETHER = 32
SIZE = parse_request("2%")
#: What the waiters wait for: the model of a device that is drained, so that nobody else is in their way.
SCARCE = parse_request("1 model=A100")
#: On the socket, over which they wait, all of them are one user.
SETTINGS = f"""
c.PoolSettings.max_waiting = {WAITERS}
c.ServeApp.max_connections = c.ServeApp.max_waits = {2 * WAITERS}
"""
DEVICES = "V100-SXM2-32GB:8,A100-SXM4-80GB:1"


async def drain(behind: HubService) -> None:
    """Let nothing be granted on what the waiters wait for."""
    async with connect(behind.service.url) as pool:
        scarce = next(each for each in (await pool.status()).devices if "A100" in each.device.model)
        await pool.drain(scarce.device.uuid)


async def grants(pools: Sequence[Pool], run: str) -> list[float]:
    """Take and give back slices at the school's pace; return how many seconds each request took."""
    moments = random.Random(run)
    took: list[float] = []

    async def take(number: int, at: float) -> None:
        await asyncio.sleep(at)
        pool = moments.choice(pools)
        began = time.monotonic()
        lease = await pool.request(SIZE, Holder("student"), f"load-{run}-{number}")
        took.append(time.monotonic() - began)
        await pool.release(lease.id)

    count = int(A_MINUTE * SECONDS / 60)
    await asyncio.gather(*(take(number, moments.uniform(0, SECONDS)) for number in range(count)))
    return took


@asynccontextmanager
async def waiting(behind: HubService, service: psutil.Process) -> AsyncIterator[float]:
    """Let everybody else join the queue, and wait for their turn; yield after how many seconds all do."""
    # More connect at once than the system queues; those it sends away try again.
    logging.getLogger("tornado.general").setLevel(logging.ERROR)
    async with connect(behind.service.url) as pool:
        leases, began = [], time.monotonic()
        for first in range(0, WAITERS, TOGETHER):
            keys = [f"wait-{number}" for number in range(first, min(first + TOGETHER, WAITERS))]
            leases += await asyncio.gather(*(pool.request(SCARCE, Holder("w"), key) for key in keys))
        waits = [asyncio.create_task(pool.wait(lease.id)) for lease in leases]
        try:
            while service.num_fds() < WAITERS:  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.2)
            yield time.monotonic() - began
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def measure() -> Iterator[Line]:
    """Measure with nobody in the queue, and with everybody."""
    # Each waiter is a connection, seen from both of its ends.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), SETTINGS, DEVICES) as behind:
            await drain(behind)
            pools = await students(behind, USERS)
            assert behind.service.process is not None
            service = psutil.Process(behind.service.process.pid)
            await grants(pools, "warm")
            alone, empty = await grants(pools, "alone"), size(service)
            async with waiting(behind, service) as settled:
                beside = await grants(pools, "beside")
                full, used = size(service), sum(service.cpu_times()[:2])
                again = await grants(pools, "again")
                later, used = size(service), sum(service.cpu_times()[:2]) - used
    return lines(alone, beside, again, settled, (empty, full, later), used)


def size(process: psutil.Process) -> tuple[float, int]:
    """Return a process's memory in MiB, and its open files."""
    return process.memory_info().rss / 2**20, process.num_fds()


def lines(
    alone: list[float],
    beside: list[float],
    again: list[float],
    settled: float,
    sizes: tuple[tuple[float, int], ...],
    used: float,
) -> Iterator[Line]:
    """Put the figures into the report's lines."""
    load = (
        f"{USERS} users over HTTP, each with a token that the Hub is asked about; {A_MINUTE} slices a minute"
    )
    for share in (0.5, 0.95, 0.99):
        slow, fast = percentile(beside, share) * 1e3, percentile(alone, share) * 1e3
        yield Line(
            f"a grant beside {WAITERS:,} who wait, to one beside nobody: percentile {100 * share:.0f}",
            slow / fast,
            f"{load}; {slow:.0f} to {fast:.0f} ms; the slowest {max(beside):.1f} to {max(alone):.1f} s",
            ours=slow,
            yardstick=fast,
            unit="ms",
        )
    yield Line(
        f"from the first to the last of {WAITERS:,} who join the queue together",
        settled,
        f"each asks, and then waits over a connection of its own: {WAITERS / settled:.0f} a second",
        ours=settled,
        unit="s",
    )
    (empty, few), (full, many), (later, after) = sizes
    yield Line(
        f"the service's memory after another {SECONDS:.0f} s of it, to before",
        later / full,
        f"{later:.0f} to {full:.0f} MiB with everybody in the queue, {empty:.0f} MiB with nobody: "
        f"{(full - empty) / WAITERS * 1024:.0f} KiB for each; "
        f"99th percentile of a grant then {percentile(again, 0.99) * 1e3:.0f} ms",
        1.05,
        ours=later,
        yardstick=full,
        unit="MiB",
    )
    yield Line(
        "its open files then, to before",
        after / many,
        f"{after} to {many}, {few} with nobody in the queue",
        1.02,
        ours=float(after),
        yardstick=float(many),
        unit="files",
    )
    yield Line(
        f"processor used by it all, {WAITERS:,} who wait included",
        used / SECONDS,
        "seconds of the service's processor per second",
        ours=used / SECONDS,
        unit="cores",
    )


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    return asyncio.run(measure())
