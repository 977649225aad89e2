"""Where a server's proxies live: one thread with an event loop, beside the server's own.

A server that does much at once does not hold up its kernels' messages here,
and no proxy holds up the server. A blocking ``KernelManager`` needs the thread,
since its own loop stands still between its calls.

Heartbeats have a thread of their own: a frontend that hears nothing for a
second takes the kernel for dead, and to start one may take longer.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from traitlets.log import get_logger

from gpu_pool_client import Process

T = TypeVar("T")


async def on_proxy_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the thread of this process's proxies and return what it returns.

    Work that is no longer waited for is cancelled.
    """
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, proxy_loop()))


def proxy_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's proxies, which runs on a thread of its own."""
    return _loop("proxies", os.getpid())


def heartbeat_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's heartbeats, on which nothing else is done."""
    return _loop("heartbeats", os.getpid())


@functools.cache
def _loop(name: str, pid: int) -> asyncio.AbstractEventLoop:
    """Start the thread at the first use in a process: a forked child does not inherit it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"gpu-pool-{name}-{pid}", daemon=True).start()
    return loop


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
