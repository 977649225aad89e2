"""Where a pool's service is, and how its client makes itself known there."""

from __future__ import annotations

import functools
import os
import secrets
import ssl
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import quote

from gpu_pool_client._errors import BadRequest
from gpu_pool_client._pool import split_url
from gpu_pool_client.remote import bodies
from gpu_pool_client.remote.addresses import socket_path
from gpu_pool_client.remote.exchange import ServerAddress, ServiceAnswer, Where, ask
from gpu_pool_client.remote.problems import PROBLEM_TYPE

#: The variables that hold the token by which a JupyterHub knows who asks; the first one set counts.
TOKEN_VARIABLES: Final = ("GPU_POOL_TOKEN", "JUPYTERHUB_API_TOKEN")
#: What proxies answer while nothing listens behind them.
_FROM_PROXIES: Final = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class _Client:
    """Names this process, so that one user's processes are not taken for each other."""

    name = secrets.token_hex(8)

    @classmethod
    def renew(cls) -> None:
        """Take another name."""
        cls.name = secrets.token_hex(8)


# A forked child is another process.
os.register_at_fork(after_in_child=_Client.renew)


#: Seconds for which one call waits for a change on TCP: proxies cut one that is silent for longer, mostly
#: after 50 or 60. Nothing is between the ends of a socket, and either sees when the other has gone.
_LONGEST_POLL: Final = 45.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service, and who asks it."""

    url: str
    where: Where
    #: What all of its addresses begin with.
    root: str = bodies.API
    #: Sent to a service on TCP; a socket tells by itself who asks.
    token: str | None = field(default=None, repr=False)

    @property
    def longest_poll(self) -> float:
        """Seconds for which one call may wait for a change."""
        return bodies.LONGEST_POLL if isinstance(self.where, Path) else _LONGEST_POLL

    async def ask(self, method: str, address: str, body: bytes | None, within: float) -> ServiceAnswer:
        """Ask the service. Raises ``OSError`` where there is no answer, or only a proxy's."""
        answer = await ask(self.where, method, f"{self.root}/{address}", body, within, self._headers())
        if answer.status in _FROM_PROXIES and answer.headers.get("Content-Type") != PROBLEM_TYPE:
            raise ConnectionRefusedError("only a proxy answers")
        if "Retry-After" in answer.headers and answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ConnectionResetError("cannot answer now")
        return answer

    def _headers(self) -> dict[str, str]:
        if isinstance(self.where, Path):
            return {}
        known = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {bodies.CLIENT_HEADER: _Client.name, **known}


def unix_endpoint(url: str) -> Endpoint:
    """Return the service that a ``unix:`` URL names."""
    path = socket_path(url)
    return Endpoint(f"unix:{quote(str(path))}", path)


def http_endpoint(url: str) -> Endpoint:
    """Return the service that an ``http:`` or ``https:`` URL names; its certificate is verified.

    Who asks is told by the token of the environment.
    """
    parts = split_url(url)
    try:
        port = None if parts is None else parts.port
    except ValueError:
        parts = port = None
    if (
        parts is None
        or not parts.hostname
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
        or not (url.isascii() and url.isprintable() and " " not in url)
    ):
        raise BadRequest(
            f"{_hidden(url)!a} is not the URL of a pool's service.",
            "Accepted: http(s)://host[:port]/services/gpu-pool, without a token or a password.",
        )
    tls = _tls() if parts.scheme == "https" else None
    server = ServerAddress(parts.hostname, port or (443 if tls else 80), tls)
    base = parts.path.rstrip("/")
    return Endpoint(f"{parts.scheme}://{server.name}{base}", server, base + bodies.API, _token())


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _hidden(url: str) -> str:
    """Return the URL without what could be a secret."""
    before, at, after = url.partition("@")
    scheme, separator, _ = before.partition("://")
    return (f"{scheme}{separator}...@{after}" if at else url).partition("?")[0][:200]


def _token() -> str | None:
    name = next((name for name in TOKEN_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return None
    found = os.environ[name]
    if not (found.isascii() and found.isprintable() and " " not in found):
        raise BadRequest(
            f"The token in ${name} is malformed.", f"Set ${TOKEN_VARIABLES[0]} to a valid token."
        )
    return found
