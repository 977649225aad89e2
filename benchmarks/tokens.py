"""A user's requests while others send made-up tokens, about each of which a real JupyterHub is asked."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.report import Line
from benchmarks.rush import serving
from benchmarks.sizes import sized
from support.hub import HubService

ATTACKERS, REQUESTS = sized((2_000, 30), (100, 10))


async def attack(behind: HubService) -> None:
    """Send one made-up token after the other, a second apart, for as long as this is not cancelled."""
    while True:
        with suppress(OSError):
            await behind.ask(secrets.token_hex(16), "GET", "/status")
        await asyncio.sleep(1)  # all clients share a processor with the user whose time is taken


async def times(behind: HubService, token: str) -> list[float]:
    """Return the seconds that each of a user's requests takes, the Hub being asked anew for each."""
    found = []
    for _ in range(REQUESTS):
        began = time.monotonic()
        status, _ = await behind.ask(token, "DELETE", "/leases/1-0")
        found.append(time.monotonic() - began)
        assert status == 200
    return found


async def measure() -> tuple[list[float], list[float]]:
    """Return the times without an attack, and under one."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), "c.ServeApp.max_decisions = 100_000\n") as behind:
            token = await behind.hub.token("ada")
            quiet = await times(behind, token)
            attackers = [asyncio.create_task(attack(behind)) for _ in range(ATTACKERS)]
            await asyncio.sleep(3)
            try:
                under_attack = await times(behind, token)
            finally:
                for each in attackers:
                    each.cancel()
                await asyncio.gather(*attackers, return_exceptions=True)
    return quiet, under_attack


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    quiet, under_attack = asyncio.run(measure())
    least, middle = statistics.median(quiet), statistics.median(under_attack)
    yield Line(
        f"a user's request while {ATTACKERS} clients send made-up tokens, to without them",
        middle / least,
        f"medians of {REQUESTS}; the slowest {max(under_attack) * 1e3:.0f} ms",
        ours=middle * 1e3,
        yardstick=least * 1e3,
        unit="ms",
    )
