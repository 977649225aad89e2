"""Who asks: callers, as a service knows them, and in whose name whatever is done for them is decided."""

from __future__ import annotations

import functools
import os
import pwd
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_pool_client import Lease, Process


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as it was when it connected."""

    uid: int
    #: As this service sees it; None for one that it cannot see.
    process: Process | None
    #: Whether it runs in a pid namespace of its own, such as a container's.
    contained: bool


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever asks, and what they are to the pool: found out once, and handed on to the pool as it is."""

    user: str
    is_admin: bool
    #: Distinguishes the keys of this user's requests from everybody else's.
    mark: str
    #: The process that asks, whose death ends what it asked for; for callers of the Hub's
    #: an entry in its place that nobody judges (see ``heartbeats.remote_process``).
    process: Process
    #: Who may be judged by what the system says of processes; None for callers over TCP.
    peer: Peer | None = None
    #: What the system calls the user, where the pool calls them by another name: the Hub's.
    account: str | None = None
    #: The groups that the user is in, as the Hub says it or the system was asked; None for not known.
    groups: frozenset[str] | None = None
    #: The user's server that asks, by the name that the Hub gives it; None for all else.
    server: str | None = None
    #: The course that this server was started for, as the Hub has it; None where it is for none,
    #: or the Hub does not tell.
    course: str | None = None
    #: Whether it is a service of the Hub's, which learns what is free and nothing of anybody.
    is_service: bool = False
    #: The machine whose node agent it is, which may say what is used there, and nothing else; else empty.
    node: str = ""

    def shown(self, lease: Lease) -> Lease:
        """Return a lease with the key that its holder gave it."""
        return replace(lease, key=lease.key.removeprefix(f"{self.mark}:"))


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
