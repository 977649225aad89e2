"""Server-sent events: what the pool or a lease is, as soon as it is something else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Final, TypeAlias

from pydantic import BaseModel
from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong

from gpu_pool.service.event_streams import EventStreams
from gpu_pool.service.handler import Handler
from gpu_pool.service.heartbeats import without_keepers
from gpu_pool_client import GpuPoolError, Lease, LeaseState
from gpu_pool_client.remote import bodies

#: Name, id and data of each event; None where there is nothing new.
Events: TypeAlias = AsyncGenerator[tuple[str, str, bytes] | None, None]

#: What a stream is called among media types.
MEDIA_TYPE: Final = "text/event-stream"
#: Milliseconds after which a client whose stream has ended comes back.
_RETRY: Final = 2_000
#: Characters of an id; a longer one is none of ours.
_LONGEST_ID: Final = 64


class Event(BaseModel):
    """An event, as its reader sees it."""

    #: ``lease`` or ``status``.
    event: str
    id: str
    #: JSON: of a lease and why it waits, or of the pool as ``/status`` has it.
    data: str


class EventStream(Handler):
    """Handlers whose answer goes on. One event of each is in memory at most: the next is the latest then."""

    _sending: asyncio.Task[None] | None = None

    @property
    def streams(self) -> EventStreams:
        """What all streams share."""
        found: EventStreams = self.settings["streams"]
        return found

    @property
    def seen(self) -> str:
        """The id of the last event that the client has."""
        return self.request.headers.get("Last-Event-ID", "")[:_LONGEST_ID]

    async def stream(self, events: Events) -> None:
        """Send events (name, id, data), and a comment for each None, as long as the client may listen."""
        self._sending = asyncio.ensure_future(self._send_all(events))
        try:
            await self._sending
        except (asyncio.CancelledError, StreamClosedError, TookTooLong):
            self.request.connection.stream.close()  # type: ignore[union-attr]

    def on_connection_close(self) -> None:
        """End the stream of a client that has gone. Called by tornado."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self, events: Events) -> None:
        async with aclosing(events):
            await self._send_each(events)

    async def _send_each(self, events: Events) -> None:
        self.set_header("Content-Type", MEDIA_TYPE)
        self.set_header("X-Accel-Buffering", "no")
        limits, began = self.streams.limits, time.monotonic()
        known_at = began
        await self._send(b"retry: %d\n\n" % _RETRY)
        async for event in events:
            if self.streams.is_stopped:
                return
            if time.monotonic() - known_at >= limits.comment_every:
                if not await self._is_still_known():
                    return
                known_at = time.monotonic()
            await self._send(b": nothing new\n\n" if event is None else _written(*event))
            if time.monotonic() - began >= limits.longest:
                return

    async def _is_still_known(self) -> bool:
        """Whether the client is still who it was: its token may have ended, and its server with it."""
        try:
            caller = await self._identify(self.request, fresh=False)
        except GpuPoolError:
            return False
        return (caller.user, caller.is_admin) == (self.caller.user, self.caller.is_admin)

    async def _send(self, event: bytes) -> None:
        self.write(event)
        await with_timeout(self.settings["taken_within"], self.flush())

    @property
    def patience(self) -> float:
        """Seconds for which to wait for the next event."""
        return min(self.streams.limits.comment_every, self.streams.limits.longest)


class LeaseEvents(EventStream):
    """What becomes of one lease."""

    async def get(self, lease_id: str) -> None:
        """Send the lease, and why it waits, whenever that changes; 204 if its end was seen."""
        with self.streams.opened(self.caller.user):
            lease = await self.desk.lease(self.caller, lease_id)
            if lease.state is LeaseState.ENDED and bodies.version(lease) == self.seen:
                self.set_status(HTTPStatus.NO_CONTENT)
                self.finish()
                return
            await self.stream(self._news(lease_id))

    async def _news(self, lease_id: str) -> Events:
        seen, lease, told = self.seen, None, b"null"
        while lease is None or lease.state is not LeaseState.ENDED:
            try:
                newer = await self.desk.watch(self.caller, lease_id, self.patience, seen)
            except GpuPoolError:
                return  # the client comes back, and is told
            before, lease = told, newer or lease
            told = await self._outlook(lease)
            if newer is not None:
                seen = bodies.version(newer)
            if lease is not None and (newer is not None or told not in (before, b"null")):
                yield "lease", seen, b'{"lease":%b,"outlook":%b}' % (_written_lease(lease), told)
            else:
                yield None

    async def _outlook(self, lease: Lease | None) -> bytes:
        """Write why a lease waits, which is asked anew from time to time: how long it may take changes."""
        if lease is None or lease.state is not LeaseState.WAITING:
            return b"null"
        found = await self.streams.outlook(lambda: self.desk.explain(self.caller, lease.id))
        return b"null" if found is None else bodies.OUTLOOK.dump_json(found)


class PoolEvents(EventStream):
    """What becomes of the pool."""

    async def get(self) -> None:
        """Send the devices, and the leases and the line that the caller may see, whenever they change."""
        with self.streams.opened(self.caller.user):
            await self.streams.snapshots.now()  # what cannot be read is told before the stream begins
            await self.stream(self._news())

    async def _news(self) -> Events:
        seen, number, snapshots = self.seen, 0, self.streams.snapshots
        due = time.monotonic() + self.patience
        while not snapshots.is_stopped:
            snapshot = await snapshots.newer(number, max(0.0, due - time.monotonic()))
            tag, view = seen, b""
            if snapshot is not None:
                number = snapshot.number
                tag, view = self.streams.view(snapshot, self.caller)
            # Much of what happens is not for this one to see, and must not keep it from being sent anything.
            if tag != seen or time.monotonic() >= due:
                yield ("status", tag, view) if tag != seen else None
                seen, due = tag, time.monotonic() + self.patience


def _written_lease(lease: Lease) -> bytes:
    return bodies.LEASE.dump_json(without_keepers(lease))


def _written(name: str, tag: str, data: bytes) -> bytes:
    """Write an event. JSON has no line breaks of its own."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), tag.encode(), data)
