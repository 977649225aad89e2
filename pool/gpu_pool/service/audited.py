"""Requests as the audit log tells of them: who makes them, under which id, and what is refused."""

from __future__ import annotations

from typing import Final

from tornado.web import RequestHandler

from gpu_pool.audit import Actor, AuditLog, act, asks
from gpu_pool.service.callers import Caller
from gpu_pool_client import GpuPoolError, PoolUnreachable

#: By which whoever asked can name the lines about it.
REQUEST_ID: Final = "X-Request-Id"


def act_for(handler: RequestHandler, caller: Caller) -> None:
    """Let what the rest of the request does be done for its caller, and say its id in the answer."""
    act(actor_of(caller))
    say_id(handler)


def say_id(handler: RequestHandler) -> None:
    """Say the request's id in the answer. tornado forgets it with all headers when there is an error."""
    actor = asks()
    if actor is not None:
        handler.set_header(REQUEST_ID, actor.request_id)


def actor_of(caller: Caller) -> Actor:
    """Return what the audit log tells of a caller."""
    if caller.peer is not None:
        return Actor(caller.user, "socket", caller.peer.uid, caller.process.pid)
    return Actor(caller.user, "token" if caller.server is None else "server", server=caller.server)


def tell_refusal(handler: RequestHandler, error: object, log: AuditLog | None) -> None:
    """Write down that somebody who is known was refused to change something.

    Where the pool has said so itself, with the lease in question, nothing more is written.
    """
    is_question = handler.request.method in ("GET", "HEAD")
    if log is None or is_question or asks() is None:
        return
    if isinstance(error, GpuPoolError) and not isinstance(error, PoolUnreachable):
        log.refused(error, {"action": f"{handler.request.method} {handler.request.path}"})
