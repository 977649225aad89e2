"""Pools, devices and processes for tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar, overload

from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, Holder, Pool, Process, parse_request

V100 = Device("SIM-V100", 0, "V100-SXM2-32GB", 32768, driver="550.54.14", simulated=True)
ME = Holder("ada")

Seen = TypeVar("Seen")


def device(index: int, model: str = "V100-SXM2-32GB", memory_mib: int = 32768, **facts: object) -> Device:
    """Return a simulated device; equal arguments give the same device."""
    return Device(f"SIM-{model}-{index}", index, model, memory_mib, simulated=True, **facts)  # type: ignore[arg-type]


def embedded(path: Path, *devices: Device, **settings: Any) -> GpuPool:
    """Return an embedded pool over these devices (one V100 by default)."""
    inventory = Inventory(devices or (V100,), "test")
    return local_pool(path, PoolSettings(**settings), lambda: inventory)


async def take(pool: Pool, text: str, key: str, holder: Holder = ME) -> str:
    """Ask for a slice and return the lease's id."""
    return (await pool.request(parse_request(text), holder, key)).id


@overload
async def eventually(
    look: Callable[[], Awaitable[Seen]], that: Callable[[Seen], object] = ..., *, within: float = ...
) -> Seen: ...
@overload
async def eventually(
    look: Callable[[], Seen], that: Callable[[Seen], object] = ..., *, within: float = ...
) -> Seen: ...
async def eventually(
    look: Callable[[], Any], that: Callable[[Any], object] = bool, *, within: float = 120.0
) -> Any:
    """Return what is seen, at once or awaited, as soon as that holds of it; fail if it does not in time."""
    pauses = _pauses(within)
    while True:
        seen = look()
        if isawaitable(seen):
            seen = await seen
        if that(seen):
            return seen
        pause = next(pauses, None)
        assert pause is not None, f"{look} did not come true in {within} s: {seen!r}"
        await asyncio.sleep(pause)


def _pauses(within: float) -> Iterator[float]:
    """Yield how long to pause between looks, for so many seconds: the longer it lasts, the more seldom."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < within:
        yield min(0.01 + waited / 20, 0.1)


def key() -> str:
    """Return a key of a request that nobody else has."""
    return uuid.uuid4().hex


async def held_milli(pool: Pool) -> int:
    """Return how much of all devices is held, in thousandths of one."""
    return sum(device.held_milli for device in (await pool.status()).devices)


#: A process whose first thread ends while another one goes on, and says so.
ENDS_ITS_FIRST_THREAD = """
import ctypes, os, platform, sys, threading
def go_on():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("alone", flush=True)
    sys.stdin.read()
threading.Thread(target=go_on).start()
# SYS_exit, which ends the thread alone.
ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
"""


@contextmanager
def running(code: str = "import sys; sys.stdin.read()") -> Iterator[subprocess.Popen[str]]:
    """Run a Python process, by default one that lives until its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def identity(process: subprocess.Popen[str]) -> Process:
    """Identify a process that was just started."""
    found = Process.of(process.pid)
    assert found is not None
    return found
