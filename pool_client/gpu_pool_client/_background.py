"""The event loop that this process has beside its own: work there goes on whatever becomes of its asker.

A server that does much at once does not hold up what is done here, and nothing done here holds up the
server. A blocking ``KernelManager`` needs it, since its own loop stands still between its calls.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_starting = threading.Lock()
# A forked child could otherwise find it taken for ever.
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on this process's background loop and return what it returns.

    Work that is no longer waited for is cancelled.
    """
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))


def background_loop(name: str = "background") -> asyncio.AbstractEventLoop:
    """Return an event loop of this process that runs on a thread of its own, the same for the same name.

    It is started at the first use: a forked child has none of its parent's.
    """
    with _starting:
        return _loop(name, os.getpid())


@functools.cache
def _loop(name: str, pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"gpu-pool-{name}-{pid}", daemon=True).start()
    return loop
