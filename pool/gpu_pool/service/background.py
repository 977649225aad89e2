"""What the service does beside answering: it is begun again where it fails, and that is logged and told."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from gpu_pool_client import PoolUnreachable

#: Seconds after which what has failed is begun again.
_AGAIN_AFTER: Final = 1.0
#: Seconds for which it is told after that: longer than what fails at once stands still.
_TOLD_FOR: Final = 10.0


class BackgroundTasks:
    """Tasks that go on for as long as the service runs. Used in one event loop."""

    def __init__(
        self, log: logging.Logger, again_after: float = _AGAIN_AFTER, told_for: float = _TOLD_FOR
    ) -> None:
        self._log = log
        self._again_after, self._told_for = again_after, told_for
        self._tasks: list[asyncio.Task[None]] = []
        #: What failed last of what the pool needs, and when (``time.monotonic()``).
        self._failed, self._failed_at = "", -math.inf

    @property
    def problem(self) -> PoolUnreachable | None:
        """What the pool needs and has failed a moment ago; None where all goes on."""
        if time.monotonic() - self._failed_at > self._told_for:
            return None
        return PoolUnreachable(f"{self._failed} has failed.", "The service's log says why.")

    def begin(self, name: str, run: Callable[[], Awaitable[None]], *, needed: bool = True) -> None:
        """Do something until it is done, or :meth:`end`; begin it again where it fails.

        Parameters
        ----------
        name
            What it is, as the beginning of a sentence: it is logged, and told where it is needed.
        run
            Does it once.
        needed
            Whether the pool does not work without it.
        """
        self._tasks.append(asyncio.create_task(self._supervise(name, run, needed=needed)))

    async def _supervise(self, name: str, run: Callable[[], Awaitable[None]], *, needed: bool) -> None:
        while True:
            try:
                await run()
            except Exception:  # noqa: BLE001 - whatever it is, nobody else would hear of it
                self._log.exception("%s has failed, and is begun again", name)
                if needed:
                    self._failed, self._failed_at = name, time.monotonic()
            else:
                return
            await asyncio.sleep(self._again_after)

    def end(self) -> None:
        """Do nothing any more."""
        for task in self._tasks:
            task.cancel()
