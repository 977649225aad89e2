"""One look at the pool for all who watch it, taken only while somebody does."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool_client import GpuPoolError, Lease, Pool, PoolStatus, Terms

#: Seconds for which nothing may have been found changed, and the least between two looks.
_CHANGES_WITHIN, _REST = 15.0, 0.5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one time. A later one that differs has a greater number."""

    number: int
    status: PoolStatus


class Snapshots:
    """The last look, and those who wait for one that differs. Used in one event loop."""

    def __init__(self, pool: Pool, changes: LeaseChanges, log: logging.Logger) -> None:
        self._pool = pool
        self._changes = changes
        self._log = log
        self._last: Snapshot | None = None
        self._essence: object = None
        self._changed = asyncio.Event()
        self._next: asyncio.Task[Snapshot] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self.is_stopped = False

    async def now(self) -> Snapshot:
        """Return what is there now. Whoever asks while a look is taken shares the next one."""
        if self._next is None:
            self._next = asyncio.create_task(self._take())
        return await asyncio.shield(self._next)

    async def _take(self) -> Snapshot:
        async with self._one_at_a_time:
            self._next = None  # what happens from here on may not be seen by this look
            status = await self._pool.status()
        essence = status.devices, tuple(map(_lasting, status.leases)), tuple(map(_lasting, status.queue))
        if self._last is None or essence != self._essence:
            self._last = Snapshot(self._last.number + 1 if self._last else 1, status)
            self._essence = essence
            self._changed.set()
            self._changed = asyncio.Event()
        return self._last

    async def newer(self, number: int, seconds: float) -> Snapshot | None:
        """Return the first snapshot after that one; None if there is none in so many seconds."""
        if self._last is not None and self._last.number > number:
            return self._last
        if self.is_stopped:
            return None
        self._watchers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except asyncio.TimeoutError:
            return None
        finally:
            self._watchers -= 1
        return self._last

    def stop(self) -> None:
        """Let nobody wait any more."""
        self.is_stopped = True
        self._changed.set()

    async def _look(self) -> None:
        """Look whenever something has changed, as long as somebody watches."""
        try:
            while self._watchers and not self.is_stopped:
                # Listened to from before the look on, so that nothing falls between the two.
                change = asyncio.create_task(self._changes.any(_CHANGES_WITHIN))
                try:
                    await self.now()
                except GpuPoolError as error:
                    self._log.error("Looking at the pool for the dashboard failed: %s", error)
                await change
                await asyncio.sleep(_REST)
        finally:
            self._looking = None


def _lasting(lease: Lease) -> Lease:
    """Return a lease without what is computed anew at every look, and differs by microseconds."""
    return replace(lease, terms=Terms())
