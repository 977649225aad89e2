"""Who asks over TCP: a JupyterHub says it, of the token that comes with the request.

The Hub is asked with that very token, so this service needs no rights of its
own to know its callers, and a token that the Hub does not know any more, such as
that of a server that was stopped, is nobody's here at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from tornado.httputil import HTTPServerRequest

from gpu_pool.service.callers import Caller
from gpu_pool.service.heartbeats import keeper
from gpu_pool_client import NotAllowed, PoolUnreachable
from gpu_pool_client.remote import wire
from gpu_pool_client.remote.exchange import Where, ask

#: Seconds for which an answer of the Hub holds for those who only read.
_HOLDS: Final = 5.0
_MOST_KNOWN: Final = 4096
_ANSWER_WITHIN: Final = 5.0
#: Questions to the Hub at once.
_AT_ONCE: Final = 32
_TOKEN: Final = re.compile(r"(?:bearer|token)[ ]+([!-~]{1,1024})", re.IGNORECASE)
_CLIENT: Final = re.compile(r"[0-9A-Za-z]{1,32}", re.ASCII)
#: Where our spawners keep the course in a server's ``user_options``.
_COURSE: Final = "course"
#: Who asks for a service of the Hub's. No lease is in such a name: nothing is ever granted to one.
_OF_SERVICE: Final = "service/{name}"
_REMEDY: Final = (
    "Ask from a running server of the JupyterHub, or set GPU_POOL_TOKEN to a token "
    "from the Hub's token page that may access this service."
)


class UnknownToken(NotAllowed):
    """There is no token, or the Hub does not know it, or not any more."""


class HubUnreachable(PoolUnreachable):
    """The Hub does not answer, so nobody can be known. Trying again helps."""


class HubServer(BaseModel):
    """What the Hub says of a server."""

    #: What was chosen when it was started. Nobody can change it while the server runs.
    user_options: Any = None

    @property
    def course(self) -> str | None:
        """The course that it was started for; None where it is for none."""
        options = self.user_options
        chosen = options.get(_COURSE) if isinstance(options, dict) else None
        return chosen if isinstance(chosen, str) and chosen else None


class HubUser(BaseModel):
    """What the Hub says of a token's owner."""

    name: str
    kind: str
    admin: bool = False
    groups: frozenset[str] = frozenset()
    scopes: frozenset[str]
    #: Those that the token may read, by name: its own, where it has the scope ``read:servers!server``.
    servers: dict[str, HubServer] = {}


@dataclass(frozen=True, slots=True)
class Hub:
    """Where the Hub's API is, and what it calls this service."""

    api: Where
    #: The path of the API, such as ``/hub/api``.
    path: str
    service: str


class HubIdentity:
    """Knows callers by their token. ``boot`` is that of their leases, see ``OpenedPool.boot``."""

    def __init__(
        self, hub: Hub, admins: Collection[str], boot: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hub = hub
        self._boot = boot
        self._admins = frozenset(admins)
        self._clock = clock
        self._known: dict[bytes, tuple[float, HubUser]] = {}
        self._asking = asyncio.Semaphore(_AT_ONCE)

    async def __call__(
        self, request: HTTPServerRequest, *, fresh: bool, is_for_services: bool = False
    ) -> Caller:
        """Return who makes this request, by its ``Authorization`` header alone."""
        given = _TOKEN.fullmatch(request.headers.get("Authorization", "").strip())
        if given is None:
            raise UnknownToken("The pool does not know who asks: the request has no token.", _REMEDY)
        client = request.headers.get(wire.CLIENT_HEADER, "")
        known = client if _CLIENT.fullmatch(client) else ""
        return await self.caller(given[1], known, fresh=fresh, is_for_services=is_for_services)

    async def caller(self, token: str, client: str, *, fresh: bool, is_for_services: bool = False) -> Caller:
        """Return whose token it is.

        Every token names its owner to whoever holds it, also one that was made
        for another service or that a visitor has left at somebody's server. So
        it counts only if it is that of a server of its owner's, or may access
        this service. The former is no administrator's: what runs in a
        notebook must not be able to revoke what others hold.

        A service of the Hub's that may access this one is nobody with slices, and is
        known only where it may ask: ``is_for_services``.
        """
        user = await self._user(token, fresh)
        own_access = bool(user.scopes & {"access:services", f"access:services!service={self._hub.service}"})
        if user.kind == "service" and own_access:
            return _service_of(user, client, self._boot, is_for_services)
        server = _server_of(user)
        if user.kind != "user" or not (own_access or server is not None):
            raise NotAllowed(f"The token of {user.name!a} may not access the pool.", _REMEDY)
        return Caller(
            user.name,
            own_access and (user.admin or user.name in self._admins),
            mark_of(user.name),
            keeper(user.name, server or "", client, self._boot),
            groups=user.groups,
            server=server,
            course=user.servers[server].course if server in user.servers else None,
        )

    async def _user(self, token: str, fresh: bool) -> HubUser:
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        until, user = self._known.get(key, (now, None))
        if user is not None and not fresh and now < until:
            return user
        try:
            user = await self._ask(token)
        except UnknownToken:
            self._known.pop(key, None)
            raise
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = (self._clock() + _HOLDS, user)
        return user

    async def _ask(self, token: str) -> HubUser:
        headers = {"Authorization": f"token {token}"}
        try:
            async with self._asking:
                answer = await ask(
                    self._hub.api, "GET", f"{self._hub.path}/user", None, _ANSWER_WITHIN, headers
                )
        except OSError as error:
            raise _unreachable() from error
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise UnknownToken("The JupyterHub does not know this token, or not any more.", _REMEDY)
        try:
            if answer.status == HTTPStatus.OK:
                return HubUser.model_validate_json(answer.body)
        except ValidationError as error:
            raise _unreachable() from error
        raise _unreachable()


def mark_of(user: str) -> str:
    """Return what distinguishes a Hub's user's keys; of one length, so that no name runs into a key."""
    return "hub:" + hashlib.blake2s(user.encode(errors="replace"), digest_size=16).hexdigest()


def _unreachable() -> HubUnreachable:
    return HubUnreachable("The JupyterHub does not say who asks.", "Try again in a moment.")


def _service_of(user: HubUser, client: str, boot: str, is_for_services: bool) -> Caller:
    """Return what a service of the Hub's is to the pool, whatever it is to the Hub."""
    if not is_for_services:
        raise NotAllowed(
            f"{user.name!a} is a service of the JupyterHub: it may read what is free, and nothing else.",
            "Ask for /status, or for /forecast with anybody=1; for anything else, as a user.",
        )
    name = _OF_SERVICE.format(name=user.name)
    return Caller(name, False, mark_of(name), keeper(name, "", client, boot), is_service=True)


def _server_of(user: HubUser) -> str | None:
    """Return the name of the one server of its owner's that a token belongs to; '' is the default one."""
    mine = f"access:servers!server={user.name}/"
    found = [scope.removeprefix(mine) for scope in user.scopes if scope.startswith(mine)]
    return found[0] if len(found) == 1 else None
