"""The dashboard with 400 leases: its first paint, the server's part of it, and what it costs to stay live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Line
from benchmarks.sizes import sized

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.dashboard import ADMIN, PREFIX, Site, courses_of, showing

DEVICES, LEASES, ROUNDS = sized((8, 400, 10), (1, 20, 1))
WATCHERS, WATCHED_SECONDS = sized((1_000, 20.0), (20, 2.0))
COURSES = [f"course-{number}" for number in range(8)]
FIRST_PAINT = """() => new Promise((done) => new PerformanceObserver((list) => {
  const [paint] = list.getEntriesByName("first-contentful-paint");
  if (paint) done(paint.startTime);
}).observe({ type: "paint", buffered: true }))"""


@contextlib.asynccontextmanager
async def a_full_pool() -> AsyncIterator[Site]:
    """Serve the dashboard of eight GPUs, each with fifty slices of 2%; 100 more wait."""
    with tempfile.TemporaryDirectory() as folder:
        async with showing(Path(folder), DEVICES, courses_of({name: name for name in COURSES})) as site:
            for number in range(LEASES + 100):
                await site.take("2%", f"user{number}", COURSES[number % len(COURSES)], "Python 3 (GPU 2%)")
            yield site


async def rendering(site: Site, path: str, user: str) -> tuple[float, int]:
    """Return the median seconds in which a page is answered, and its size in KiB."""
    times, size = [], 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        size = len((await site.get(path, user)).body)
        times.append(time.perf_counter() - began)
    return statistics.median(times), size // 1024


async def painting(site: Site, path: str, user: str) -> float | None:
    """Return the median seconds to the first paint in chromium; None where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return None
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        times = [await first_paint(browser, site, path, user) for _ in range(ROUNDS)]
        await browser.close()
    return statistics.median(times)


async def first_paint(browser: Any, site: Site, path: str, user: str) -> float:
    """Return the seconds to the first paint in a browser that has nothing yet."""
    context = await browser.new_context()
    await context.add_cookies([{"name": "user", "value": user, "url": site.url}])
    page = await context.new_page()
    await page.goto(site.url + path)
    found: float = await page.evaluate(FIRST_PAINT)
    await context.close()
    return found / 1000


async def watching(site: Site) -> float:
    """Return the part of a core that a thousand live pages cost while nothing happens."""
    port = int(site.url.split(":")[2].partition("/")[0])
    writers, readers, first = [], [], []
    for number in range(WATCHERS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.write(f"GET {PREFIX}?live=1 HTTP/1.0\r\nCookie: user=user{number}\r\n\r\n".encode())
        first.append(reader.readuntil(b"\n\n"))
        readers.append(reader)
        writers.append(writer)
    for event in first:
        await event
    rest = [asyncio.create_task(reader.read()) for reader in readers]
    before = sum(os.times()[:2])
    await asyncio.sleep(WATCHED_SECONDS)
    used = sum(os.times()[:2]) - before
    for writer in writers:
        writer.close()
    await asyncio.gather(*rest, return_exceptions=True)
    return used / WATCHED_SECONDS


async def measure() -> list[Line]:
    """Measure all of it over one pool."""
    lines = []
    async with a_full_pool() as site:
        for what, path, user in (("the pool, a student's", "", "user1"), ("administration", "admin", ADMIN)):
            seconds, size = await rendering(site, path, user)
            made_of = f"{LEASES} leases, 100 in the queue; {size} KiB; {1000 * seconds:.0f} ms, of {ROUNDS}"
            lines.append(_of_time(f"{what}: to the whole page", seconds, made_of))
            paint = await painting(site, path, user)
            if paint is not None:
                made_of = f"{1000 * paint:.0f} ms in chromium, nothing cached, the server in this run"
                lines.append(_of_time(f"{what}: to the first paint", paint, made_of))
        share = await watching(site)
        words = f"processor's seconds per second, over {WATCHED_SECONDS:.0f} s, their clients included"
        lines.append(Line(f"what {WATCHERS} live pages use", share, words, 0.1, ours=share, unit="cores"))
    return lines


def _of_time(what: str, seconds: float, made_of: str) -> Line:
    return Line(what, seconds, made_of, 1.0, ours=seconds, unit="s")


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    yield from asyncio.run(measure())
