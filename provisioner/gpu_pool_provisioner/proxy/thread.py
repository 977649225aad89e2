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
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

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
