"""A pool that ``gpu-pool serve`` serves, on a Unix socket of this machine or on TCP."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import urlencode

from pydantic import ValidationError

from gpu_pool_client._errors import BadRequest, NeverFits, NotAllowed, PoolUnreachable
from gpu_pool_client._leases import EndReason, Holder, Lease, LeaseState
from gpu_pool_client._operations import operation_of
from gpu_pool_client._pods import KernelPod
from gpu_pool_client._pool import Pool
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.bodies import error_of
from gpu_pool_client._remote.endpoints import Endpoint, explain, is_soon_over, was_not_heard
from gpu_pool_client._remote.exchange import ServiceAnswer
from gpu_pool_client._remote.forms import Form, form_of
from gpu_pool_client._requests import SliceRequest
from gpu_pool_client._retries import WAITS, giving_back

P = ParamSpec("P")
T = TypeVar("T")

#: How the operations travel for which a client does more than to ask once.
_REQUEST: Final = form_of(operation_of(Pool.request))
_WAIT: Final = form_of(operation_of(Pool.wait))
_WATCH: Final = form_of(operation_of(Pool.watch))
_POD: Final = form_of(operation_of(Pool.pod))

#: Seconds in which the service has answered; opening a slice may mean to start a daemon first.
_ANSWER_WITHIN: Final = 100.0
_TRY_EVERY: Final = 0.1
#: Seconds after which a service is asked again at the latest that asks to wait.
_LONGEST_PAUSE: Final = 5.0
#: How often a lease is renewed within its time-to-live, and how soon after one that failed.
_RENEWALS: Final = 3.0
_RENEWED_AGAIN: Final = 1.0
_HEARTBEAT_ANSWERED_WITHIN: Final = 10.0
#: Leases that are named at once: the service reads no more than ``bodies.MOST_BODY``.
_RENEWED_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """For how many seconds a service is tried that does not answer, and after how many again."""

    #: One that has never answered.
    never_heard: float = 1.0
    #: One that has.
    known: float = 10.0
    #: One at which is waited for a change.
    waited_at: float = 120.0
    #: Again, to give back what it has not heard of; None for the usual ones.
    again_after: float | None = None


class RemotePool(Pool):
    """The pool of a service. It may be used from several event loops.

    An operation is asked for by its row alone; the methods here are those whose client does more than that.

    Nothing is kept between calls, so there is nothing to lose: every call may
    be repeated, and is, while the service restarts. Who asks, the service sees
    by the connection or asks a JupyterHub; what a :class:`Holder` says of user
    and process is not sent. Where the service says so, this process renews the
    leases it has to do with for as long as it lives (see :class:`LeaseHeartbeat`).
    """

    def __init__(self, endpoint: Endpoint, times: RetryTimes = RetryTimes()) -> None:
        self.url = endpoint.url
        self._endpoint = endpoint
        self._times = times
        self._again_after = times.again_after
        self._retry_for = times.never_heard

    async def _perform(
        self,
        verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Ask the service, by the operation's row."""
        row = operation_of(verb)
        if row.http is None:
            raise NotAllowed(*row.missing)
        found: T = await self._call(form_of(row), row.bind(*args, **kwargs))
        return found

    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """See ``Pool.request``."""
        arguments = {"request": request, "holder": holder, "key": key}
        name, attempts = (self.url, "request", key), _Attempts()
        try:
            if giving_back.is_pending(name):  # an earlier call did not hear of it, and has given up
                attempts.may_be_heard = True
                await giving_back.keep(name)
            lease: Lease = await self._call(_REQUEST, arguments, attempts)
        except (asyncio.CancelledError, PoolUnreachable) as error:
            # It may have been granted, and nobody would know of it.
            if attempts.may_be_heard:
                what = f"The request for a GPU slice of {request.size}"
                waits = WAITS if isinstance(error, asyncio.CancelledError) else 0.0
                withdraw = partial(self._withdraw_request, arguments, name)
                await giving_back.give_back(name, what, withdraw, waits, self._again_after)
            raise
        else:
            return lease

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        times, give_up_at = self._times, None if timeout is None else time.monotonic() + timeout
        while True:
            longest = self._endpoint.longest_poll
            left = longest if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            last = left < longest
            retry_for = max(times.known, min(left, times.waited_at)) if last else times.waited_at
            answer = await self._poll(_WAIT, lease_id, min(left, longest), retry_for, last=int(last))
            if answer.status == HTTPStatus.OK:
                lease: Lease = self._read(_WAIT, answer)
                return lease

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        seen, state = "", LeaseState.WAITING
        while state is not LeaseState.ENDED:
            answer = await self._poll(_WATCH, lease_id, self._endpoint.longest_poll, seen=seen)
            if answer.status == HTTPStatus.OK:
                lease: Lease = self._read(_WATCH, answer)
                seen, state = answer.headers.get("ETag", "").strip('"'), lease.state
                yield lease

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        lease_heartbeat().drop(self._endpoint, {lease_id})
        await super().release(lease_id, reason)

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """See ``Pool.pod``."""
        # Whoever follows a start tells its user why nothing has changed, and asks again.
        answer = await self._poll(_POD, lease_id, bodies.POD_POLL, self._times.known, seen=seen)
        found: KernelPod = self._read(_POD, answer)
        return found

    async def positions(self) -> Mapping[str, int]:
        """See ``Pool.positions``."""
        return await self._perform(Pool.positions)

    def without_retries(self) -> RemotePool:
        """See ``Pool.without_retries``: one that has never heard of its service, and does not wait for it."""
        return RemotePool(self._endpoint, replace(self._times, never_heard=0.0))

    async def close(self) -> None:
        """Do nothing: every call has closed what it opened."""

    # -- Asking ------------------------------------------------------------

    async def _call(self, form: Form, arguments: Mapping[str, Any], attempts: _Attempts | None = None) -> Any:
        """Ask for an operation, and return what it says. What is to be renewed is renewed from now on."""
        query = form.query(arguments)
        address = form.address(arguments) + (f"?{query}" if query else "")
        content = form.content(arguments)
        answer = await self._ask(form, address, content, attempts=attempts)
        found = self._read(form, answer)
        if bodies.TTL_HEADER in answer.headers:
            lease_heartbeat().keep(self._endpoint, found.id, float(answer.headers[bodies.TTL_HEADER]))
        return found

    async def _withdraw_request(self, arguments: Mapping[str, Any], name: Hashable) -> None:
        """End the lease of a request that may or may not have arrived: repeat it to learn its id.

        Not where it is wanted again meanwhile; nor where it is in use, by a process or, over TCP where
        none is told, because this one renews it: then an earlier call with that key was answered.
        """
        try:
            answer = await self._ask(
                _REQUEST, _REQUEST.address(arguments), _REQUEST.content(arguments), retry_for=0.0
            )
        except (BadRequest, NeverFits, NotAllowed):
            return  # there is none
        lease: Lease = self._read(_REQUEST, answer)
        is_in_use = lease.process is not None or lease_heartbeat().keeps(self._endpoint, lease.id)
        if not is_in_use and giving_back.is_pending(name):
            await self.release(lease.id, EndReason.WITHDRAWN)

    async def _poll(
        self,
        form: Form,
        lease_id: str,
        seconds: float,
        retry_for: float | None = None,
        **more: object,
    ) -> ServiceAnswer:
        """Ask for a change, for which the service waits for so many seconds in all."""
        address = f"{form.address({'lease_id': lease_id})}?{urlencode(more)}"
        retry_for = self._times.waited_at if retry_for is None else retry_for
        return await self._ask(
            form, address, None, retry_for=retry_for, within=seconds + _ANSWER_WITHIN, seconds=seconds
        )

    async def _ask(
        self,
        form: Form,
        address: str,
        content: bytes | None,
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
        began = time.monotonic()
        until, is_interrupted = began + (seconds or 0.0), False
        attempts = attempts or _Attempts()
        while True:
            pause, target = _TRY_EVERY, address
            if seconds is not None:
                target = f"{address}&seconds={max(0.0, until - time.monotonic()):.3f}"
            try:
                with attempts.one():
                    answer = await self._endpoint.ask(form.http.method, target, content, within)
                pause = _asked_to_wait(answer)
                if not pause or time.monotonic() - began > (
                    self._times.known if retry_for is None else retry_for
                ):
                    break
            except OSError as failure:
                if seconds is not None and not is_interrupted:
                    is_interrupted, began = True, time.monotonic()
                tried = time.monotonic() - began
                limit = self._retry_for if retry_for is None else retry_for
                is_over = attempts.may_be_heard and not form.operation.idempotent
                if is_over or tried > limit or not is_soon_over(failure):
                    raise explain(failure, self._endpoint) from failure
            await asyncio.sleep(pause)
        self._retry_for = self._times.known
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise error_of(answer.body)
        return answer

    def _read(self, form: Form, answer: ServiceAnswer) -> Any:
        try:
            return form.read(answer.body, self.url)
        except ValidationError as error:
            raise PoolUnreachable(
                "The gpu-pool service sent an answer that this program does not understand.",
                "The service may be newer: upgrade jupyter-gpu-pool here, too.",
            ) from error


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


@dataclass(slots=True)
class _Renewed:
    """The leases of one service that are renewed, and every how many seconds."""

    every: float
    lease_ids: set[str] = field(default_factory=set)


class LeaseHeartbeat:
    """Says for as long as this process lives which leases it still wants. Used by any thread.

    A service on TCP cannot see that a process has ended, so it takes back what it does not hear of. One
    thread for each service does it for the whole process, whichever pool object asked and whether or not
    that is open still: closing a pool ends no lease. Neither a service that does not answer, nor one that
    gives its leases more time, holds up what another one is told.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._renewed: dict[Endpoint, _Renewed] = {}

    def keep(self, endpoint: Endpoint, lease_id: str, ttl: float) -> None:
        """Renew a lease that ends without it after ``ttl`` seconds, as all of its service do."""
        with self._changed:
            renewed = self._renewed.get(endpoint)
            if renewed is None:
                renewed = _Renewed(ttl / _RENEWALS)
                run = partial(self._run, endpoint, renewed)
                threading.Thread(target=run, name="gpu-pool-heartbeat", daemon=True).start()
                self._renewed[endpoint] = renewed
            renewed.every = ttl / _RENEWALS
            renewed.lease_ids.add(lease_id)
            self._changed.notify_all()

    def drop(self, endpoint: Endpoint, lease_ids: set[str]) -> None:
        """Renew these leases no more."""
        with self._changed:
            if endpoint in self._renewed:
                self._renewed[endpoint].lease_ids -= lease_ids

    def keeps(self, endpoint: Endpoint, lease_id: str) -> bool:
        """Whether a lease is renewed."""
        with self._changed:
            return endpoint in self._renewed and lease_id in self._renewed[endpoint].lease_ids

    def _run(self, endpoint: Endpoint, renewed: _Renewed) -> None:
        due = time.monotonic() + renewed.every
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(renewed.lease_ids))
                # What is shorter than what was known before counts at once.
                while (left := min(due, time.monotonic() + renewed.every) - time.monotonic()) > 0:
                    self._changed.wait(left)
                    due = min(due, time.monotonic() + renewed.every)
                ids = sorted(renewed.lease_ids)
            answered = [
                self._beat(endpoint, ids[first : first + _RENEWED_AT_ONCE])
                for first in range(0, len(ids), _RENEWED_AT_ONCE)
            ]
            due = time.monotonic() + (renewed.every if all(answered) else min(renewed.every, _RENEWED_AGAIN))

    def _beat(self, endpoint: Endpoint, lease_ids: list[str]) -> bool:
        body = bodies.HeartbeatBody(leases=lease_ids).model_dump_json().encode()
        try:
            answer = asyncio.run(endpoint.ask("POST", "heartbeat", body, _HEARTBEAT_ANSWERED_WITHIN))
            if answer.status == HTTPStatus.OK:
                self.drop(endpoint, set(bodies.HeartbeatAnswer.model_validate_json(answer.body).unknown))
        # Nobody answers, or not the service; or this program is about to end, when nothing can be begun.
        except (OSError, ValidationError, RuntimeError):
            return False
        return True


class _HeartbeatProcess:
    heartbeat = LeaseHeartbeat()

    @classmethod
    def forget(cls) -> None:
        """Begin without leases: those that there are belong to the parent, which renews them."""
        cls.heartbeat = LeaseHeartbeat()


os.register_at_fork(after_in_child=_HeartbeatProcess.forget)


def lease_heartbeat() -> LeaseHeartbeat:
    """Return the one of this process."""
    return _HeartbeatProcess.heartbeat
