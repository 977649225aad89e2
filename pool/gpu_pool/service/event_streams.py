"""Streams of server-sent events that are open, and what everybody may see of the pool."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from gpu_pool.service.callers import Caller
from gpu_pool.service.heartbeats import without_keepers
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.snapshots import Snapshot, Snapshots
from gpu_pool_client import DeviceStatus, GpuPoolError, Lease, Outlook, OverQuota, Pool
from gpu_pool_client.remote import bodies
from gpu_pool_client.terms import Terms

_DEVICES: Final = TypeAdapter(tuple[DeviceStatus, ...])
_LEASES: Final = TypeAdapter(tuple[bodies.WireLease, ...])
#: Seconds within which it has to be said why a lease waits, and the rest after saying it, in times
#: of what that took.
_EXPLAINED_WITHIN, _REST_TIMES = 2.0, 9.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many streams there are, and for how long. Times in seconds."""

    #: Streams of one user at once.
    most: int = 32
    #: Something is sent after so long in any case: proxies end connections that are silent. Who
    #: listens is asked for anew as often.
    comment_every: float = 15.0
    #: A stream ends after so long, and its client comes back.
    longest: float = 600.0


class EventStreams:
    """Counts open streams, and looks at the pool once for all of them. Used in one event loop."""

    def __init__(self, pool: Pool, changes: LeaseChanges, log: logging.Logger, limits: StreamLimits) -> None:
        self.limits = limits
        self.snapshots = Snapshots(pool, changes, log)
        self._open: Counter[str] = Counter()
        self._cast: _Cast | None = None
        self._explaining = asyncio.Lock()
        self._rests_until = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether the service ends, and all streams with it."""
        return self.snapshots.is_stopped

    @contextmanager
    def opened(self, user: str) -> Iterator[None]:
        """Count a stream of a user's. Raises ``OverQuota`` where there are too many."""
        if self._open[user] >= self.limits.most:
            raise OverQuota(
                f"You have {self.limits.most} streams of events open already.",
                "Close one of them, and try again.",
            )
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            self._open += Counter()  # forgets those who have none

    async def outlook(self, explain: Callable[[], Awaitable[Outlook]]) -> Outlook | None:
        """Return why a lease waits; None where that cannot be said soon.

        To say it is much work where many wait, who then all ask at once: it is
        done for one after the other, and most of the time for nobody.
        """
        try:
            return await asyncio.wait_for(self._explain(explain), _EXPLAINED_WITHIN)
        except (asyncio.TimeoutError, GpuPoolError):
            return None

    async def _explain(self, explain: Callable[[], Awaitable[Outlook]]) -> Outlook:
        async with self._explaining:
            await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
            began = time.monotonic()
            try:
                return await explain()
            finally:
                ended = time.monotonic()
                # No more than it may take: it may have stood still with its machine.
                self._rests_until = ended + _REST_TIMES * min(ended - began, _EXPLAINED_WITHIN)

    def stop(self) -> None:
        """End all streams: clients come back once the service runs again."""
        self.snapshots.stop()

    def view(self, snapshot: Snapshot, caller: Caller) -> tuple[str, bytes]:
        """Return what a caller may see of the pool, and a tag that differs as soon as that does."""
        if self._cast is None or self._cast.snapshot is not snapshot:
            self._cast = _Cast(snapshot)
        return self._cast.view(caller)


class _Cast:
    """A snapshot, its leases by user: who watches need not go through all of them, nor write the devices."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._devices = _DEVICES.dump_json(snapshot.status.devices)
        self._of: dict[str, tuple[list[Lease], list[Lease]]] = {}
        for place, leases in enumerate((snapshot.status.leases, snapshot.status.queue)):
            for lease in leases:
                self._of.setdefault(lease.holder.user, ([], []))[place].append(lease)

    def view(self, caller: Caller) -> tuple[str, bytes]:
        """Return the JSON of ``wire.Status``, and its tag."""
        status = self.snapshot.status
        of_all = status.leases, status.queue
        leases, line = of_all if caller.is_admin else self._of.get(caller.user, ((), ()))
        parts = [self._devices, _write(caller, leases), _write(caller, line)]
        # When a lease ends is reckoned anew, and so a little differently, by every look.
        lasting = [self._devices, _write(caller, _lasting(leases)), _write(caller, _lasting(line))]
        tag = hashlib.blake2s(b"\0".join(lasting), digest_size=12).hexdigest()
        return tag, b'{"devices":%b,"leases":%b,"queue":%b}' % tuple(parts)


def _write(caller: Caller, leases: Sequence[Lease]) -> bytes:
    return _LEASES.dump_json(tuple(without_keepers(caller.shown(lease)) for lease in leases))


def _lasting(leases: Sequence[Lease]) -> list[Lease]:
    return [replace(lease, terms=Terms()) for lease in leases]
