"""The queue in front of a pool, watched once for all proxies that wait in it.

A look costs a few milliseconds with hundreds in the queue. Were every proxy to look
for itself, two hundred of them would keep a core busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator
from typing import Final

from gpu_pool_client import BadRequest, GpuPoolError, Lease, LeaseGone, Pool
from gpu_pool_provisioner.outages import NOT_NOW, RETRY_EVERY

#: Seconds between two looks; a grant is noticed that late at most, and at once for the first in the queue.
_LOOK_EVERY: Final = 1.0


class QueueEntry:
    """How one lease waits in the queue."""

    def __init__(self) -> None:
        #: Its place when it was last seen, 1 for the next; None before the first look.
        self.position: int | None = None
        #: Why nothing is known at the moment.
        self.fault: GpuPoolError | None = None
        self._left = asyncio.Event()

    @property
    def left(self) -> bool:
        """Whether it is no longer in the queue: held, or gone."""
        return self._left.is_set()

    def leave(self) -> None:
        """Note that it is no longer in the queue."""
        self._left.set()

    async def until_left(self, seconds: float) -> None:
        """Return when it has left the queue, or after so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._left.wait(), seconds)


class QueueWatch:
    """Everybody of one event loop who waits for the same pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._standings: dict[str, QueueEntry] = {}
        self._watching: asyncio.Task[None] | None = None
        #: Waits in the name of one of them, so that the pool does what is due in its queue meanwhile.
        #: It goes on from one look to the next, and ends when that one leaves the queue.
        self._delegate: asyncio.Task[Lease] | None = None

    @contextlib.contextmanager
    def standing(self, lease_id: str) -> Iterator[QueueEntry]:
        """Watch a lease for as long as the context lasts."""
        standing = self._standings[lease_id] = QueueEntry()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield standing
        finally:
            self._standings.pop(lease_id, None)

    async def _watch(self) -> None:
        try:
            while self._standings and (pool := self._pool()) is not None:
                await self._look(pool)
        finally:
            # Should this have failed, each of them asks the pool itself, and hears what is wrong.
            for standing in self._standings.values():
                standing.leave()

    async def _look(self, pool: Pool) -> None:
        try:
            await self._wait_a_while(pool)
            # Of who joins the queue while the answer is under way, it says nothing.
            asked = list(self._standings.items())
            places = await pool.positions()
        except NOT_NOW as error:
            for standing in self._standings.values():
                standing.fault = error
            await asyncio.sleep(RETRY_EVERY)
            return
        for lease_id, standing in asked:
            standing.position, standing.fault = places.get(lease_id), None
            if standing.position is None:
                standing.leave()
                if self._standings.get(lease_id) is standing:
                    del self._standings[lease_id]

    async def _wait_a_while(self, pool: Pool) -> None:
        """Return after a second, or when the delegate has left the queue."""
        if self._delegate is None:
            first = min(self._standings, key=lambda lease_id: self._standings[lease_id].position or 0)
            self._delegate = asyncio.create_task(pool.wait(first))
            self._delegate.add_done_callback(noticed)
        await asyncio.wait({self._delegate}, timeout=_LOOK_EVERY)
        if self._delegate.done():
            delegate, self._delegate = self._delegate, None
            with contextlib.suppress(LeaseGone, BadRequest):
                delegate.result()


def noticed(task: asyncio.Task[Lease]) -> None:
    """Take note of a task's error, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


_LINES: weakref.WeakKeyDictionary[Pool, QueueWatch] = weakref.WeakKeyDictionary()


def queue_watch_of(pool: Pool) -> QueueWatch:
    """Return the queue in front of a pool, as seen from the one event loop on which proxies live."""
    return _LINES.setdefault(pool, QueueWatch(pool))
