"""Two hundred pages of one Jupyter server listen to its kernels' slices: what that costs server and pool."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
from tornado.websocket import WebSocketClientConnection

from benchmarks.report import Line, compared
from benchmarks.sizes import sized
from gpu_pool_client._remote.exchange import ask

# The same server and service as in the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.frontend import Frontend
from support.jupyter_env import JupyterEnv
from support.service import ForkServer, Service, serving
from support.slice_pages import PagesServer, cells, serving_pages

#: Pages, rounds, and seconds for which each number of pages is measured.
PAGES, ROUNDS, SECONDS = sized((200, 3, 20.0), (20, 1, 2.0))
#: Seconds after which a server whose last page has gone asks nothing more for pages.
QUIET_AFTER = 12.0


@dataclass
class Used:
    """What so many pages took, for a second."""

    #: Of the server's processor, in thousandths of a core.
    milli: float
    #: Requests at the pool's service.
    requests: float
    #: The server's memory, in MiB.
    mib: float


@asynccontextmanager
async def a_server() -> AsyncIterator[tuple[PagesServer, Service]]:
    """Run a server in which one kernel works on its slice and another waits, and the service of its pool."""
    children = ForkServer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            async with serving(children, folder / "service") as service:
                environment = {
                    "GPU_POOL_URL": service.url,
                    **{
                        f"JUPYTER_{each.upper()}_DIR": f"{name}/{each}"
                        for each in ("data", "runtime", "config")
                    },
                    "IPYTHONDIR": f"{name}/ipython",
                }
                with mock.patch.dict(os.environ, environment):
                    jupyter = JupyterEnv(folder, service.url)
                    async with serving_pages(jupyter) as server:
                        async with server.page() as page:
                            works = await server.start("held.ipynb", jupyter.install("two"))
                            await page.sees_slice(state="held")
                            await server.start("waiting.ipynb", jupyter.install("all", "1"))
                            await page.sees_slice(state="waiting", position=1)
                        async with cells(server, works) as frontend:
                            working = asyncio.create_task(_work(frontend))
                            yield server, service
                            working.cancel()
        finally:
            children.close()


async def _work(frontend: Frontend) -> None:
    """Run two short cells a second: so much changes for pages, and more."""
    while True:
        await frontend.run("None").done()
        await asyncio.sleep(0.5)


async def requests_of(service: Service) -> int:
    """Return how many requests the service has answered."""
    text = (await ask(service.socket, "GET", "/metrics", None, 60)).body.decode()
    return sum(
        int(float(each)) for each in re.findall(r"^gpu_pool_requests_total\{.*\} ([0-9.]+)", text, re.M)
    )


async def used_by(number: int, server: PagesServer, service: Service) -> Used:
    """Let so many pages listen, and measure the server and its pool meanwhile."""
    connections = [await server.connect() for _ in range(number)]
    hearing = [asyncio.create_task(_hear(each)) for each in connections]
    process = psutil.Process(server.process.pid)
    before, asked, began = sum(process.cpu_times()[:2]), await requests_of(service), time.monotonic()
    await asyncio.sleep(SECONDS)
    seconds = time.monotonic() - began
    used = Used(
        1000 * (sum(process.cpu_times()[:2]) - before) / seconds,
        (await requests_of(service) - asked) / seconds,
        process.memory_info().rss / 2**20,
    )
    for each in connections:
        each.close()
    await asyncio.gather(*hearing)
    return used


async def _hear(connection: WebSocketClientConnection) -> None:
    while await connection.read_message() is not None:
        pass


async def measure() -> list[dict[int, Used]]:
    """Return what none, one and all pages took, in each round."""
    rounds = []
    async with a_server() as (server, service):
        for _ in range(ROUNDS):
            await asyncio.sleep(QUIET_AFTER)
            rounds.append({number: await used_by(number, server, service) for number in (0, 1, PAGES)})
    return rounds


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    rounds = asyncio.run(measure())
    yield compared(
        f"requests at the pool, {PAGES} pages to one",
        [(each[PAGES].requests, each[1].requests) for each in rounds],
        "requests a second, of which most are the waiting kernel's own",
        1.1,
        unit="/s",
    )
    yield compared(
        f"the server's processor, {PAGES} pages to one",
        [(each[PAGES].milli, each[1].milli) for each in rounds],
        "thousandths of a core; one kernel runs two cells a second, of which pages are told, another waits",
        unit="mcore",
    )
    yield compared(
        "the server's processor, one page to none",
        # It is counted in hundredths of a second, of which a server without pages may use none.
        [(each[1].milli, max(each[0].milli, 10 / SECONDS)) for each in rounds],
        "thousandths of a core",
        unit="mcore",
    )
    yield compared(
        f"the server's memory, {PAGES} pages to none",
        [(each[PAGES].mib, each[0].mib) for each in rounds],
        "MiB; what pages have taken once is not given back to the system",
        unit="MiB",
    )
