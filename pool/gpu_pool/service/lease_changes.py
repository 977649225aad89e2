"""Wakes those who wait for a change of a lease.

Every waiter of an embedded pool looks at the store ten times a second. Here
one task looks for all of them: as soon as something was decided here, or has
happened by itself, such as the death of a process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from gpu_pool.pool.pool import GpuPool
from gpu_pool.pool.reconciler import rest_after
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool_client import GpuPoolError, Lease, PoolStatus, PoolUnreachable, Terms

_UNREADABLE: Final = PoolUnreachable("The pool cannot be read.", "The service's log says why.")

#: Says whether a lease as it is now (None: it has ended) is what a waiter waits for.
IsChange: TypeAlias = Callable[[Lease | None], bool]
_Waiter: TypeAlias = tuple[IsChange, asyncio.Future[bool]]


class ServiceStopping(PoolUnreachable):
    """The service stops. Whoever waits goes on to wait for the next one, or for its next start."""


class LeaseChanges:
    """Who waits for a change of which lease. Used in one event loop."""

    def __init__(
        self, pool: GpuPool, log: logging.Logger, heartbeats: Heartbeats, look_every: float = 1.0
    ) -> None:
        self._pool = pool
        self._log = log
        self._heartbeats = heartbeats
        #: Seconds between looks when nothing was decided.
        self._look_every = look_every
        #: Why the last look at the leases failed; None where it succeeded.
        self.problem: PoolUnreachable | None = None
        self._waiters: dict[str, set[_Waiter]] = {}
        self._watchers: set[asyncio.Future[bool]] = set()
        self._decided = asyncio.Event()
        self._seen: object = None
        #: Who waited when the leases were last looked at, by user; and when that was.
        self._positions: dict[str, dict[str, int]] = {}
        self._known_to_wait: frozenset[str] = frozenset()
        #: Users who had slices when it was last looked successfully.
        self._holders: frozenset[str] = frozenset()
        self._looked = -math.inf
        #: When each user last changed something, if that was after.
        self._decided_at: dict[str, float] = {}
        #: What was last said of a look that did not see everything.
        self._noted = ""
        #: Whether nobody waits any more.
        self.stopped = False

    def knows_to_wait(self, lease_id: str) -> bool:
        """Whether a lease waited when it was last looked. Where it does no more, the next look is due."""
        return lease_id in self._known_to_wait

    def holds(self, user: str) -> bool:
        """Whether a user had a slice when it was last looked."""
        return user in self._holders

    def positions(self, user: str) -> Mapping[str, int] | None:
        """Return the positions in the queue of a user's leases as of the last look.

        None where the user has changed something since, or that look failed.
        """
        if self._decided_at.get(user, -math.inf) >= self._looked:
            return None
        return self._positions.get(user, {})

    def decided(self, user: str = "") -> None:
        """Say that something was decided for a user, of whatever lease: positions depend on many."""
        self._decided_at[user] = time.monotonic()
        if self._waiters or self._watchers or self._known_to_wait:
            self._decided.set()

    async def wait(self, lease_id: str, is_change: IsChange, seconds: float) -> bool:
        """Return True when a look finds a change of the lease.

        False after so many seconds, or when the service stops: nobody has seen any. Raises what
        ``is_change`` does.
        """
        if self.stopped or seconds <= 0:
            return False
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        alarm = woken.get_loop().call_later(seconds, _wake, woken)
        waiter = is_change, woken
        self._waiters.setdefault(lease_id, set()).add(waiter)
        try:
            return await woken
        finally:
            alarm.cancel()
            self._forget(lease_id, waiter)

    async def any(self, seconds: float) -> None:
        """Return after the next look that finds any lease or device changed; else like :meth:`wait`."""
        if self.stopped or seconds <= 0:
            return
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        alarm = woken.get_loop().call_later(seconds, _wake, woken)
        self._watchers.add(woken)
        try:
            await woken
        finally:
            alarm.cancel()
            self._watchers.discard(woken)

    def stop(self) -> None:
        """Let nobody wait any more."""
        self.stopped = True
        for woken in (*self._watchers, *(woken for _, woken in self._all())):
            _wake(woken)

    async def run(self) -> None:
        """Look and wake for as long as the service runs."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(self._decided.set)

        on_change = self._pool.core.reconciler.on_change
        on_change.append(tell)
        try:
            while True:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._decided.wait(), self._look_every)
                self._decided.clear()
                began = time.monotonic()
                if await self._look(began):
                    await asyncio.sleep(rest_after(time.monotonic() - began))
        finally:
            on_change.remove(tell)

    async def _look(self, began: float) -> bool:
        """Look once, and wake whom it concerns; return whether that succeeded."""
        try:
            status = await self._pool.status()
            await self._heartbeats.end_unheard(self._pool, (*status.leases, *status.queue), began)
            if status.note and status.note != self._noted:
                self._log.error("%s", status.note)
            self._noted, self.problem = status.note, None
            self._remember(status, began)
            self._wake_waiters(status)
        except GpuPoolError as error:
            self._failed(error if isinstance(error, PoolUnreachable) else _UNREADABLE)
            self._log.error("Reading the leases failed: %s", error)
            return False
        except Exception:  # noqa: BLE001 - one broken lease must not end the service for all others
            self._failed(_UNREADABLE)
            self._log.exception("Reading the leases failed")
            return False
        return True

    def _failed(self, problem: PoolUnreachable) -> None:
        self.problem = problem
        self._known_to_wait, self._looked = frozenset(), -math.inf

    def _remember(self, status: PoolStatus, began: float) -> None:
        self._looked, self._positions = began, {}
        self._holders = frozenset(lease.holder.user for lease in status.leases)
        for lease in status.queue:
            self._positions.setdefault(lease.holder.user, {})[lease.id] = lease.position or 0
        self._known_to_wait = frozenset(lease.id for lease in status.queue)
        self._decided_at = {user: at for user, at in self._decided_at.items() if at >= began}

    def _wake_waiters(self, status: PoolStatus) -> None:
        if self._watchers:
            self._wake_watchers(status)
        now = {lease.id: lease for lease in (*status.leases, *status.queue)}
        for lease_id, waiters in self._waiters.items():
            for is_change, woken in waiters:
                _wake_if(is_change, now.get(lease_id), woken)

    def _wake_watchers(self, status: PoolStatus) -> None:
        leases = [without_end_time(lease) for lease in (*status.leases, *status.queue)]
        seen = status.devices, leases, status.prepared
        if seen != self._seen:
            self._seen = seen
            for woken in self._watchers:
                _wake(woken)

    def _all(self) -> list[_Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    def _forget(self, lease_id: str, waiter: _Waiter) -> None:
        waiters = self._waiters[lease_id]
        waiters.discard(waiter)
        if not waiters:
            del self._waiters[lease_id]


def without_end_time(lease: Lease) -> Lease:
    """Return a lease without its terms: every look works out anew, with other microseconds, when it ends."""
    return replace(lease, terms=Terms())


def _wake_if(is_change: IsChange, lease: Lease | None, woken: asyncio.Future[bool]) -> None:
    try:
        if is_change(lease):
            _wake(woken, found=True)
    except Exception as error:  # noqa: BLE001 - it belongs to who waits so, and is to keep nobody else
        if not woken.done():
            woken.set_exception(error)


def _wake(woken: asyncio.Future[bool], *, found: bool = False) -> None:
    if not woken.done():
        woken.set_result(found)
