"""Where a pool's service is, how its client makes itself known there, and why nobody answers."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from gpu_pool_client._errors import BadRequest, PoolUnreachable
from gpu_pool_client._home import expanded
from gpu_pool_client._pool import split_url
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.bodies import PROBLEM_TYPE
from gpu_pool_client._remote.exchange import NotConnectedError, ServerAddress, ServiceAnswer, Where, ask

_NAME: Final = "gpu-pool/gpu-pool.sock"
#: The socket of a machine's service, which root runs.
SYSTEM_SOCKET: Final = Path("/run", _NAME)
#: Bytes of the longest path that a socket can have (unix(7): sun_path, with its end).
LONGEST_PATH: Final = 107
#: The variables that hold the token by which a JupyterHub knows who asks; the first one set counts.
TOKEN_VARIABLES: Final = ("GPU_POOL_TOKEN", "JUPYTERHUB_API_TOKEN")
#: What proxies answer while nothing listens behind them.
_FROM_PROXIES: Final = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class ProxyAnswerError(ConnectionRefusedError):
    """A proxy answers in place of the service, which may have heard all the same."""


class NotNowError(ConnectionResetError):
    """The service says that it cannot answer now, and has done nothing."""


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
        is_from_proxy = answer.status in _FROM_PROXIES and answer.headers.get("Content-Type") != PROBLEM_TYPE
        # The service sends nobody elsewhere. A JupyterHub does that has no route to it at the moment.
        if is_from_proxy or HTTPStatus.MULTIPLE_CHOICES <= answer.status < HTTPStatus.BAD_REQUEST:
            raise ProxyAnswerError("only a proxy answers")
        if "Retry-After" in answer.headers and answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise NotNowError("cannot answer now")
        return answer

    def _headers(self) -> dict[str, str]:
        if isinstance(self.where, Path):
            return {}
        known = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {bodies.CLIENT_HEADER: _Client.name, **known}


def own_socket() -> Path | None:
    """Return where a service of this user listens by default; None where there is no place for it."""
    if os.geteuid() == 0:
        return SYSTEM_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, _NAME) if runtime else None


def socket_path(url: str) -> Path:
    """Return the socket that a ``unix:`` URL names; without a path, this user's own or the machine's."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of a pool's service.", "Accepted: unix:[path].")
    if text:
        return check_length(expanded(text).absolute())
    own = own_socket()
    return own if own is not None and own.exists() else SYSTEM_SOCKET


def check_length(path: Path) -> Path:
    """Return the path of a socket. Raises ``BadRequest`` if it is longer than sockets' paths can be."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise BadRequest(
            f"The path of a socket has at most {LONGEST_PATH} bytes; {str(path)[:200]!a} has more.",
            "Choose a folder with a shorter path.",
        )
    return path


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


_OWN = "or unset GPU_POOL_URL to use a pool of your own."
_START = f'Start "gpu-pool serve", or ask the administrator to; {_OWN}'
_ASK = "Ask the administrator, who decides that by --mode and by the socket's group."
_AGAIN = "Try again; if that does not help, the service's log says why."
#: To those behind a JupyterHub, who have chosen no pool and start no service.
_HUB = "Try again in a minute. If that does not help, tell whoever looks after this JupyterHub."
_ADDRESS = (
    "Ask the administrator for its address. "
    "Where it has a certificate of its own, name that in SSL_CERT_FILE."
)


#: What neither a restart of the service nor a retry mends.
_LASTING: Final = (PermissionError, NotADirectoryError, ssl.SSLError)


def is_soon_over(error: OSError) -> bool:
    """Whether a restart of the service, or a retry a moment later, would mend this."""
    return not isinstance(error, (*_LASTING, TimeoutError, socket.gaierror))


def was_not_heard(error: OSError) -> bool:
    """Whether the service cannot have heard what was asked: it was not reached, or has said so."""
    if isinstance(error, ProxyAnswerError):
        return False
    never = (*_LASTING, socket.gaierror, FileNotFoundError, ConnectionRefusedError)
    return isinstance(error, (*never, NotConnectedError, NotNowError))


def explain(error: OSError, endpoint: Endpoint) -> PoolUnreachable:
    """Say why nobody answers there, what to do about it, and whether it may pass within minutes."""
    found = _in_words(error, endpoint)
    # A cluster's names are away for a moment when its name server is. On a machine of one's own, a
    # name that is not known was written wrongly.
    unknown = isinstance(error, socket.gaierror) and endpoint.token is None
    found.may_pass = not isinstance(error, _LASTING) and not unknown
    return found


def _in_words(error: OSError, endpoint: Endpoint) -> PoolUnreachable:
    place = endpoint.where if isinstance(endpoint.where, Path) else endpoint.url
    has_hub = endpoint.token is not None
    if isinstance(error, socket.gaierror):
        if not has_hub:
            return PoolUnreachable(f"The host of {place} cannot be found.", f"Check its name, {_OWN}")
        return PoolUnreachable("The host of the GPU pool cannot be found at the moment.", _HUB)
    if has_hub and not isinstance(error, ssl.SSLError):
        return PoolUnreachable("The GPU pool does not answer at the moment.", _HUB)
    if isinstance(error, ssl.SSLError):
        return PoolUnreachable(
            f"The server at {place} could not prove its identity: {error.reason}.", _ADDRESS
        )
    if isinstance(error, PermissionError):
        return PoolUnreachable(f"You may not use the pool that is served at {place}.", _ASK)
    if isinstance(error, (TimeoutError, NotConnectedError)):
        return PoolUnreachable(f"The service of the pool at {place} does not answer.", _AGAIN)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return PoolUnreachable(f"No pool is served at {place}.", _START)
    if isinstance(error, ConnectionRefusedError):
        return PoolUnreachable(f"The service of the pool at {place} has ended.", _START)
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        words = "closes connections: it is about to stop, or you have too many open"
        return PoolUnreachable(f"The service of the pool at {place} {words}.", _AGAIN)
    return PoolUnreachable(
        f"The service of the pool at {place} cannot be asked: {error.strerror or error}.", _AGAIN
    )
