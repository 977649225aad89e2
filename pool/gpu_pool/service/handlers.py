"""What answers at the addresses of ``routes``. Handlers read and write JSON, and know no rule of the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

from tornado.web import Finish, HTTPError

from gpu_pool.service.connections import admit
from gpu_pool.service.handler import Handler
from gpu_pool.service.heartbeats import without_remote_processes
from gpu_pool.service.hub import HubUnreachable
from gpu_pool.service.rate_limits import spread
from gpu_pool_client import BadRequest, EndReason, NotAllowed, PoolUnreachable
from gpu_pool_client._remote import bodies

T = TypeVar("T")


class Polling(Handler):
    """Handlers that may wait for a change, for as long as their client does."""

    _poll: asyncio.Future[Any] | None = None

    async def poll(self, answer: Awaitable[T]) -> T:
        """Wait for an answer, and no longer than the client stays."""
        poll = asyncio.ensure_future(answer)
        self._poll, began = poll, time.monotonic()
        try:
            found = await poll
        except asyncio.CancelledError:
            raise Finish from None
        if time.monotonic() - began > self.settings["streams"].limits.comment_every:
            # Their token may have ended meanwhile. Whoever cannot be known now was known before.
            with suppress(HubUnreachable):
                await self._identify(self.request, fresh=False)
        return found

    def on_connection_close(self) -> None:
        """End the wait of a client that has gone. Called by tornado."""
        if self._poll is not None:
            self._poll.cancel()

    def unchanged(self, status: HTTPStatus) -> None:
        """Say that nothing has changed yet: ask again."""
        self.set_status(status)
        self.finish()

    @property
    def seconds(self) -> float:
        """For how long to wait at most."""
        return min(max(self.number("seconds"), 0.0), bodies.LONGEST_POLL)


class HealthHandler(Handler):
    """Whether the pool works. Asked by anybody; what is wrong is told to those who are known."""

    _is_known = False

    async def prepare(self) -> None:
        """Find out who asks, if they can be known. Called by tornado."""
        with suppress(NotAllowed, HubUnreachable):
            await super().prepare()
            self._is_known = True

    async def get(self) -> None:
        """Say whether the pool works: its store can be read and written."""
        problem = await self.pool.health.problem()
        if problem is not None:
            raise problem if self._is_known else PoolUnreachable("The pool is not working.")
        await self.answer(b'{"status":"ok"}')


class DescriptionHandler(Handler):
    """The description of all addresses. Asked by anybody."""

    async def prepare(self) -> None:
        """Ask nobody who they are. Called by tornado."""

    async def get(self) -> None:
        """Return this description (OpenAPI 3.1)."""
        await self.answer(self.application.settings["description"])


class HeartbeatHandler(Handler):
    """The sign of life of a process whose leases end without it."""

    async def prepare(self) -> None:
        """Find out who asks; where nobody could be known, hold it against nobody. Called by tornado.

        The question about one token may fail by its owner's doing, and so excuses only them.
        """
        try:
            self.caller = await self._identify(self.request, fresh=False)
            admit(self.request, self.caller)
        except HubUnreachable as error:
            if error.user is not None:
                self.pool.heartbeats.excuse(error.user)
            elif await self._identify.is_away():
                self.pool.heartbeats.excuse()
            raise

    async def post(self) -> None:
        """Renew leases, and say which need no renewing."""
        unknown = self.pool.heartbeats.beat(self.caller.user, self.read(bodies.HeartbeatBody).leases)
        await self.answer(bodies.HeartbeatAnswer(unknown=unknown).model_dump_json().encode())


class LeasesHandler(Handler):
    """The requests for slices."""

    async def post(self) -> None:
        """Ask for a slice: it is granted at once, or queued."""
        await self.answer_lease(await self.pool.request(self.caller, self.read(bodies.RequestBody)))


class LeaseHandler(Handler):
    """One lease."""

    async def get(self, lease_id: str) -> None:
        """Return the lease as it is."""
        await self.answer_lease(await self.pool.lease(self.caller, lease_id))

    async def delete(self, lease_id: str) -> None:
        """End the lease."""
        text = self.get_query_argument("reason", EndReason.RELEASED.value)
        try:
            reason = EndReason(text)
        except ValueError:
            accepted = ", ".join(each.value for each in EndReason)
            raise BadRequest(f"reason is {text[:40]!a}.", f"Accepted: {accepted}.") from None
        await self.pool.release(self.caller, lease_id, reason)
        await self.answer(b"{}")


class AttachHandler(Handler):
    """Which process keeps a lease alive."""

    async def post(self, lease_id: str) -> None:
        """Tie the lease to a process."""
        await self.answer_lease(await self.pool.attach(self.caller, lease_id, self.read(bodies.AttachBody)))


class RenewHandler(Handler):
    """A lease's deadline."""

    async def post(self, lease_id: str) -> None:
        """Lift the deadline, or set it."""
        await self.answer_lease(await self.pool.renew(self.caller, lease_id, self.read(bodies.RenewBody).ttl))


class ResizeHandler(Handler):
    """A lease's size."""

    async def post(self, lease_id: str) -> None:
        """Change what the lease asks for."""
        body = self.read(bodies.ResizeBody)
        await self.answer_lease(await self.pool.resize(self.caller, lease_id, body.request, ahead=body.ahead))


class ParkHandler(Handler):
    """Lending a lease's slices."""

    async def post(self, lease_id: str) -> None:
        """Give the slices to others, and keep the lease."""
        await self.answer_lease(await self.pool.park(self.caller, lease_id))


class ResumeHandler(Handler):
    """Taking a lease's slices again."""

    async def post(self, lease_id: str) -> None:
        """Ask again for the slices of a parked lease."""
        await self.answer_lease(await self.pool.resume(self.caller, lease_id))


class WaitHandler(Polling):
    """A lease once it is held.

    204 while it is not: ask again. With ``last`` a shortage is told instead.
    """

    async def get(self, lease_id: str) -> None:
        """Wait until the lease is held; 204 if it is not when the time is up: ask again."""
        last = self.get_query_argument("last", "0") == "1"
        seconds = self.seconds if last else spread(self.seconds)
        lease = await self.poll(self.pool.wait(self.caller, lease_id, seconds, last))
        if lease is None:
            self.unchanged(HTTPStatus.NO_CONTENT)
        else:
            await self.answer_lease(lease)


class WatchHandler(Polling):
    """A lease once its version is not the one seen.

    The version is its ``ETag``. 304 while it is the one seen: ask again.
    """

    async def get(self, lease_id: str) -> None:
        """Wait for a change of the lease; 304 if there is none when the time is up: ask again."""
        seen = self.get_query_argument("seen", "")
        lease = await self.poll(self.pool.watch(self.caller, lease_id, spread(self.seconds), seen))
        if lease is None:
            self.unchanged(HTTPStatus.NOT_MODIFIED)
        else:
            self.set_header("ETag", f'"{bodies.version(lease)}"')
            await self.answer_lease(lease)


class ExplanationHandler(Handler):
    """Why a lease waits."""

    async def get(self, lease_id: str) -> None:
        """Say why the lease waits, and for how long it may."""
        await self.answer(bodies.OUTLOOK.dump_json(await self.pool.explain(self.caller, lease_id)))


class ForecastHandler(Handler):
    """What a request would meet; null for a slice at once. With ``anybody``: of somebody new."""

    is_for_services = True

    async def get(self) -> None:
        """Say what a request would meet if it were made now."""
        request, course, anybody, batch = (
            self.get_query_argument(name, "") for name in ("request", "course", "anybody", "batch")
        )
        found = await self.pool.forecast(
            self.caller, request, course or None, anybody=anybody == "1", batch=batch == "1"
        )
        await self.answer(bodies.FORECAST.dump_json(found))


class OffersHandler(Handler):
    """What a course offers."""

    async def get(self) -> None:
        """Return the slices that the caller's course offers now; null where no course file says."""
        course = self.get_query_argument("course", "")
        found = await self.pool.offers(self.caller, course or None)
        await self.answer(bodies.OFFERS.dump_json(None if found is None else [str(each) for each in found]))


class ActivityHandler(Handler):
    """What a lease's process does with its devices."""

    async def get(self, lease_id: str) -> None:
        """Say what the lease's process does with its devices."""
        await self.answer(bodies.ACTIVITY.dump_json(await self.pool.activity(self.caller, lease_id)))


class PodHandler(Polling):
    """The pod in which the pool runs a lease's kernel."""

    async def post(self, lease_id: str) -> None:
        """Start the kernel, in place of the one before."""
        pod = await self.pool.launch(self.caller, lease_id, self.read(bodies.LaunchBody))
        await self.answer(bodies.POD.dump_json(pod))

    async def get(self, lease_id: str) -> None:
        """Return how the pod is, once its version is not the one seen or the time is up."""
        seen = self.get_query_argument("seen", "")
        pod = await self.poll(self.pool.pod(self.caller, lease_id, self.seconds, seen))
        await self.answer(bodies.POD.dump_json(pod))

    async def delete(self, lease_id: str) -> None:
        """End the pod, and keep the lease."""
        await self.pool.end_pod(self.caller, lease_id)
        await self.answer(b"{}")


class StatusHandler(Handler):
    """Devices, leases and queue."""

    is_for_services = True

    async def get(self) -> None:
        """Return the devices, and the leases and the queue that the caller may see."""
        found = await self.pool.status(self.caller)
        leases, queue = (tuple(map(without_remote_processes, each)) for each in (found.leases, found.queue))
        status = bodies.StatusBody.model_construct(
            devices=found.devices,
            leases=leases,
            queue=queue,
            note=found.note,
            store_bytes=found.store_bytes,
        )
        await self.answer(bodies.STATUS.dump_json(status))


class PositionsHandler(Handler):
    """Where the caller's leases are in the queue."""

    async def get(self) -> None:
        """Return the positions in the queue of the caller's own leases, which may lag by a moment."""
        await self.answer(bodies.POSITIONS.dump_json(dict(await self.pool.positions(self.caller))))


class HistoryHandler(Handler):
    """What has ended."""

    async def get(self) -> None:
        """Return the leases that have ended since then."""
        rows = await self.pool.history(self.caller, self.number("since"))
        await self.answer(bodies.HISTORY.dump_json(rows))


class DrainHandler(Handler):
    """A device's willingness."""

    async def post(self, device: str) -> None:
        """Grant nothing more on the device, or grant again."""
        wanted = self.read(bodies.DrainBody)
        await self.answer(bodies.DEVICE.dump_json(await self.pool.drain(self.caller, device, wanted.drained)))


class NothingHandler(Handler):
    """Any other address."""

    async def prepare(self) -> None:
        """Say that there is nothing. Called by tornado."""
        raise HTTPError(HTTPStatus.NOT_FOUND)
