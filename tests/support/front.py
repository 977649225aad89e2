"""One address before a Hub and a service, as a Hub's proxy is: browsers log in at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

_HOP = frozenset({"connection", "transfer-encoding", "content-length", "content-encoding"})


class _Pass(RequestHandler):
    """Passes everything on, as it comes, to one of two servers."""

    SUPPORTED_METHODS = ("GET", "POST", "HEAD", "DELETE")

    def initialize(self, port: int) -> None:
        self._port = port

    async def _pass(self, *_: str) -> None:
        headers = HTTPHeaders(self.request.headers)
        headers["X-Forwarded-For"] = self.request.remote_ip or ""
        request = HTTPRequest(
            f"http://127.0.0.1:{self._port}{self.request.uri}",
            method=self.request.method or "GET",
            headers=headers,
            body=self.request.body or (b"" if self.request.method == "POST" else None),
            follow_redirects=False,
            connect_timeout=600,
            request_timeout=600,
            header_callback=self._take,
            streaming_callback=self._give,
            decompress_response=False,
        )
        self.clear()
        client = AsyncHTTPClient(force_instance=True)
        answer = await client.fetch(request, raise_error=False)
        self.set_status(answer.code)
        if not self._finished:
            self.finish()

    get = post = head = delete = _pass  # type: ignore[assignment]

    def _take(self, line: str) -> None:
        if line.startswith("HTTP/"):
            self.set_status(int(line.split()[1]))
        elif ":" in line:
            name, _, value = line.partition(":")
            if name.lower() not in _HOP:
                self.add_header(name, value.strip())

    def _give(self, chunk: bytes) -> None:
        self.write(chunk)
        self.flush()


@asynccontextmanager
async def front(hub_port: int, service_port: int, prefix: str) -> AsyncIterator[str]:
    """Yield the address at which both are found."""
    application = Application(
        [(rf"{prefix}.*", _Pass, {"port": service_port}), (".*", _Pass, {"port": hub_port})],
        log_function=lambda _: None,
    )
    server = HTTPServer(application)
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(socket)
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.stop()
    await server.close_all_connections()
