"""What the pool has free, and how long those in line wait: asked once for all who open the spawn page."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from traitlets.log import get_logger

from gpu_pool_client import DeviceStatus, GpuPoolError, Lease, Pool, PoolStatus, connect

#: Seconds for which an answer is good enough for somebody who chooses.
_FRESH: Final = 2.0
#: Seconds in which the pool answers, or the page says that it does not.
_WITHIN: Final = 3.0
#: Courses in line whose wait is asked for.
_MOST_ASKED: Final = 32


@dataclass(frozen=True, slots=True)
class Supply:
    """What a pool said of itself."""

    devices: tuple[DeviceStatus, ...] = ()
    #: By course, the wait in words (``about 4 to 9 min``) of the last in line. Those of other
    #: courses are seen by the pool's administrators only.
    waits: Mapping[str | None, str] = field(default_factory=dict)
    #: How many wait, as far as this process sees them.
    waiting: int = 0

    @property
    def simulated(self) -> bool:
        """Whether any device is simulated."""
        return any(status.device.simulated for status in self.devices)


class PoolView:
    """A pool as the Hub sees it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: Pool | None = None
        self._answer: asyncio.Task[Supply | None] | None = None
        self._asked_at = 0.0

    async def look(self) -> Supply | None:
        """Return what the pool has; None if it does not answer."""
        if self._answer is None or (self._answer.done() and time.monotonic() - self._asked_at > _FRESH):
            self._asked_at = time.monotonic()
            self._answer = asyncio.create_task(self._ask())
        # Whoever closes the page does not end it for the others.
        return await asyncio.shield(self._answer)

    async def _ask(self) -> Supply | None:
        try:
            return await asyncio.wait_for(self._read(), _WITHIN)
        except asyncio.TimeoutError:
            get_logger().warning("The pool at %s does not answer within %d s.", self._url, _WITHIN)
        except GpuPoolError as error:
            get_logger().warning("The pool at %s cannot be asked: %s", self._url, error)
        return None

    async def _read(self) -> Supply:
        if self._pool is None:
            self._pool = connect(self._url)
        status = await self._pool.status()
        return Supply(status.devices, await self._waits(self._pool, status), len(status.line))

    async def _waits(self, pool: Pool, status: PoolStatus) -> dict[str | None, str]:
        last = {lease.holder.course: lease for lease in status.line}
        asked = list(last.values())[:_MOST_ASKED]
        words = await asyncio.gather(*(_wait(pool, lease) for lease in asked))
        return {lease.holder.course: said for lease, said in zip(asked, words, strict=True)}


async def _wait(pool: Pool, lease: Lease) -> str:
    """Return the wait of one in line, in words; none where it is not known."""
    with suppress(GpuPoolError):  # its turn may have come meanwhile
        return (await pool.explain(lease.id)).expected
    return ""


@functools.cache
def view_of(url: str) -> PoolView:
    """Return this process's view of the pool at ``url``; all spawners share it."""
    return PoolView(url)
