"""The background loop: an event loop of this process on a thread of its own.

A server that does much at once does not hold up what is done there, and nothing done there holds up the
server. A blocking ``KernelManager`` needs it, since its own loop stands still between its calls.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Seconds after which a loop that waits looks by itself whether it has been answered. One that was made
#: before a fork shares the pipe that wakes it with its parent and siblings, any of whom may empty it.
_AWAKE_EVERY: Final = 0.5

#: Of the process, as the loops are.
_starting = threading.Lock()
# A forked child could otherwise find it taken for ever.
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on this process's background loop and return what it returns.

    Work that is no longer waited for is cancelled.
    """
    answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))
    try:
        while not answer.done():
            await asyncio.wait({answer}, timeout=_AWAKE_EVERY)
    except asyncio.CancelledError:
        answer.cancel()
        raise
    return answer.result()


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
