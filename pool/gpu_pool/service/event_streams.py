"""Server-sent events: what a page shows, as soon as it is something else.

One look at the pool (:class:`Snapshots`) serves all who watch, and is taken only while somebody does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong
from tornado.web import RequestHandler

from gpu_pool.audit.callers import Caller
from gpu_pool.service.lease_changes import LeaseChanges, without_end_time
from gpu_pool_client import GpuPoolError, Pool, PoolStatus


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many pages are live, and for how long. Times in seconds."""

    #: Live pages of one user at once.
    most: int = 32
    #: Something is sent after so long in any case: proxies end connections that are silent. Who
    #: listens is asked for anew as often.
    comment_every: float = 15.0
    #: A stream ends after so long, and its client comes back.
    longest: float = 600.0


#: Seconds after which the pool is read anew although nothing seems to have changed.
_CHANGES_WITHIN: Final = 15.0
#: Seconds at least between two reads.
_REST: Final = 0.5


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
        essence = (
            status.devices,
            tuple(map(without_end_time, status.leases)),
            tuple(map(without_end_time, status.queue)),
            status.prepared,
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
            self._looking = asyncio.create_task(self._follow())
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

    async def _follow(self) -> None:
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


@dataclass(frozen=True, slots=True)
class EventStreams:
    """What all streams share."""

    snapshots: Snapshots
    limits: StreamLimits


#: What a stream is called among media types.
MEDIA_TYPE: Final = "text/event-stream"
#: Milliseconds after which a client whose stream has ended comes back.
_RETRY: Final = 2_000


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
        while True:
            ends = min(self._known_at + limits.comment_every, began + limits.longest)
            await self.wait_for_change(max(0.0, ends - time.monotonic()))
            is_due = self._is_due()
            # Before what they may see is read, and again before it is sent: reading it may take a while.
            if self.streams.snapshots.is_stopped or not await self._is_still_known():
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
