"""What all of the service's handlers do alike: read, answer, and put errors into problem documents."""

from __future__ import annotations

import asyncio
import logging
import math
from http import HTTPStatus
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong
from tornado.web import HTTPError, RequestHandler

from gpu_pool.audit import Actor, AuditLog, act, asks
from gpu_pool.audit.callers import Caller
from gpu_pool.pool.for_caller import PoolForCaller
from gpu_pool.service.callers import Identify
from gpu_pool.service.connections import ConnectionsTaken, admit
from gpu_pool.service.hub import HubUnreachable, UnknownToken
from gpu_pool.service.lease_changes import ServiceStopping
from gpu_pool.service.served_pool import ServedPool
from gpu_pool.service.tokens import TooManyUnknown
from gpu_pool_client import BadRequest, GpuPoolError, PoolUnreachable
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.bodies import PROBLEM_TYPE, problem_of

M = TypeVar("M", bound=bodies.Body)

_UNKNOWN: Final = GpuPoolError("Internal error in the pool.", "The service's log has the details.")


def set_retry_and_close(handler: RequestHandler, error: object) -> None:
    """Say when to try again what passes by itself, and end the connection of those who are not known.

    They may come again; but whoever sends made-up tokens is not to hold connections by it.
    """
    if isinstance(error, (HubUnreachable, TooManyUnknown, ConnectionsTaken, ServiceStopping)):
        handler.set_header("Retry-After", "1")
    if isinstance(error, (UnknownToken, TooManyUnknown, ConnectionsTaken)):
        handler.set_header("Connection", "close")


class InFlightRequests:
    """Counts the requests that are being answered, so that the service can end after the last."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self) -> None:
        """Count one more."""
        self._count += 1
        self._none.clear()

    def end(self) -> None:
        """Count one less."""
        self._count -= 1
        if not self._count:
            self._none.set()

    async def none(self) -> None:
        """Return when none is being answered."""
        await self._none.wait()


class Handler(RequestHandler):
    """What all handlers share: the pool, the caller, and how answers and errors are written."""

    SUPPORTED_METHODS = ("GET", "POST", "DELETE")
    caller: Caller
    #: The pool, as whoever asks sees it.
    pool: PoolForCaller

    def initialize(
        self, served: ServedPool, identify: Identify, in_flight: InFlightRequests, log: logging.Logger
    ) -> None:
        """Take what the application gives every handler. Called by tornado."""
        self.served = served
        self.log = log
        self._identify = identify
        self._in_flight = in_flight
        in_flight.begin()

    @property
    def is_for_services(self) -> bool:
        """Whether services of the Hub's may ask, too."""
        return False

    async def prepare(self) -> None:
        """Find out who asks, anew for all but questions. Called by tornado before every method."""
        self.caller = await self._identify(
            self.request, fresh=self.request.method != "GET", is_for_services=self.is_for_services
        )
        admit(self.request, self.caller)
        act_for(self, self.caller)
        self.pool = self.served.for_caller(self.caller)

    def check_xsrf_cookie(self) -> None:
        """Accept: no cookie says here who asks, so no page asks in its visitor's name. Called by tornado."""

    def on_finish(self) -> None:
        """Take note that all is answered. Called by tornado."""
        self._in_flight.end()

    def set_default_headers(self) -> None:
        """Say nothing of the server's kind, and let nothing be kept. Called by tornado."""
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")

    def read(self, model: type[M]) -> M:
        """Return the body. Raises ``BadRequest`` that names what is wrong with it."""
        try:
            return model.model_validate_json(self.request.body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, found["loc"])) or "the body"
            raise BadRequest(f"The request body is not valid: {where}: {found['msg']}.") from None

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a number of the query. Raises ``BadRequest`` if it is none."""
        text = self.get_query_argument(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadRequest(f"{name} is {text[:40]!a}.", "Accepted: a number.")
        return value

    async def answer(self, body: bytes) -> None:
        """Send an answer. A client that does not take it loses its connection."""
        self.set_header("Content-Type", "application/json")
        sent = self.finish(body)
        if sent.done():  # most are short enough to be taken by the system at once
            return
        try:
            await with_timeout(self.settings["taken_within"], sent)
        except TookTooLong:
            self.request.connection.stream.close()  # type: ignore[union-attr]
        except StreamClosedError:
            pass  # nobody waits for it any more

    def compute_etag(self) -> None:
        """Leave tags to the handlers: most answers are never asked for again. Called by tornado."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Write the problem document of whatever went wrong. Called by tornado."""
        error = kwargs["exc_info"][1] if "exc_info" in kwargs else None
        if isinstance(error, HTTPError):
            error = BadRequest(
                "The pool's service has no such path, or the path does not accept this method."
            )
        set_request_id(self)
        audit_refusal(self, error, self.served.audit)
        problem = problem_of(error if isinstance(error, GpuPoolError) else _UNKNOWN)
        set_retry_and_close(self, error)
        if isinstance(error, UnknownToken):
            problem.status = HTTPStatus.UNAUTHORIZED
            self.set_header("WWW-Authenticate", "Bearer")
        if status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.set_header("Allow", ", ".join(each for each in self.SUPPORTED_METHODS if self.has(each)))
        # What tornado makes of all errors that are not its own.
        if status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.set_status(problem.status)
        else:
            problem.status = status_code
        self.set_header("Content-Type", PROBLEM_TYPE)
        self.finish(problem.model_dump_json(exclude_none=True))

    @classmethod
    def has(cls, method: str) -> bool:
        """Whether a method is for this address."""
        return method.lower() in vars(cls)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log what nobody foresaw. Called by tornado."""
        if not isinstance(value, (GpuPoolError, HTTPError)):
            self.log.error("%s %s failed", self.request.method, self.request.path, exc_info=(typ, value, tb))


#: By which whoever asked can name the lines about it.
REQUEST_ID: Final = "X-Request-Id"


def act_for(handler: RequestHandler, caller: Caller) -> None:
    """Let what the rest of the request does be done for its caller, and say its id in the answer."""
    act(actor_of(caller))
    set_request_id(handler)


def set_request_id(handler: RequestHandler) -> None:
    """Say the request's id in the answer. tornado forgets it with all headers when there is an error."""
    actor = asks()
    if actor is not None:
        handler.set_header(REQUEST_ID, actor.request_id)


def actor_of(caller: Caller) -> Actor:
    """Return what the audit log tells of a caller."""
    if caller.peer is not None:
        return Actor(caller.user, "socket", caller.peer.uid, caller.process.pid)
    return Actor(caller.user, "token" if caller.server is None else "server", server=caller.server)


def audit_refusal(handler: RequestHandler, error: object, log: AuditLog | None) -> None:
    """Write down that somebody who is known was refused to change something.

    Where the pool has said so itself, with the lease in question, nothing more is written.
    """
    is_question = handler.request.method in ("GET", "HEAD")
    if log is None or is_question or asks() is None:
        return
    if isinstance(error, GpuPoolError) and not isinstance(error, PoolUnreachable):
        log.refused(error, {"action": f"{handler.request.method} {handler.request.path}"})
