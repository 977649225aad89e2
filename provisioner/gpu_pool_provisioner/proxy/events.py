"""What the proxies of a server wait for: processes that end, and the first of several events.

They live on the background loop of their process. Heartbeats have a loop of their own: a frontend that
hears nothing for a second takes the kernel for dead, and to start one may take longer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from gpu_pool_client import Process
from gpu_pool_client._log import get_logger

T = TypeVar("T")

#: Seconds between looks where the system offers no pidfd.
_LOOK_EVERY: Final = 0.5


async def ended(pid: int) -> None:
    """Return once the process has ended. It need not be a child; a zombie has ended."""
    process = Process.of(pid)
    if process is None:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while process.is_alive():  # noqa: ASYNC110 - this system tells nobody
            await asyncio.sleep(_LOOK_EVERY)
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def kill_group(pid: int) -> None:
    """Kill a kernel and what it has started: it leads its own process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        get_logger().debug("Process group %d was gone already.", pid)


async def first_of(*events: Coroutine[Any, Any, object]) -> None:
    """Return when the first of several coroutines has returned; cancel the others."""
    tasks = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def before(end: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns, or None if ``end`` is done before that."""
    task = asyncio.create_task(work)
    whatever_first: set[asyncio.Future[Any]] = {end, task}
    try:
        await asyncio.wait(whatever_first, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() and not end.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
