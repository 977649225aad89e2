"""A class of 200 asks for slices within ten seconds, over HTTP, known by a real JupyterHub."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.report import Line, percentile
from benchmarks.sizes import sized
from gpu_pool_client import Holder, LeaseState, Pool, connect, parse_request

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.hub import Hub, HubService, free_port, serving_hub, write_hub
from support.service import ForkServer

CLASS, WITHIN = sized((200, 10.0), (60, 2.0))
SIZE = parse_request("2%")
#: On the socket all of them are one user.
SETTINGS = f"c.PoolSettings.max_waiting = {CLASS}\n"


@asynccontextmanager
async def serving(folder: Path, settings: str = SETTINGS, devices: str = "") -> AsyncIterator[HubService]:
    """Run a Hub, and behind it a service, by default over one simulated V100 with room for fifty."""
    hub, children = Hub(folder / "hub", free_port(), free_port()), ForkServer()
    hub.folder.mkdir()
    write_hub(hub)
    hub.start()
    try:
        async with serving_hub(children, hub, folder / "pool", settings, devices=devices) as behind:
            yield behind
    finally:
        hub.close()
        children.close()


async def students(behind: HubService, count: int = CLASS) -> list[Pool]:
    """Return the pool as each student's server sees it: over HTTP, with a token of their own."""
    pools = []
    for number in range(count):
        os.environ["GPU_POOL_TOKEN"] = await behind.hub.token(f"student-{number}")
        pools.append(connect(behind.url))
    return pools


async def answers(pools: Sequence[Pool]) -> list[float]:
    """Let everybody ask once, at a moment of their own; return after how many seconds each had an answer."""
    moments = random.Random(0)
    states: Counter[LeaseState] = Counter()

    async def ask(number: int, pool: Pool, at: float) -> float:
        await asyncio.sleep(at)
        began = time.monotonic()
        lease = await pool.request(SIZE, Holder("student"), f"rush-{number}")
        states[lease.state] += 1
        return time.monotonic() - began

    waits = await asyncio.gather(
        *(ask(number, pool, moments.uniform(0, WITHIN)) for number, pool in enumerate(pools))
    )
    assert states == {LeaseState.HELD: 50, LeaseState.WAITING: len(pools) - 50}
    return waits


async def measure() -> tuple[list[float], list[float]]:
    """Return the waits over HTTP by a Hub's tokens, and over the socket, where nobody has to be asked."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("http", "socket"):
            (Path(folder) / name).mkdir()
        async with serving(Path(folder) / "http") as behind:
            known = await answers(await students(behind))
        async with serving(Path(folder) / "socket") as behind:
            seen = await answers([connect(behind.service.url)] * CLASS)
    return known, seen


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    known, seen = asyncio.run(measure())
    middle, least = statistics.median(known), statistics.median(seen)
    yield Line(
        f"the slowest answer to a class of {CLASS}",
        max(known),
        f"within {WITHIN:.0f} s, each with a token that the Hub is asked about; "
        f"median {middle * 1e3:.0f} ms, 99th percentile {percentile(known, 0.99) * 1e3:.0f} ms",
        1.0,
        ours=max(known),
        unit="s",
    )
    yield Line(
        "the median answer by a Hub's token, to one over the socket",
        middle / least,
        "what it costs that the Hub says who asks",
        ours=middle * 1e3,
        yardstick=least * 1e3,
        unit="ms",
    )
