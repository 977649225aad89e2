"""A kernel's first start and its restarts in place by the supervisor of its pod, against the kernel alone.

The supervisor is a process of this machine, with what lies in a pod's folder: what a cluster takes for a pod,
and the way through the proxy, are left out (``benchmarks.pod_starts`` has both). Each time a client that
tries to connect all the time waits for the reply to a cell.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient

from benchmarks.report import Line, compared, until_decided
from benchmarks.sizes import KERNELS_PYTHON, sized
from benchmarks.warm import LIBRARIES, Library, has
from benchmarks.warm_server import CELL_WITHIN, run_cell
from gpu_pool_provisioner.environment import kernel_command
from support.pools import eventually
from support.supervisors import IPYKERNEL, Supervised, children_of, supervised

ROUNDS = sized(12, 1)
#: Of kernels that import a library, which take seconds.
LARGE_ROUNDS = sized(5, 1)
MORE = sized(3, 1)
#: Promised of a first start, of a restart, and of one with a library that was preloaded.
_START, _RESTART, _PRELOADED = 1.05, 0.2, 0.1
#: Milliseconds between two attempts of a client to connect.
_CONNECTS_EVERY = 2


@dataclass
class Times:
    """Seconds to the reply to a cell, each beside those of the kernel alone in the same round."""

    starts: list[tuple[float, float]] = field(default_factory=list)
    restarts: list[tuple[float, float]] = field(default_factory=list)


async def replied(pod: Supervised, code: str) -> None:
    """Return once a kernel has replied to a cell."""
    with zmq.asyncio.Context() as context:
        # By default who connects too early tries again after 100 ms, a third of what is measured.
        context.setsockopt(zmq.RECONNECT_IVL, _CONNECTS_EVERY)
        client = AsyncKernelClient(context=context)
        client.load_connection_info(pod.connection)
        client.start_channels(stdin=False, hb=False, control=False, iopub=False)
        try:
            await run_cell(client, code)
        finally:
            client.stop_channels()


async def alone(pod: Supervised, python: str, code: str) -> float:
    """Start the kernel as a pod without a supervisor does; return the seconds to the reply to a cell."""
    words = kernel_command(
        [word.format(connection_file=pod.connection_file) for word in IPYKERNEL], installed=True
    )
    nothing = asyncio.subprocess.DEVNULL
    began = time.perf_counter()
    kernel = await asyncio.create_subprocess_exec(
        python, *words[1:], stdin=nothing, stdout=nothing, stderr=nothing
    )
    try:
        await replied(pod, code)
        return time.perf_counter() - began
    finally:
        kernel.kill()
        await kernel.wait()


@asynccontextmanager
async def _pod(python: str, *options: str) -> AsyncIterator[Supervised]:
    with tempfile.TemporaryDirectory(prefix="supervised-") as name:
        async with supervised(Path(name), *options, python=python) as pod:
            yield pod


async def one(python: str, library: Library, times: Times) -> None:
    """Start a kernel, restart it once its template is there, end it, and start it alone."""
    options = ("--preload", ",".join(library.modules)) if library.modules else ()
    async with _pod(python, *options) as pod:
        await replied(pod, library.cell)
        start = time.perf_counter() - pod.began_at
        control = await pod.connect()
        if library.modules:
            await _preloaded(pod)
        await control.restart(within=CELL_WITHIN)  # one that comes at once waits for the template
        began = time.perf_counter()
        await control.restart(within=CELL_WITHIN)
        await replied(pod, library.cell)
        restart = time.perf_counter() - began
        pod.process.terminate()
        await pod.ended()
        stock = await alone(pod, python, library.cell)
    times.starts.append((start, stock))
    times.restarts.append((restart, stock))


async def _preloaded(pod: Supervised) -> None:
    """Return once the first template has given way to one that has imported what is preloaded."""
    kernel = await pod.pid()
    first = set(children_of(pod.process.pid)) - {kernel}
    await eventually(lambda: not first & set(children_of(pod.process.pid)), within=CELL_WITHIN)


def measure(python: str, library: Library, rounds: int) -> Times:
    """Measure so many rounds, after one that does not count."""
    times = Times()

    async def measured() -> None:
        await one(python, library, Times())
        for _ in range(rounds):
            await one(python, library, times)

    asyncio.run(measured())
    return times


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    python = os.environ.get(KERNELS_PYTHON) or sys.executable
    nothing = Library((), "None", does="nothing")
    yield from until_decided(lambda: measure(python, nothing, ROUNDS), _bare, 1, MORE)
    for library in (each for each in LIBRARIES if each.of_cell and has(python, each.modules)):
        yield from until_decided(
            lambda of=library: measure(python, of, LARGE_ROUNDS),  # type: ignore[misc]
            lambda rounds, of=library: [_restart(of.name, rounds, _PRELOADED)],  # type: ignore[misc]
            1,
            MORE,
        )


def _bare(rounds: Sequence[Times]) -> list[Line]:
    starts = [pair for each in rounds for pair in each.starts]
    what = "a supervised kernel's start to its first cell, to the kernel alone"
    first = compared(what, starts, "medians", _START, unit="s")
    return [first, _restart("nothing preloaded", rounds, _RESTART)]


def _restart(what: str, rounds: Sequence[Times], promise: float) -> Line:
    pairs = [pair for each in rounds for pair in each.restarts]
    return compared(
        f"its restart in place to a cell, {what}, to the kernel alone", pairs, "medians", promise, unit="s"
    )
