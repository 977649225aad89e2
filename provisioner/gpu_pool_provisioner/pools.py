"""The pools of this process, and the queues in front of them, watched for all of its kernels at once."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Lease,
    LeaseGone,
    OverQuota,
    Pool,
    PoolUnreachable,
    connect,
    format_duration,
)
from gpu_pool_client._retries import Backoff

T = TypeVar("T")

#: What a pool raises about a lease that there is where it cannot answer now: it is away, or its user
#: has asked it too much within a minute. (Of a request for a lease, ``OverQuota`` is the answer.)
NOT_NOW: Final = (PoolUnreachable, OverQuota)
#: Seconds between two looks; a grant is noticed that late at most, and at once for the first in the queue.
_LOOK_EVERY: Final = 1.0
#: Seconds to leave a pool alone that cannot answer now, and one that has failed for long.
RETRY_EVERY, _SELDOM = 2.0, 30.0

#: The open pools, by URL and process: a forked child must not use its parent's.
open_pools: Final[dict[tuple[str, int], Pool]] = {}


def shared_pool(url: str) -> Pool:
    """Return this process's pool for ``url``, opened at the first call and open until the process ends.

    Raises what :func:`gpu_pool_client.connect` raises; a failure is not remembered.
    """
    key = url, os.getpid()
    if key not in open_pools:
        open_pools[key] = connect(url)
    return open_pools[key]


async def retry(
    ask: Callable[[], Awaitable[T]],
    tell: Callable[[Exception], None],
    limit: float | None = None,
    *,
    has_kernel: bool = False,
) -> T:
    """Ask a pool until it answers; ``tell`` why it does not. What else it raises is raised.

    With a ``limit``, ``PoolUnreachable`` is raised once it has been away for so many seconds. Of a lease that
    ``has_kernel`` only ``LeaseGone`` and ``BadRequest`` are: no other error is to end a kernel, whatever it
    is. One that lasts is met more and more seldom.
    """
    loop = asyncio.get_running_loop()
    began, pauses = loop.time(), Backoff(RETRY_EVERY, _SELDOM)
    while True:
        try:
            return await ask()
        except Exception as error:
            is_away = isinstance(error, NOT_NOW)
            if not is_away and (not has_kernel or isinstance(error, (LeaseGone, BadRequest))):
                raise
            is_over = limit is not None and loop.time() >= began + limit
            if is_over and isinstance(error, PoolUnreachable):
                waited = f"This kernel has waited for it for {format_duration(limit or 0.0)}."
                raise PoolUnreachable(f"{error.message} {waited}", error.remedy) from error
            tell(error)
            if is_away:
                pauses.reset()
        await pauses.wait()


def words_of(error: Exception) -> str:
    """Return what a pool has answered, or a fault of ours, in a sentence."""
    return error.message if isinstance(error, GpuPoolError) else f"{type(error).__name__}: {error}."


class QueueWatch:
    """Everybody of one event loop who waits for the same pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        #: What each lease's kernel is told: its position, or why that is not known; and what tells that it
        #: has left the queue.
        self._told: dict[str, Callable[[int | None, GpuPoolError | None], None]] = {}
        self._left: dict[str, asyncio.Event] = {}
        self._positions: dict[str, int] = {}
        self._watching: asyncio.Task[None] | None = None
        #: Waits on behalf of one of them, so that the pool does what is due in its queue meanwhile.
        #: It goes on from one look to the next, and ends when that one leaves the queue.
        self._delegate: asyncio.Task[Lease] | None = None

    async def follow(self, lease_id: str, tell: Callable[[int | None, GpuPoolError | None], None]) -> None:
        """Return once a lease is no longer in the queue: held, or gone; ``tell`` meanwhile where it is."""
        left = asyncio.Event()
        self._told[lease_id], self._left[lease_id] = tell, left
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            await left.wait()
        finally:
            if self._left.get(lease_id) is left:
                self._forget(lease_id)

    def _forget(self, lease_id: str) -> None:
        del self._told[lease_id], self._left[lease_id]
        self._positions.pop(lease_id, None)

    async def _watch(self) -> None:
        try:
            while self._told and (pool := self._pool()) is not None:
                await self._tell_positions(pool)
        finally:
            # Should this have failed, each of them asks the pool itself, and hears what is wrong.
            for left in self._left.values():
                left.set()

    async def _tell_positions(self, pool: Pool) -> None:
        try:
            await self._wait_a_while(pool)
            # Of who joins the queue while the answer is under way, it says nothing.
            asked = dict(self._left)
            positions = await pool.positions()
        except GpuPoolError as error:
            for tell in list(self._told.values()):
                tell(None, error)
            await asyncio.sleep(RETRY_EVERY)
            return
        for lease_id, left in asked.items():
            if self._left.get(lease_id) is not left:
                continue
            if lease_id in positions:
                self._positions[lease_id] = positions[lease_id]
                self._told[lease_id](positions[lease_id], None)
            else:
                self._forget(lease_id)
                left.set()

    async def _wait_a_while(self, pool: Pool) -> None:
        """Return after a second, or when the delegate has left the queue."""
        if self._delegate is None:
            first = min(self._told, key=lambda lease_id: self._positions.get(lease_id, 0))
            self._delegate = asyncio.create_task(pool.wait(first))
            self._delegate.add_done_callback(_note_error)
        await asyncio.wait({self._delegate}, timeout=_LOOK_EVERY)
        if self._delegate.done():
            delegate, self._delegate = self._delegate, None
            with suppress(LeaseGone, BadRequest):
                delegate.result()


def _note_error(task: asyncio.Task[Lease]) -> None:
    """Take note of a task's error, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


#: One for each pool, and so for all kernels of this process that wait for it.
_watches: Final[weakref.WeakKeyDictionary[Pool, QueueWatch]] = weakref.WeakKeyDictionary()


def queue_watch_of(pool: Pool) -> QueueWatch:
    """Return the queue in front of a pool, as seen from the one event loop on which sessions live."""
    return _watches.setdefault(pool, QueueWatch(pool))
