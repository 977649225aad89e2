"""What answers at the API's addresses. Handlers read and write JSON, and know no rule of the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar

from tornado.web import Finish, HTTPError

from gpu_pool.service.connections import admit
from gpu_pool.service.decisions import spread
from gpu_pool.service.handler import Handler
from gpu_pool.service.heartbeats import without_remote_processes
from gpu_pool.service.hub import HubUnreachable
from gpu_pool_client import (
    BadRequest,
    EndReason,
    KernelPod,
    Lease,
    NotAllowed,
    Pool,
    PoolStatus,
    PoolUnreachable,
)
from gpu_pool_client._operations import Operation, Principal
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.forms import Form, WireField, form_of


class OperationHandler(Handler):
    """The operations at one address, which their rows describe: one for each method."""

    #: By the method of HTTP.
    operations: ClassVar[Mapping[str, Operation]]
    _poll: asyncio.Future[Any] | None = None

    @property
    def is_for_services(self) -> bool:
        """Whether services of the Hub's may ask, too."""
        row = self.operations.get(str(self.request.method))
        return row is not None and Principal.SERVICE in row.may

    async def get(self, *where: str) -> None:
        """Answer a question, at once or when there is news."""
        row = self._row()
        if row.poll is None:
            await self._do(row, *where)
        else:
            await self._wait(row, *where)

    async def post(self, *where: str) -> None:
        """Change something."""
        await self._do(self._row(), *where)

    async def delete(self, *where: str) -> None:
        """End something."""
        await self._do(self._row(), *where)

    @classmethod
    def has(cls, method: str) -> bool:
        """Whether a method is for this address."""
        return method in cls.operations

    def _row(self) -> Operation:
        row = self.operations.get(str(self.request.method))
        if row is None:
            raise HTTPError(HTTPStatus.METHOD_NOT_ALLOWED)
        return row

    async def _do(self, row: Operation, *where: str) -> None:
        """Do what an operation says."""
        form = form_of(row)
        arguments = form.arguments(self._said(form), self.caller.user)
        named = dict(zip(form.in_path, where, strict=True))
        if row.verb is Pool.positions:
            found = await self.served.positions(self.pool)
        else:
            found = await getattr(self.pool, row.name)(**named, **arguments)
        await self._answer(form, found)

    def _said(self, form: Form) -> dict[str, Any]:
        """Return what the client says, by the fields of the form."""
        if form.body is None:
            return {field.name: self._of_query(field) for field in form.fields}
        body = self.read(form.body)
        return {field.name: getattr(body, field.name) for field in form.fields}

    def _of_query(self, field: WireField) -> Any:
        """Return a value of the query. Raises ``BadRequest`` that names what is wrong with it."""
        if isinstance(field.default, float):
            return self.number(field.name, field.default)
        if isinstance(field.default, EndReason):
            return self._end_reason(field.name, field.default)
        text = self.get_query_argument(field.name, "")
        return text == "1" if isinstance(field.default, bool) else field.of_text(text)

    def _end_reason(self, name: str, default: EndReason) -> EndReason:
        text = self.get_query_argument(name, default.value)
        try:
            return EndReason(text)
        except ValueError:
            accepted = ", ".join(each.value for each in EndReason)
            raise BadRequest(f"{name} is {text[:40]!a}.", f"Accepted: {accepted}.") from None

    async def _answer(self, form: Form, found: Any) -> None:
        if isinstance(found, Lease):
            # One that ends unless it is renewed is sent with the seconds within which it has to be.
            if self.request.method == "POST" and self.served.heartbeats.begin(found):
                self.set_header(bodies.TTL_HEADER, f"{self.served.heartbeats.ttl:g}")
            found = without_remote_processes(found)
        elif isinstance(found, PoolStatus):
            found = without_remote_processes(found)
        await self.answer(form.write(found))

    # -- Long polls ----------------------------------------------------------

    async def _wait(self, row: Operation, lease_id: str) -> None:
        """Answer as soon as there is something new; when the time is up, say that there is nothing."""
        assert row.poll is not None
        found = await self._while_connected(self._news(row, lease_id))
        if found is None:
            self.set_status(row.poll.unchanged or HTTPStatus.NO_CONTENT)
            self.finish()
            return
        if row.poll.says == "seen" and isinstance(found, Lease):
            self.set_header("ETag", f'"{bodies.version(found)}"')
        await self._answer(form_of(row), found)

    async def _news(self, row: Operation, lease_id: str) -> Lease | KernelPod | None:
        seconds = min(max(self.number("seconds"), 0.0), bodies.LONGEST_POLL)
        seen, last = self.get_query_argument("seen", ""), self.get_query_argument("last", "0") == "1"
        if row.name == "pod":
            return await self.served.pod_within(self.pool, lease_id, seconds, seen)
        if row.name == "watch":
            return await self.served.changed_within(self.pool, lease_id, spread(seconds), seen)
        return await self.served.held_within(
            self.pool, lease_id, seconds if last else spread(seconds), last=last
        )

    async def _while_connected(self, answer: Any) -> Any:
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
        problem = await self.served.health.problem()
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
        heartbeats = self.served.heartbeats
        try:
            self.caller = await self._identify(self.request, fresh=False)
            admit(self.request, self.caller)
        except HubUnreachable as error:
            if error.user is not None:
                heartbeats.excuse(error.user)
            elif await self._identify.is_away():
                heartbeats.excuse()
            raise

    async def post(self) -> None:
        """Renew leases, and say which need no renewing."""
        unknown = self.served.heartbeats.beat(self.caller.user, self.read(bodies.HeartbeatBody).leases)
        await self.answer(bodies.HeartbeatAnswer(unknown=unknown).model_dump_json().encode())


class NothingHandler(Handler):
    """Any other address."""

    async def prepare(self) -> None:
        """Say that there is nothing. Called by tornado."""
        raise HTTPError(HTTPStatus.NOT_FOUND)
