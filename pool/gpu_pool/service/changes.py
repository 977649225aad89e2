"""Wakes those who wait for news of a lease.

Every waiter of an embedded pool looks at the ledger ten times a second. Here
one task looks for all of them: as soon as something was decided here, and once
a second to find what happened by itself, such as the death of a process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool_client import GpuPoolError, Lease, Pool, PoolStatus
from gpu_pool_client.terms import Terms

#: Seconds between looks when nothing was decided.
_LOOK_EVERY: Final = 1.0
#: Rest after a look, in seconds and in times of what the look took: many decisions are looked at once.
_LEAST_REST, _REST_TIMES = 0.02, 4.0

#: Says whether a lease as it is now (None: it has ended) is news to a waiter.
IsNews: TypeAlias = Callable[[Lease | None], bool]
_Waiter: TypeAlias = tuple[IsNews, asyncio.Future[None]]


class Changes:
    """Who waits for news of which lease. Used in one event loop."""

    def __init__(self, pool: Pool, log: logging.Logger, heartbeats: Heartbeats) -> None:
        self._pool = pool
        self._log = log
        self._heartbeats = heartbeats
        #: Whether the last look at the leases succeeded.
        self.healthy = True
        self._waiters: dict[str, set[_Waiter]] = {}
        self._watchers: set[asyncio.Future[None]] = set()
        self._decided = asyncio.Event()
        self._seen: object = None
        self._stopped = False

    def decided(self) -> None:
        """Say that something was decided, of whatever lease: a place in line depends on many."""
        if self._waiters or self._watchers:
            self._decided.set()

    async def wait(self, lease_id: str, is_news: IsNews, seconds: float) -> None:
        """Return when a look finds news of the lease, after so many seconds, or when the service stops."""
        if self._stopped or seconds <= 0:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = news.get_loop().call_later(seconds, _wake, news)
        waiter = is_news, news
        self._waiters.setdefault(lease_id, set()).add(waiter)
        try:
            await news
        finally:
            alarm.cancel()
            self._forget(lease_id, waiter)

    async def any(self, seconds: float) -> None:
        """Return after the next look that finds any lease or device changed; else like :meth:`wait`."""
        if self._stopped or seconds <= 0:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = news.get_loop().call_later(seconds, _wake, news)
        self._watchers.add(news)
        try:
            await news
        finally:
            alarm.cancel()
            self._watchers.discard(news)

    def stop(self) -> None:
        """Let nobody wait any more."""
        self._stopped = True
        for news in (*self._watchers, *(news for _, news in self._all())):
            _wake(news)

    async def run(self) -> None:
        """Look and wake for as long as the service runs."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._decided.wait(), _LOOK_EVERY)
            self._decided.clear()
            began = time.monotonic()
            try:
                status = await self._pool.status()
                await self._heartbeats.look(self._pool, (*status.leases, *status.line), began)
            except GpuPoolError as error:
                self.healthy = False
                self._log.error("Looking at the leases failed: %s", error)
                continue
            except Exception:  # noqa: BLE001 - one broken lease must not end the service for all others
                self.healthy = False
                self._log.exception("Looking at the leases failed")
                continue
            self.healthy = True
            self._tell(status)
            await asyncio.sleep(max(_LEAST_REST, _REST_TIMES * (time.monotonic() - began)))

    def _tell(self, status: PoolStatus) -> None:
        if self._watchers:
            self._tell_watchers(status)
        now = {lease.id: lease for lease in (*status.leases, *status.line)}
        for lease_id, waiters in self._waiters.items():
            for is_news, news in waiters:
                if is_news(now.get(lease_id)):
                    _wake(news)

    def _tell_watchers(self, status: PoolStatus) -> None:
        # The time of a lease's end is reckoned anew, and so a little differently, by every look.
        leases = [replace(lease, terms=Terms()) for lease in (*status.leases, *status.line)]
        seen = status.devices, leases
        if seen != self._seen:
            self._seen = seen
            for news in self._watchers:
                _wake(news)

    def _all(self) -> list[_Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    def _forget(self, lease_id: str, waiter: _Waiter) -> None:
        waiters = self._waiters[lease_id]
        waiters.discard(waiter)
        if not waiters:
            del self._waiters[lease_id]


def _wake(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
