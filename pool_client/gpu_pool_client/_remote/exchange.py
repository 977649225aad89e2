"""One question to a service, over a Unix socket or TCP, and its answer.

tornado does the HTTP, as it does for Jupyter itself: it is there already
wherever a kernel can be started. Its ``HTTP1Connection`` is used and not its
``AsyncHTTPClient``, which goes on with a question whose asker was cancelled,
and so keeps the socket of every poll that nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

#: Seconds in which a connection over a network is made. To an address whose pod has gone nothing is
#: refused: it vanishes, until whoever asks connects anew.
_CONNECT_WITHIN: Final = 3.0
#: After so many seconds without a word on a network's connection it is looked, so often and so many
#: times, whether the other end is still there: the machine of a service may go in the middle of an answer.
#: The system does not look while it sends a question again that nobody has confirmed; that it gives up
#: after as many milliseconds as the looking takes.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 19_000}
#: Bytes of the largest answer that is read: a history of years.
_MOST_ANSWER: Final = 256 * 2**20


class NotConnectedError(ConnectionError):
    """No connection came about in time; another one may."""


class AnswerTooLargeError(OSError):
    """The answer is larger than whoever asked would read."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a service listens on TCP."""

    host: str
    port: int
    #: How its certificate is verified; None for HTTP in the clear.
    tls: ssl.SSLContext | None = None

    @property
    def name(self) -> str:
        """The host and the port, as the ``Host`` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


#: The path of a socket, or a server.
Where: TypeAlias = Path | ServerAddress


@dataclass
class ServiceAnswer(HTTPMessageDelegate):
    """What the service answered, on a stream that is closed where it is more than ``most`` bytes."""

    stream: IOStream
    most: int
    status: int = 0
    headers: HTTPHeaders = field(default_factory=HTTPHeaders)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def headers_received(self, start_line: object, headers: HTTPHeaders) -> None:
        """Take the first part of the answer. Called by tornado."""
        assert isinstance(start_line, ResponseStartLine)
        self.status, self.headers = start_line.code, headers
        self._check(int(headers.get("Content-Length", "0")))

    def data_received(self, chunk: bytes) -> None:
        """Take a part of the body. Called by tornado."""
        self._check(len(self.body) + len(chunk))
        self.body += chunk

    def finish(self) -> None:
        """Take note that this was all. Called by tornado."""
        self.complete = True

    def _check(self, size: int) -> None:
        if size > self.most:
            self.stream.close(AnswerTooLargeError(f"the answer is larger than {self.most} bytes"))


async def ask(
    where: Where,
    method: str,
    target: str,
    body: bytes | None,
    within: float,
    more: Mapping[str, str] | None = None,
    most: int = _MOST_ANSWER,
) -> ServiceAnswer:
    """Ask the service, with ``more`` headers. Raises ``OSError`` where there is no whole answer in time.

    An answer of more than ``most`` bytes is not read to its end: ``AnswerTooLargeError``. Uses one
    connection, which is closed when this returns, whatever happens.
    """
    error: OSError = ConnectionRefusedError("there is no address")
    for family, address in await _addresses(where):
        stream = _stream(where, family)
        # Closing the stream ends every call that waits for it. asyncio.wait_for would do, but until
        # Python 3.12 it can lose a cancellation, and a wait that goes on unnoticed keeps its position.
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(within, stream.close, TimeoutError("no answer"))
        first = _CONNECT_WITHIN if isinstance(where, ServerAddress) else within
        soon = loop.call_later(first, stream.close, NotConnectedError("no connection"))
        connected = False
        try:
            await stream.connect(address, where.host if isinstance(where, ServerAddress) else None)
            soon.cancel()
            connected = True
            return await _exchange(stream, method, target, body, _headers(where, body, more), most)
        except StreamClosedError as closed:
            error = _cause(closed)
            if connected:
                raise error from closed
        finally:
            alarm.cancel()
            soon.cancel()
            stream.close()
    raise error


def _cause(closed: StreamClosedError) -> OSError:
    cause = closed.real_error
    if isinstance(cause, TimeoutError) and cause.errno is not None:  # the system's: the other end has gone
        return ConnectionResetError("the other end is gone")
    return cause if isinstance(cause, OSError) else ConnectionResetError("closed without an answer")


async def _addresses(where: Where) -> list[tuple[socket.AddressFamily, Any]]:
    if isinstance(where, Path):
        return [(socket.AF_UNIX, str(where))]
    found = await asyncio.get_running_loop().getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def _stream(where: Where, family: socket.AddressFamily) -> IOStream:
    made = socket.socket(family)
    if isinstance(where, ServerAddress):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # other systems name them otherwise
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if isinstance(where, ServerAddress) and where.tls is not None:
        return SSLIOStream(made, ssl_options=where.tls, max_buffer_size=_MOST_ANSWER)
    return IOStream(made, max_buffer_size=_MOST_ANSWER)


def _headers(where: Where, body: bytes | None, more: Mapping[str, str] | None) -> HTTPHeaders:
    host = where.name if isinstance(where, ServerAddress) else "gpu-pool"
    headers = HTTPHeaders({"Host": host, "Connection": "close", **(more or {})})
    if body is not None:
        headers["Content-Type"] = "application/json"
        headers["Content-Length"] = str(len(body))
    return headers


async def _exchange(
    stream: IOStream, method: str, target: str, body: bytes | None, headers: HTTPHeaders, most: int
) -> ServiceAnswer:
    connection = HTTP1Connection(
        stream, is_client=True, params=HTTP1ConnectionParameters(max_body_size=_MOST_ANSWER)
    )
    # Whether it could be written is told by reading: an answer may come before all is written.
    sent = connection.write_headers(RequestStartLine(method, target, ""), headers, body)
    sent.add_done_callback(lambda future: future.exception())
    connection.finish()
    answer = ServiceAnswer(stream, most)
    await connection.read_response(answer)
    if isinstance(stream.error, AnswerTooLargeError):
        raise stream.error
    if not answer.complete:
        raise ConnectionResetError("closed in the middle of an answer")
    return answer
