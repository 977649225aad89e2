"""Event loops in threads of their own, for what is served to a test while it does something else."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until it is ended."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Do something there, and return what comes of it."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(60)

    def end(self) -> None:
        """Stop once every connection there is closed.

        One that was cut off in the middle still says goodbye, and aiohttp does not wait for it.
        """
        while len(self._selector.get_map()) > 1:  # the loop's own pipe is always there
            time.sleep(0.01)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
