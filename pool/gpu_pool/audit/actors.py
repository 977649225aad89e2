"""Who asks, known to everything that is done for them, however many calls lie between."""

from __future__ import annotations

import functools
import os
import pwd
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final


def new_request_id() -> str:
    """Return an id by which the lines of one request are found, and by which its user can name it."""
    return secrets.token_hex(8)


@dataclass(slots=True)
class Actor:
    """Who makes one request, and how that is known."""

    user: str
    #: ``socket``: by the connection; ``server`` or ``token``: by the Hub, of a server's own token or
    #: another one; ``process``: an embedded pool in a process of theirs.
    via: str
    uid: int | None = None
    pid: int | None = None
    #: The name of their server at the Hub; '' is the default one.
    server: str | None = None
    request_id: str = field(default_factory=new_request_id)
    #: Whether a refusal of what they ask for has been told already.
    is_refused: bool = False


_ACTOR: Final[ContextVar[Actor | None]] = ContextVar("gpu_pool_actor", default=None)


def asks() -> Actor | None:
    """Return who asks for what is done here; None where the pool does it by itself."""
    return _ACTOR.get()


def act(actor: Actor) -> None:
    """Let everything from here on be done for an actor, to the end of the running task."""
    _ACTOR.set(actor)


@contextmanager
def acting(actor: Actor | None) -> Iterator[None]:
    """Do something for an actor, unless it is already done for somebody."""
    if actor is None or asks() is not None:
        yield
        return
    token = _ACTOR.set(actor)
    try:
        yield
    finally:
        _ACTOR.reset(token)


def this_process() -> Actor:
    """Return the user of this process, making a new request."""
    user, uid = _own_user()
    return Actor(user, "process", uid, os.getpid())


@functools.cache
def _own_user() -> tuple[str, int]:
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name, uid
    except KeyError:
        return f"uid-{uid}", uid
