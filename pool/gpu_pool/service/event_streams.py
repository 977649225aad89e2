"""Server-sent events: what the pool or a lease is, as soon as it is something else.

One look at the pool (:class:`Snapshots`) serves all who watch, and is taken only while somebody does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from pydantic import BaseModel, TypeAdapter
from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong
from tornado.web import RequestHandler

from gpu_pool.caller import Caller
from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool.service.handler import Handler
from gpu_pool.service.heartbeats import without_remote_processes
from gpu_pool.service.lease_changes import LeaseChanges, without_end_time
from gpu_pool.service.rate_limits import ConcurrencyLimit
from gpu_pool_client import (
    DeviceStatus,
    GpuPoolError,
    Lease,
    LeaseState,
    Outlook,
    PoolStatus,
)
from gpu_pool_client._remote import bodies

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

    def __init__(
        self, pool: EmbeddedPool, changes: LeaseChanges, log: logging.Logger, limits: StreamLimits
    ) -> None:
        self.limits = limits
        self.snapshots = Snapshots(pool, changes, log)
        self._open = ConcurrencyLimit(
            limits.most,
            "You have {most} streams of events open already.",
            "Close one of them, and try again.",
        )
        self._by_user: _SnapshotByUser | None = None
        self._explaining = asyncio.Lock()
        self._rests_until = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether the service ends, and all streams with it."""
        return self.snapshots.is_stopped

    def opened(self, user: str) -> AbstractContextManager[None]:
        """Count a stream of a user's. Raises ``OverQuota`` where there are too many."""
        return self._open.one(user)

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
        if self._by_user is None or self._by_user.snapshot is not snapshot:
            self._by_user = _SnapshotByUser(snapshot)
        return self._by_user.view(caller)


class _SnapshotByUser:
    """A snapshot, its leases by user: who watches need not go through all of them, nor write the devices."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._devices = _DEVICES.dump_json(snapshot.status.devices)
        self._of: dict[str, tuple[list[Lease], list[Lease]]] = {}
        for place, leases in enumerate((snapshot.status.leases, snapshot.status.queue)):
            for lease in leases:
                self._of.setdefault(lease.holder.user, ([], []))[place].append(lease)

    def view(self, caller: Caller) -> tuple[str, bytes]:
        """Return the JSON of ``bodies.StatusBody``, and its tag."""
        status = self.snapshot.status
        of_all = status.leases, status.queue
        leases, queue = of_all if caller.is_admin else self._of.get(caller.user, ((), ()))
        parts = [self._devices, _write(caller, leases), _write(caller, queue)]
        lasting = [
            self._devices,
            _write(caller, map(without_end_time, leases)),
            _write(caller, map(without_end_time, queue)),
        ]
        tag = hashlib.blake2s(b"\0".join(lasting), digest_size=12).hexdigest()
        return tag, b'{"devices":%b,"leases":%b,"queue":%b}' % tuple(parts)


def _write(caller: Caller, leases: Iterable[Lease]) -> bytes:
    return _LEASES.dump_json(tuple(without_remote_processes(caller.shown(lease)) for lease in leases))


#: Seconds for which nothing may have been found changed, and the least between two looks.
_CHANGES_WITHIN, _REST = 15.0, 0.5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one time. A later one that differs has a greater number."""

    number: int
    status: PoolStatus


class Snapshots:
    """The last look, and those who wait for one that differs. Used in one event loop."""

    def __init__(self, pool: EmbeddedPool, changes: LeaseChanges, log: logging.Logger) -> None:
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
        essence = (
            status.devices,
            tuple(map(without_end_time, status.leases)),
            tuple(map(without_end_time, status.queue)),
        )
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
                    self._log.error("Reading the pool for event streams failed: %s", error)
                await change
                await asyncio.sleep(_REST)
        finally:
            self._looking = None


#: What a stream is called among media types.
MEDIA_TYPE: Final = "text/event-stream"
#: Milliseconds after which a client whose stream has ended comes back.
_RETRY: Final = 2_000
#: Characters of an id; a longer one is none of ours.
_LONGEST_ID: Final = 64


class StreamingHandler(RequestHandler, ABC):
    """Handlers whose answer goes on. One event of each is in memory at most: the next is the latest then."""

    caller: Caller
    _sending: asyncio.Task[None] | None = None
    _known_at = 0.0

    @property
    @abstractmethod
    def streams(self) -> EventStreams:
        """What all streams share."""

    @abstractmethod
    async def identify_again(self) -> Caller:
        """Return who the client is now. Raises the pool's errors where that cannot be known."""

    @abstractmethod
    async def wait_for_change(self, seconds: float) -> None:
        """Return when there may be something new, and after so many seconds at the latest."""

    @abstractmethod
    async def next_event(self) -> bytes | None:
        """Return the next event as it is sent; None where there is nothing new for this client."""

    @property
    def is_over(self) -> bool:
        """Whether there will be no more events."""
        return False

    async def stream(self, first: bytes = b"") -> None:
        """Send ``first``, then events as long as the client may listen, and comments where there are none."""
        self._sending = asyncio.ensure_future(self._send_all(first))
        try:
            await self._sending
        except GpuPoolError:
            pass  # the client comes back, and is told
        except (asyncio.CancelledError, StreamClosedError, TookTooLong):
            self.request.connection.stream.close()  # type: ignore[union-attr]

    def on_connection_close(self) -> None:
        """End the stream of a client that has gone. Called by tornado."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self, first: bytes) -> None:
        self.set_header("Content-Type", MEDIA_TYPE)
        self.set_header("X-Accel-Buffering", "no")
        limits, began = self.streams.limits, time.monotonic()
        self._known_at = began
        await self._send(b"retry: %d\n%b\n" % (_RETRY, first))
        while not self.is_over:
            ends = min(self._known_at + limits.comment_every, began + limits.longest)
            await self.wait_for_change(max(0.0, ends - time.monotonic()))
            is_due = self._is_due()
            # Before what they may see is read, and again before it is sent: reading it may take a while.
            if self.streams.is_stopped or not await self._is_still_known():
                return
            event = await self.next_event()
            if not await self._is_still_known():
                return
            if event is not None or is_due:
                await self._send(event or b": nothing new\n\n")
            if time.monotonic() - began >= limits.longest:
                return

    def _is_due(self) -> bool:
        return time.monotonic() - self._known_at >= self.streams.limits.comment_every

    async def _is_still_known(self) -> bool:
        """Whether the client is who it was, asked from time to time: tokens, logins and rights end."""
        if not self._is_due():
            return True
        try:
            caller = await self.identify_again()
        except GpuPoolError:
            return False
        self._known_at = time.monotonic()
        if (caller.user, caller.is_admin) != (self.caller.user, self.caller.is_admin):
            return False
        self.caller = caller
        return True

    async def _send(self, event: bytes) -> None:
        self.write(event)
        await with_timeout(self.settings["taken_within"], self.flush())


class Event(BaseModel):
    """An event of the API, as its reader sees it."""

    #: ``lease`` or ``status``.
    event: str
    id: str
    #: JSON: of a lease and why it waits, or of the pool as ``/status`` has it.
    data: str


class _ApiStream(StreamingHandler, Handler):
    """Streams of the API, whose clients say which event they have seen last."""

    @property
    def streams(self) -> EventStreams:
        """What all streams share."""
        found: EventStreams = self.settings["streams"]
        return found

    @property
    def seen(self) -> str:
        """The id of the last event that the client has."""
        return self.request.headers.get("Last-Event-ID", "")[:_LONGEST_ID]

    async def identify_again(self) -> Caller:
        """Return whose the token or the process is now."""
        return await self._identify(self.request, fresh=False)


class LeaseEvents(_ApiStream):
    """What becomes of one lease."""

    _lease: Lease | None = None
    _newer: Lease | None = None
    _outlook = b"null"

    async def get(self, lease_id: str) -> None:
        """Send the lease, and why it waits, whenever that changes; 204 if its end was seen."""
        with self.streams.opened(self.caller.user):
            lease = await self.pool.get_lease(lease_id)
            if lease.state is LeaseState.ENDED and bodies.version(lease) == self.seen:
                self.set_status(HTTPStatus.NO_CONTENT)
                self.finish()
                return
            self._id, self._version = lease_id, self.seen
            await self.stream()

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended."""
        return self._lease is not None and self._lease.state is LeaseState.ENDED

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until the lease is another than the one seen."""
        self._newer = await self.pool.changed_within(self._id, seconds, self._version)

    async def next_event(self) -> bytes | None:
        """Return the lease, and why it waits, if either is new."""
        newer, before = self._newer, self._outlook
        self._lease = lease = newer or self._lease
        if lease is None:
            return None
        self._outlook = await self._explain(lease)
        if newer is None and self._outlook in (before, b"null"):
            return None
        if newer is not None:
            self._version = bodies.version(newer)
        data = b'{"lease":%b,"outlook":%b}' % (_lease_json(lease), self._outlook)
        return _event_text("lease", self._version, data)

    async def _explain(self, lease: Lease) -> bytes:
        """Write why a lease waits, which is asked anew from time to time: how long it may take changes."""
        if lease.state is not LeaseState.WAITING:
            return b"null"
        found = await self.streams.outlook(lambda: self.pool.explain(lease.id))
        return b"null" if found is None else bodies.OUTLOOK.dump_json(found)


class PoolEvents(_ApiStream):
    """What becomes of the pool."""

    _number = 0
    _newer: Snapshot | None = None

    async def get(self) -> None:
        """Send the devices, and the leases and the queue that the caller may see, whenever they change."""
        with self.streams.opened(self.caller.user):
            await self.streams.snapshots.now()  # what cannot be read is told before the stream begins
            self._tag = self.seen
            await self.stream()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until anything has changed, seen by this client or not."""
        self._newer = await self.streams.snapshots.newer(self._number, seconds)

    async def next_event(self) -> bytes | None:
        """Return what the client may see of the pool, if that has changed."""
        if self._newer is None:
            return None
        self._number = self._newer.number
        tag, view = self.streams.view(self._newer, self.caller)
        if tag == self._tag:
            return None
        self._tag = tag
        return _event_text("status", tag, view)


def _lease_json(lease: Lease) -> bytes:
    return bodies.LEASE.dump_json(without_remote_processes(lease))


def _event_text(name: str, tag: str, data: bytes) -> bytes:
    """Write an event. JSON has no line breaks of its own."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), tag.encode(), data)
