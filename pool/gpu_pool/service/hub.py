"""Who asks over TCP: a JupyterHub says it, of the token that comes with the request.

The Hub is asked with that very token, so this service needs no rights of its
own to know its callers, and a token that the Hub does not know any more, such as
that of a server that was stopped, is nobody's here at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from pydantic import AliasPath, BaseModel, Field, ValidationError, field_validator
from tornado.httputil import HTTPServerRequest

from gpu_pool.audit.callers import Caller, Peer
from gpu_pool.names import is_named, name_of
from gpu_pool.service.callers import ACCOUNTS, AccountNames, PeerName
from gpu_pool.service.connections import client_of
from gpu_pool.service.heartbeats import remote_process
from gpu_pool.service.tokens import Client, FairSemaphore, KnownTokens, WaitingClients, digest_of
from gpu_pool_client import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.exchange import AnswerTooLargeError, ServerAddress, Where, ask

#: Seconds for which an answer of the Hub holds for those who only read.
_HOLDS: Final = 5.0
_ANSWER_WITHIN: Final = 5.0
#: Questions to the Hub at a time about tokens that it knew lately.
_KNOWN_AT_ONCE: Final = 28
#: The same about others.
_OTHERS_AT_ONCE: Final = 4
#: Requests of one address that may wait until the Hub is asked about their tokens.
MOST_WAITING: Final = 512
# After a token that the Hub does not know, its place among the questions stays empty for a while: made-up
# tokens are not to be all that the Hub does.
#: So many times as long as the question took,
_REST_TIMES: Final = 3.0
#: but so many seconds at most.
_MOST_REST: Final = 0.2
_TOKEN: Final = re.compile(r"(?:bearer|token)[ ]+([!-~]{1,1024})", re.IGNORECASE)
_CLIENT: Final = re.compile(r"[0-9A-Za-z]{1,32}", re.ASCII)
#: Bytes of the largest answer of the Hub that is read. Its users choose a part of what it says.
_MOST_ANSWER: Final = 2**20
#: Tokens of which it is remembered that what the Hub says of them cannot be read.
_MOST_UNREADABLE: Final = 1_000
#: Seconds for which it holds whether the Hub answers at all.
_PROBE_HOLDS: Final = 1.0
#: Where our spawners keep the course in a server's ``user_options``.
_COURSE: Final = "course"
#: Characters of its name that are kept, more than any course has.
_LONGEST_COURSE: Final = 1_000
#: Characters that are logged of why an answer cannot be read.
_LONGEST_REASON: Final = 200
_LOG: Final = EscapingLogger(logging.getLogger(__name__))
#: Who asks for a service of the Hub's. No lease is in such a name: nothing is ever granted to one.
_OF_SERVICE: Final = "service/{name}"
_REMEDY: Final = (
    "Use a running server of the JupyterHub, or set GPU_POOL_TOKEN to a token "
    "from the Hub's token page that may access this service."
)


class UnknownToken(NotAllowed):
    """There is no token, or the Hub does not know it, or not any more."""


class HubUnreachable(PoolUnreachable):
    """The Hub does not answer, so nobody can be known. Trying again helps."""

    #: Whose token it was when the Hub last answered, where it did; as the pool calls them.
    user: str | None = None


class HubServer(BaseModel):
    """What the Hub says of a server."""

    #: The course that it was started for; None where it is for none. Nobody can change it while the
    #: server runs. Of all else that its user chose, as much as they like, nothing is kept.
    course: str | None = Field(None, validation_alias=AliasPath("user_options", _COURSE))

    @field_validator("course", mode="before")
    @classmethod
    def _read_course(cls, chosen: object) -> str | None:
        # One that was cut is no course that there is.
        return chosen[:_LONGEST_COURSE] if isinstance(chosen, str) and chosen else None


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
class HubApi:
    """Where the Hub's API is, and what it calls this service."""

    api: Where
    #: The path of the API, such as ``/hub/api``.
    path: str
    service: str


class _Question:
    """One about a new token, from when it waits to be asked until the Hub has answered or has not."""

    def __init__(self) -> None:
        #: Other requests with that token, which wait for the same answer.
        self.others: set[asyncio.Future[None]] = set()
        #: Whether the Hub did not say whose the token is.
        self.has_failed = False

    def end(self) -> None:
        """Let the others go on."""
        for other in self.others:
            if not other.done():
                other.set_result(None)


class HubIdentity:
    """Knows callers by their token. ``boot`` is that of their leases, see ``Backend.boot``."""

    def __init__(
        self,
        hub: HubApi,
        admins: Collection[str],
        boot: str,
        clock: Callable[[], float] = time.monotonic,
        most_waiting: int = MOST_WAITING,
        log: logging.Logger | EscapingLogger = _LOG,
    ) -> None:
        self._hub = hub
        self._log = log
        self._clock = clock
        self._boot = boot
        self._admins = frozenset(admins)
        self._tokens: KnownTokens[HubUser] = KnownTokens(clock)
        self._asking = FairSemaphore(_KNOWN_AT_ONCE, WaitingClients(sys.maxsize))
        #: Requests whose tokens are not known, whether they wait to be asked about or for another's answer.
        self._waiting = WaitingClients(most_waiting)
        self._asking_of_others = FairSemaphore(_OTHERS_AT_ONCE, self._waiting)
        #: Those about tokens that are not known.
        self._questions: dict[bytes, _Question] = {}
        #: Those of which was logged that what the Hub says of them cannot be read.
        self._unreadable: set[bytes] = set()
        self._probe: asyncio.Task[bool] | None = None
        self._probed_at = 0.0

    async def __call__(
        self, request: HTTPServerRequest, *, fresh: bool, is_for_services: bool = False
    ) -> Caller:
        """Return who makes this request, by its ``Authorization`` header alone."""
        given = _TOKEN.fullmatch(request.headers.get("Authorization", "").strip())
        if given is None:
            raise UnknownToken("The request has no token, so the pool cannot tell who is asking.", _REMEDY)
        client = request.headers.get(bodies.CLIENT_HEADER, "")
        known = client if _CLIENT.fullmatch(client) else ""
        return await self.caller(
            given[1], known, fresh=fresh, is_for_services=is_for_services, origin=client_of(request)
        )

    async def caller(
        self,
        token: str,
        client: str,
        *,
        fresh: bool,
        is_for_services: bool = False,
        origin: Client = Client(),  # noqa: B008 - frozen
    ) -> Caller:
        """Return whose token it is.

        Every token names its owner to whoever holds it, also one that was made
        for another service or that a visitor has left at somebody's server. So
        it counts only if it is that of a server of its owner's, or may access
        this service. The former is no administrator's: what runs in a
        notebook must not be able to revoke what others hold.

        A service of the Hub's that may access this one is nobody with slices, and is
        known only where it may ask: ``is_for_services``.
        """
        user = await self._user(token, fresh, origin)
        own_access = bool(user.scopes & {"access:services", f"access:services!service={self._hub.service}"})
        if user.kind == "service" and own_access:
            return _service_of(user, client, self._boot, is_for_services)
        server = _server_of(user)
        if user.kind != "user" or not (own_access or server is not None):
            raise NotAllowed(f"The token of {user.name!a} may not access the pool.", _REMEDY)
        # A "/" would make a user of the Hub's one of this machine's, or a service.
        name = name_of(user.name, apart_from="/")
        return Caller(
            name,
            own_access and (user.admin or is_named(user.name, self._admins)),
            mark_of(name),
            remote_process(name, server or "", client, self._boot),
            groups=user.groups,
            server=server,
            course=user.servers[server].course if server in user.servers else None,
        )

    async def _user(self, token: str, fresh: bool, origin: Client) -> HubUser:
        digest = digest_of(token)
        while (found := self._tokens.owner(digest)) is None:
            if self._tokens.is_refused(digest):
                raise _unknown()
            # Several requests with one new token are one question.
            question = self._questions.get(digest)
            if question is None:
                return await self._find(token, digest, origin)
            await self._wait_for(question, origin)
            if question.has_failed:
                raise _unreachable()
        age, user = found
        if age < _HOLDS and not fresh:
            return user
        await self._asking.acquire(Client(user.name, origin.is_gone))
        try:
            return await self._learn(token, digest)
        except HubUnreachable as error:
            error.user = name_of(user.name, apart_from="/")
            raise
        finally:
            self._asking.release()

    async def _wait_for(self, question: _Question, origin: Client) -> None:
        """Return at the end of a question, which may be without an answer: its client may have gone."""
        end = self._waiting.add(origin)
        question.others.add(end)
        try:
            await end
        finally:
            self._waiting.remove(end, origin)
            question.others.discard(end)

    async def _find(self, token: str, digest: bytes, origin: Client) -> HubUser:
        """Ask about a token that was not known lately; others wait for what comes of it."""
        question = self._questions[digest] = _Question()
        try:
            return await self._find_in_turn(token, digest, origin)
        except HubUnreachable:
            question.has_failed = True
            raise
        finally:
            del self._questions[digest]
            question.end()

    async def _find_in_turn(self, token: str, digest: bytes, origin: Client) -> HubUser:
        """Ask about a token after others of that kind."""
        await self._asking_of_others.acquire(origin)
        began, rest = time.monotonic(), 0.0
        try:
            return await self._learn(token, digest)
        except UnknownToken:
            rest = min(_REST_TIMES * (time.monotonic() - began), _MOST_REST)
            raise
        finally:
            asyncio.get_running_loop().call_later(rest, self._asking_of_others.release)

    async def _learn(self, token: str, digest: bytes) -> HubUser:
        try:
            user = await self._ask(token)
        except UnknownToken as error:
            self._tokens.refuse(digest)
            if error.__cause__ is not None:
                self._log_unreadable(digest, error.__cause__)
            raise
        self._tokens.learn(digest, user)
        return user

    async def _ask(self, token: str) -> HubUser:
        """Ask whose token it is. One of which the Hub says what cannot be read is refused.

        It says what a user has chosen, so it is no sign that others' tokens cannot be asked about.
        """
        headers = {"Authorization": f"token {token}"}
        try:
            answer = await ask(
                self._hub.api, "GET", f"{self._hub.path}/user", None, _ANSWER_WITHIN, headers, _MOST_ANSWER
            )
            if answer.status == HTTPStatus.OK:
                return HubUser.model_validate_json(answer.body)
        except (AnswerTooLargeError, ValidationError) as error:
            raise UnknownToken(
                "What the JupyterHub says of this token cannot be read.",
                "Start your server anew with other options. If that does not help, "
                "tell whoever looks after this JupyterHub.",
            ) from error
        except OSError as error:
            raise _unreachable() from error
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise _unknown()
        raise _unreachable()

    def _log_unreadable(self, digest: bytes, error: BaseException) -> None:
        """Log once of a token that what the Hub says of it cannot be read; not the token itself."""
        if digest in self._unreadable:
            return
        if len(self._unreadable) >= _MOST_UNREADABLE:
            self._unreadable.clear()
        self._unreadable.add(digest)
        if isinstance(error, ValidationError):
            found = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where, what = ".".join(map(str, found["loc"])), found["msg"]
        else:
            where, what = "", str(error)
        self._log.warning(
            "What the JupyterHub says of a token cannot be read, so it is refused: %a",
            f"{where}: {what}"[:_LONGEST_REASON].removeprefix(": "),
        )

    async def is_away(self) -> bool:
        """Whether the Hub answers nobody: asked without a token, whose owner could break the answer."""
        is_old = self._clock() - self._probed_at > _PROBE_HOLDS
        if self._probe is None or (self._probe.done() and is_old):
            self._probe, self._probed_at = asyncio.create_task(self._is_away()), self._clock()
        return await asyncio.shield(self._probe)

    async def _is_away(self) -> bool:
        try:
            answer = await ask(
                self._hub.api, "GET", f"{self._hub.path}/", None, _ANSWER_WITHIN, None, _MOST_ANSWER
            )
        except OSError:
            return True
        return answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR


def mark_of(user: str) -> str:
    """Return what distinguishes a Hub's user's keys; of one length, so that no name runs into a key."""
    return "hub:" + hashlib.blake2s(user.encode(errors="replace"), digest_size=16).hexdigest()


def _unknown() -> UnknownToken:
    return UnknownToken("The JupyterHub does not know this token, or no longer accepts it.", _REMEDY)


def _unreachable() -> HubUnreachable:
    return HubUnreachable(
        "The JupyterHub did not answer, so the pool cannot tell who is asking.", "Try again in a moment."
    )


def _service_of(user: HubUser, client: str, boot: str, is_for_services: bool) -> Caller:
    """Return what a service of the Hub's is to the pool, whatever it is to the Hub."""
    if not is_for_services:
        raise NotAllowed(
            f"{user.name!a} is a service of the JupyterHub: it may read what is free, and nothing else.",
            "Ask for /status, or for /forecast with anybody=1; for anything else, as a user.",
        )
    name = name_of(_OF_SERVICE.format(name=user.name))
    return Caller(name, False, mark_of(name), remote_process(name, "", client, boot), is_service=True)


def _server_of(user: HubUser) -> str | None:
    """Return the name of the one server of its owner's that a token belongs to; '' is the default one."""
    mine = f"access:servers!server={user.name}/"
    found = [scope.removeprefix(mine) for scope in user.scopes if scope.startswith(mine)]
    return found[0] if len(found) == 1 else None


_DEFAULT_API: Final = "http://127.0.0.1:8081/hub/api"
_DEFAULT_PREFIX: Final = "/services/gpu-pool/"
_USERNAME: Final = "{username}"


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where the service listens for the Hub's users, and where the Hub is."""

    host: str
    port: int
    #: What all addresses begin and end with.
    prefix: str
    hub: HubApi
    api_url: str
    #: This service's secret, by which browsers' logins are completed; in no log.
    token: str = field(repr=False)
    client_id: str


def hub_place(bind: str, prefix: str) -> HubPlace | None:
    """Return the place that the settings or the Hub's environment name; None where neither does.

    A Hub that starts the service says everything in its environment. The
    secret is taken out of it, so that what the service starts does not get it.
    """
    url = os.environ.get("JUPYTERHUB_SERVICE_URL", "")
    if not (bind or url):
        return None
    if not bind and url.rstrip("/").endswith(":0"):  # so the Hub says of a service without one
        raise BadRequest(
            "The JupyterHub that starts this service has no address for it.",
            'Give the service a "url" in c.JupyterHub.services, such as "http://127.0.0.1:10101".',
        )
    host, port = _read_bind(bind or url)
    prefix = prefix or os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or _DEFAULT_PREFIX
    prefix = f"/{prefix.strip('/')}/"
    name = os.environ.get("JUPYTERHUB_SERVICE_NAME") or prefix.rstrip("/").rpartition("/")[2]
    api_url = os.environ.get("JUPYTERHUB_API_URL") or _DEFAULT_API
    where, path = _read_api(api_url)
    client_id = os.environ.get("JUPYTERHUB_CLIENT_ID") or f"service-{name}"
    token = os.environ.pop("JUPYTERHUB_API_TOKEN", "")
    if not token:
        raise BadRequest(
            "The service has no token for the JupyterHub.",
            'Let the Hub start it, or set JUPYTERHUB_API_TOKEN to the "api_token" of the service there.',
        )
    return HubPlace(host, port, prefix, HubApi(where, path, name), api_url, token, client_id)


def _read_bind(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise BadRequest(
        f"{text[:200]!a} is not an address to listen on.",
        "Accepted: HOST:PORT, such as 127.0.0.1:10101; for HTTPS put a proxy in front of it.",
    )


def _read_api(url: str) -> tuple[Where, str]:
    try:
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            return Path(unquote(parts.netloc)), parts.path.rstrip("/")
        if parts.scheme == "http" and parts.hostname:
            return ServerAddress(parts.hostname, parts.port or 80), parts.path.rstrip("/")
    except ValueError:
        pass
    raise BadRequest(
        f"{url[:200]!a} is not the address of a JupyterHub's API.",
        "JUPYTERHUB_API_URL begins with http:// and ends with /hub/api.",
    )


def named_by(system_users: str, accounts: AccountNames = ACCOUNTS) -> Callable[[Peer], PeerName]:
    """Return what names the users of the socket: by the Hub's name where ``system_users`` says it is theirs.

    ``system_users`` is what the Hub's users are called on this machine, with
    ``{username}`` in it, or empty. Everybody else is called ``local/NAME``,
    since no user of a Hub has a "/" in their name. So is root, and whoever is
    in a container, where many can share one uid, or runs as a uid without a name.
    """
    before, found, after = system_users.partition(_USERNAME)
    if system_users and not found:
        raise BadRequest(f"system_users is {system_users!a}.", f"Accepted: a name with {_USERNAME} in it.")

    def named(peer: Peer) -> PeerName:
        name = accounts.user(peer.uid)
        user = name[len(before) : len(name) - len(after)]
        is_account = accounts.account(peer.uid) is not None and peer.uid != 0 and not peer.contained
        is_theirs = is_account and user and name == f"{before}{user}{after}"
        if found and is_theirs:
            known = name_of(user, apart_from="/")
            return PeerName(known, mark_of(known), name)
        return PeerName(name_of(f"local/{name}"), str(peer.uid))

    return named
