"""How soon the next in the queue has the slice of a process that was killed."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Line
from benchmarks.service import ours
from benchmarks.sizes import sized
from gpu_pool_client import Holder, Pool, Process, connect, parse_request

ROUNDS = sized(20, 2)
HOLDER = Holder("ada")
WHOLE = parse_request("1")


def start() -> tuple[subprocess.Popen[bytes], Process]:
    """Start what is to be killed."""
    kernel = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    process = Process.of(kernel.pid)
    assert process is not None
    return kernel, process


async def reclaim(pool: Pool, number: int) -> float:
    """Kill a process that holds the only device; return the seconds until the next in the queue has it."""
    kernel, process = start()
    held = await pool.request(WHOLE, HOLDER, f"held-{number}")
    await pool.attach(held.id, process)
    next_one = await pool.request(WHOLE, HOLDER, f"next-{number}")
    waiting = asyncio.create_task(pool.wait(next_one.id))
    await asyncio.sleep(number / ROUNDS)  # at another moment between two looks each time
    began = time.monotonic()
    kernel.kill()
    await waiting
    seconds = time.monotonic() - began
    await pool.release(next_one.id)
    kernel.communicate()
    return seconds


async def measure(url: str) -> list[float]:
    """Do that a number of times."""
    async with connect(url) as pool:
        return [await reclaim(pool, number) for number in range(ROUNDS)]


def run() -> Iterator[Line]:
    """Measure an embedded pool and the service, and hold the slowest to the promise, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPU_POOL_DEVICES"] = "A100-SXM4-80GB:1"
        with ours(Path(folder)) as (socket, _):
            urls = {"gpu-pool serve": f"unix:{socket}", "embedded": f"embedded:{folder}/own.db"}
            for where, url in urls.items():
                times = asyncio.run(measure(url))
                words = f"the slowest of {ROUNDS}; median {statistics.median(times):.2f} s"
                what = f"from kill -9 to the next grant, {where}"
                yield Line(what, max(times), words, promise=2, ours=max(times), unit="s")
