"""One question over a Unix socket, and its answer.

tornado does the HTTP, as it does for Jupyter itself: it is there already
wherever a kernel can be started. Its ``HTTP1Connection`` is used and not its
``AsyncHTTPClient``, which goes on with a question whose asker was cancelled,
and so keeps the socket of every poll that nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream, StreamClosedError

#: Bytes of the largest answer that is read: a history of years.
_MOST_ANSWER: Final = 256 * 2**20


@dataclass
class Answer(HTTPMessageDelegate):
    """What the service answered."""

    status: int = 0
    headers: HTTPHeaders = field(default_factory=HTTPHeaders)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def headers_received(self, start_line: object, headers: HTTPHeaders) -> None:
        """Take the first part of the answer. Called by tornado."""
        assert isinstance(start_line, ResponseStartLine)
        self.status, self.headers = start_line.code, headers

    def data_received(self, chunk: bytes) -> None:
        """Take a part of the body. Called by tornado."""
        self.body += chunk

    def finish(self) -> None:
        """Take note that this was all. Called by tornado."""
        self.complete = True


async def ask(path: Path, method: str, target: str, body: bytes | None, within: float) -> Answer:
    """Ask the service at the socket ``path``. Raises ``OSError`` where there is no whole answer in time.

    Uses one connection, which is closed when this returns, whatever happens.
    """
    stream = IOStream(socket.socket(socket.AF_UNIX), max_buffer_size=_MOST_ANSWER)
    # Closing the stream ends every call that waits for it. asyncio.wait_for would do, but until
    # Python 3.12 it can lose a cancellation, and a wait that goes on unnoticed holds a place in line.
    alarm = asyncio.get_running_loop().call_later(within, stream.close, TimeoutError("no answer"))
    try:
        await stream.connect(str(path))
        return await _exchange(stream, method, target, body)
    except StreamClosedError as closed:
        raise closed.real_error or ConnectionResetError("closed without an answer") from closed
    finally:
        alarm.cancel()
        stream.close()


async def _exchange(stream: IOStream, method: str, target: str, body: bytes | None) -> Answer:
    connection = HTTP1Connection(
        stream, is_client=True, params=HTTP1ConnectionParameters(max_body_size=_MOST_ANSWER)
    )
    headers = HTTPHeaders({"Host": "gpu-pool", "Connection": "close"})
    if body is not None:
        headers["Content-Type"] = "application/json"
        headers["Content-Length"] = str(len(body))
    # Whether it could be written is told by reading: an answer may come before all is written.
    sent = connection.write_headers(RequestStartLine(method, target, ""), headers, body)
    sent.add_done_callback(lambda future: future.exception())
    connection.finish()
    answer = Answer()
    await connection.read_response(answer)
    if not answer.complete:
        raise ConnectionResetError("closed in the middle of an answer")
    return answer
