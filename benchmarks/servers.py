"""A class whose kernels wait: each student's Jupyter server asks every second how they wait in the queue."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.report import Line, percentile
from benchmarks.rush import SIZE, serving, students
from benchmarks.sizes import sized
from gpu_pool_client import Holder, Pool

#: Servers, and how often each kind of question is measured, for so many seconds.
SERVERS, ROUNDS, SECONDS = sized((200, 3, 10.0), (20, 1, 2.0))
KERNELS = 2
SETTINGS = f"c.PoolSettings.max_waiting = {SERVERS * KERNELS}\n"

Question = Callable[[Pool], Awaitable[object]]


async def answers(pools: Sequence[Pool], question: Question) -> list[float]:
    """Let every server ask once a second, each at a moment of its own; return how long each answer took."""
    took: list[float] = []

    async def ask(number: int, pool: Pool) -> None:
        begin = time.monotonic() + number / len(pools)
        for second in range(int(SECONDS)):
            await asyncio.sleep(max(0.0, begin + second - time.monotonic()))
            asked = time.monotonic()
            await question(pool)
            took.append(time.monotonic() - asked)

    await asyncio.gather(*(ask(number, pool) for number, pool in enumerate(pools)))
    return took


async def measure() -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the service's seconds of processor for one answer, and how long all took, by the question."""
    questions: dict[str, Question] = {
        "places": lambda pool: pool.positions(),
        "status": lambda pool: pool.status(),
    }
    used = dict.fromkeys(questions, 0.0)
    took: dict[str, list[float]] = {name: [] for name in questions}
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), SETTINGS) as behind:
            pools = await students(behind, SERVERS)
            for number, pool in enumerate(pools):
                for kernel in range(KERNELS):
                    await pool.request(SIZE, Holder("student"), f"servers-{number}-{kernel}")
            assert behind.service.process is not None
            service = psutil.Process(behind.service.process.pid)
            for _ in range(ROUNDS):
                for name, question in questions.items():
                    before = sum(service.cpu_times()[:2])
                    took[name] += await answers(pools, question)
                    used[name] += sum(service.cpu_times()[:2]) - before
    return {name: used[name] / len(took[name]) for name in questions}, took


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    used, took = asyncio.run(measure())
    ours, yardstick = (used[name] * 1e3 for name in ("places", "status"))
    told = ", ".join(
        f"{name}: median {percentile(times, 0.5) * 1e3:.0f} ms, 95% {percentile(times, 0.95) * 1e3:.0f} ms"
        for name, times in took.items()
    )
    yield Line(
        f"{SERVERS} servers ask every second for places, to the pool's status",
        ours / yardstick,
        f"the service's processor for one answer: {ours:.2f} to {yardstick:.2f} ms; answered after, {told}",
        ours=ours,
        yardstick=yardstick,
        unit="ms",
    )
    yield Line(
        f"processor used by {SERVERS} servers in which kernels wait",
        used["places"] * SERVERS,
        "seconds of the service's processor per second",
        0.5,
        ours=used["places"] * SERVERS,
        unit="cores",
    )
