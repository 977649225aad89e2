"""A pool that ``gpu-pool serve`` serves, on a Unix socket of this machine or on TCP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from pydantic import TypeAdapter, ValidationError

from gpu_pool_client._background import WAITS, give_back, is_given_back, keep
from gpu_pool_client._errors import GpuPoolError, OverQuota, PoolUnreachable
from gpu_pool_client._pool import Pool
from gpu_pool_client._processes import Process
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.endpoints import Endpoint, explain, is_soon_over, was_not_heard
from gpu_pool_client._remote.exchange import ServiceAnswer
from gpu_pool_client._remote.heartbeat import lease_heartbeat
from gpu_pool_client._remote.problems import error_of
from gpu_pool_client._requests import SliceRequest, parse_request
from gpu_pool_client._values import (
    Activity,
    DeviceStatus,
    EndedLease,
    EndReason,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseState,
    Outlook,
    PoolStatus,
)

T = TypeVar("T")

#: Seconds in which the service has answered; opening a slice may mean to start a daemon first.
_ANSWER_WITHIN: Final = 100.0
#: Seconds for which a service that never answered is tried, one that did, and one that is waited at.
_FIRST_RETRY_FOR, _RETRY_FOR, _WAITING_RETRY_FOR = 1.0, 10.0, 120.0
_TRY_EVERY: Final = 0.1
#: Seconds after which a service is asked again at the latest that asks to wait.
_LONGEST_PAUSE: Final = 5.0
#: Longest id that is sent: longer than any that there is.
_LONGEST_ID: Final = 128


class RemotePool(Pool):
    """The pool of a service. It may be used from several event loops.

    Nothing is kept between calls, so there is nothing to lose: every call may
    be repeated, and is, while the service restarts. Who asks, the service sees
    by the connection or asks a JupyterHub; what a :class:`Holder` says of user
    and process is not sent. Where the service says so, this process renews the
    leases it has to do with for as long as it lives (see ``heartbeat``).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.url = endpoint.url
        self._endpoint = endpoint
        self._retry_for = _FIRST_RETRY_FOR

    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """See ``Pool.request``."""
        wanted = bodies.RequestBody(
            request=str(request),
            key=_text(key),
            course=_text(holder.course),
            kernel=_text(holder.kernel),
            batch=holder.batch,
        )
        name, attempts = (self.url, "request", key), _Attempts()
        try:
            if is_given_back(name):  # an earlier call did not hear of it, and has given up
                attempts.may_be_heard = True
                await keep(name)
            return await self._lease("POST", "leases", wanted, attempts)
        except (asyncio.CancelledError, PoolUnreachable) as error:
            # It may have been granted, and nobody would know of it.
            if attempts.may_be_heard:
                what = f"The request for a GPU slice of {request.size}"
                waits = WAITS if isinstance(error, asyncio.CancelledError) else 0.0
                await give_back(name, what, lambda: self._withdraw_request(wanted, name), waits)
            raise

    async def get_lease(self, lease_id: str) -> Lease:
        """See ``Pool.get_lease``."""
        return await self._lease("GET", _lease_address(lease_id))

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while True:
            longest = self._endpoint.longest_poll
            left = longest if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            last = left < longest
            retry_for = max(_RETRY_FOR, min(left, _WAITING_RETRY_FOR)) if last else _WAITING_RETRY_FOR
            answer = await self._poll(lease_id, "wait", min(left, longest), retry_for, last=int(last))
            if answer.status == HTTPStatus.OK:
                return _read(bodies.LEASE, answer)

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        seen, state = "", LeaseState.WAITING
        while state is not LeaseState.ENDED:
            answer = await self._poll(lease_id, "watch", self._endpoint.longest_poll, seen=seen)
            if answer.status == HTTPStatus.OK:
                lease = _read(bodies.LEASE, answer)
                seen, state = answer.headers.get("ETag", "").strip('"'), lease.state
                yield lease

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``."""
        return _read(bodies.OUTLOOK, await self._ask("GET", _lease_address(lease_id, "outlook")))

    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """See ``Pool.forecast``. Administrators alone are told of somebody new, others of themselves."""
        wanted = {"request": str(request), "course": _text(holder.course) or "", "batch": int(holder.batch)}
        query = urlencode(wanted if holder.user else {**wanted, "anybody": 1})
        return _read(bodies.FORECAST, await self._ask("GET", f"forecast?{query}"))

    async def offers(self, holder: Holder) -> tuple[SliceRequest, ...] | None:
        """See ``Pool.offers``. The service knows of whose server and course it is asked."""
        query = urlencode({"course": _text(holder.course) or ""})
        found = _read(bodies.OFFERS, await self._ask("GET", f"offers?{query}"))
        return None if found is None else tuple(parse_request(each) for each in found)

    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """See ``Pool.attach``. The lease then names the process as the service sees it."""
        body = bodies.AttachBody(process=process, ready_within=ready_within, grace=grace)
        return await self._lease("POST", _lease_address(lease_id, "attach"), body)

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """See ``Pool.renew``."""
        return await self._lease("POST", _lease_address(lease_id, "renew"), bodies.RenewBody(ttl=ttl))

    async def activity(self, lease_id: str) -> Activity:
        """See ``Pool.activity``."""
        return _read(bodies.ACTIVITY, await self._ask("GET", _lease_address(lease_id, "activity")))

    async def resize(self, lease_id: str, request: SliceRequest, *, ahead: bool = False) -> Lease:
        """See ``Pool.resize``."""
        # A service that is older knows nothing of "ahead".
        body = bodies.ResizeBody(request=str(request), **({"ahead": True} if ahead else {}))
        return await self._lease("POST", _lease_address(lease_id, "resize"), body)

    async def park(self, lease_id: str) -> Lease:
        """See ``Pool.park``."""
        return await self._lease("POST", _lease_address(lease_id, "park"), bodies.Body())

    async def resume(self, lease_id: str) -> Lease:
        """See ``Pool.resume``."""
        return await self._lease("POST", _lease_address(lease_id, "resume"), bodies.Body())

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        lease_heartbeat().drop(self._endpoint, {lease_id})
        await self._ask("DELETE", f"{_lease_address(lease_id)}?reason={reason.value}")

    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        """See ``Pool.launch``."""
        body = bodies.LaunchBody(
            argv=kernel.argv,
            connection=dict(kernel.connection),
            environment=dict(kernel.environment),
            folder=kernel.folder,
        )
        return _read(bodies.POD, await self._ask("POST", _lease_address(lease_id, "pod"), body))

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """See ``Pool.pod``."""
        # Whoever follows a start tells its user why nothing has changed, and asks again.
        answer = await self._poll(lease_id, "pod", bodies.POD_POLL, _RETRY_FOR, seen=seen)
        return _read(bodies.POD, answer)

    async def end_pod(self, lease_id: str) -> None:
        """See ``Pool.end_pod``."""
        await self._ask("DELETE", _lease_address(lease_id, "pod"))

    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """See ``Pool.drain``. For administrators."""
        address = f"devices/{quote(device[:_LONGEST_ID], safe='', errors='replace')}/drain"
        return _read(bodies.DEVICE, await self._ask("POST", address, bodies.DrainBody(drained=drained)))

    async def history(self, since: float = 0.0) -> list[EndedLease]:
        """See ``Pool.history``. One's own leases; all for administrators."""
        return _read(bodies.HISTORY, await self._ask("GET", f"history?since={since!r}"))

    async def status(self) -> PoolStatus:
        """See ``Pool.status``. All devices, and one's own leases; all for administrators."""
        found = _read(bodies.STATUS, await self._ask("GET", "status"))
        return PoolStatus(self.url, found.devices, found.leases, found.queue, found.note, found.store_bytes)

    async def positions(self) -> Mapping[str, int]:
        """See ``Pool.positions``."""
        return _read(bodies.POSITIONS, await self._ask("GET", "positions"))

    async def close(self) -> None:
        """Do nothing: every call has closed what it opened."""

    # -- Asking ------------------------------------------------------------

    async def _lease(
        self,
        method: str,
        address: str,
        body: bodies.Body | None = None,
        attempts: _Attempts | None = None,
    ) -> Lease:
        answer = await self._ask(method, address, body, attempts=attempts)
        lease = _read(bodies.LEASE, answer)
        if bodies.TTL_HEADER in answer.headers:
            lease_heartbeat().keep(self._endpoint, lease.id, float(answer.headers[bodies.TTL_HEADER]))
        return lease

    async def _withdraw_request(self, wanted: bodies.RequestBody, name: Hashable) -> None:
        """End the lease of a request that may or may not have arrived: repeat it to learn its id.

        Not where it is wanted again meanwhile; nor where it is in use, by a process or, over TCP where
        none is told, because this one renews it: then an earlier call with that key was answered.
        """
        try:
            answer = await self._ask("POST", "leases", wanted, retry_for=0.0)
        except (PoolUnreachable, OverQuota):
            raise
        except GpuPoolError:
            return  # there is none
        lease = _read(bodies.LEASE, answer)
        is_in_use = lease.process is not None or lease_heartbeat().keeps(self._endpoint, lease.id)
        if not is_in_use and is_given_back(name):
            await self.release(lease.id, EndReason.WITHDRAWN)

    async def _poll(
        self,
        lease_id: str,
        what: str,
        seconds: float,
        retry_for: float = _WAITING_RETRY_FOR,
        **more: object,
    ) -> ServiceAnswer:
        """Ask for a change, for which the service waits for so many seconds in all."""
        address = f"{_lease_address(lease_id, what)}?{urlencode(more)}"
        return await self._ask(
            "GET", address, retry_for=retry_for, within=seconds + _ANSWER_WITHIN, seconds=seconds
        )

    async def _ask(
        self,
        method: str,
        address: str,
        body: bodies.Body | None = None,
        *,
        retry_for: float | None = None,
        within: float = _ANSWER_WITHIN,
        seconds: float | None = None,
        attempts: _Attempts | None = None,
    ) -> ServiceAnswer:
        """Ask until there is an answer. Raises the error that it describes, or ``PoolUnreachable``.

        With ``seconds`` the service is asked to wait: for so long, or what is left of that where it was
        interrupted. Then it is tried for ``retry_for`` from that interruption on.
        """
        text = None if body is None else body.model_dump_json(exclude_unset=True).encode()
        began = time.monotonic()
        until, is_interrupted = began + (seconds or 0.0), False
        attempts = attempts or _Attempts()
        while True:
            pause, target = _TRY_EVERY, address
            if seconds is not None:
                target = f"{address}&seconds={max(0.0, until - time.monotonic()):.3f}"
            try:
                with attempts.one():
                    answer = await self._endpoint.ask(method, target, text, within)
                pause = _asked_to_wait(answer)
                if not pause or time.monotonic() - began > (_RETRY_FOR if retry_for is None else retry_for):
                    break
            except OSError as failure:
                if seconds is not None and not is_interrupted:
                    is_interrupted, began = True, time.monotonic()
                tried = time.monotonic() - began
                limit = self._retry_for if retry_for is None else retry_for
                if tried > limit or not is_soon_over(failure):
                    raise explain(failure, self._endpoint) from failure
            await asyncio.sleep(pause)
        self._retry_for = _RETRY_FOR
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise error_of(answer.body)
        return answer


class _Attempts:
    """What may have come of asking for something again and again."""

    #: Whether the service may have heard of it, and nobody knows what it answered.
    may_be_heard = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Ask within this context."""
        before, self.may_be_heard = self.may_be_heard, True
        try:
            yield
        except OSError as failure:
            self.may_be_heard = before or not was_not_heard(failure)
            raise
        # What it answers, it answers to all attempts.
        self.may_be_heard = False


def _asked_to_wait(answer: ServiceAnswer) -> float:
    """Return for how many seconds the service asks to wait, which has heard too much; 0 for not at all."""
    if answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        return 0.0
    text = answer.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_PAUSE) if text.isascii() and text.isdecimal() else 0.0


def _read(kind: TypeAdapter[T], answer: ServiceAnswer) -> T:
    try:
        return kind.validate_json(answer.body)
    except ValidationError as error:
        raise PoolUnreachable(
            "The gpu-pool service sent an answer that this program does not understand.",
            "The service may be newer: upgrade jupyter-gpu-pool here, too.",
        ) from error


def _lease_address(lease_id: str, *more: str) -> str:
    return "/".join(("leases", quote(lease_id[:_LONGEST_ID], safe="", errors="replace"), *more))


def _text(text: str | None) -> Any:
    """Return a text that JSON can carry: what is no character at all becomes ``?``."""
    return None if text is None else text.encode(errors="replace").decode()
