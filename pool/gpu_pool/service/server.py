"""tornado's HTTP server, which keeps everybody within limits; on a Unix socket it knows every peer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import Any, Final

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application

from gpu_pool.service.callers import peer_of
from gpu_pool_client.remote.wire import MOST_BODY

_MOST_HEADERS: Final = 16 * 1024
#: Seconds in which a request's headers have come, idle time before them included, and its body.
_HEADERS_WITHIN, _BODY_WITHIN = 60.0, 10.0


class LimitedServer(HTTPServer):
    """Serves an application to so many connections at once. What proxies say of clients is passed over."""

    _log: logging.Logger
    _most: int
    _open: Counter[Hashable]

    def initialize(self, application: Application, log: logging.Logger, most: int) -> None:  # type: ignore[override]
        """Take the settings. Called by tornado when the server is made."""
        super().initialize(
            application,
            max_header_size=_MOST_HEADERS,
            idle_connection_timeout=_HEADERS_WITHIN,
            body_timeout=_BODY_WITHIN,
            max_body_size=MOST_BODY,
            max_buffer_size=2 * MOST_BODY,
        )
        self._log, self._most, self._open = log, most, Counter()

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection, unless there are too many already. Called by tornado for each."""
        try:
            address = self.address_of(stream, address)
        except OSError:  # it has gone again
            stream.close()
            return
        counted = self.counted(address)
        if self._open[counted] >= self._most:
            self._log.warning("%s: %d connections already: one more is refused", counted, self._most)
            stream.close()
            return
        self._open[counted] += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection. Called by tornado at its end."""
        super().on_close(server_conn)
        counted = self.counted(server_conn.context.address)  # type: ignore[attr-defined]
        self._open[counted] -= 1
        if not self._open[counted]:
            del self._open[counted]

    def address_of(self, stream: IOStream, address: Any) -> Any:  # noqa: ARG002 - for those that look
        """Return what is known of whoever has connected. Raises ``OSError`` if they have gone again."""
        return address

    def counted(self, address: Any) -> Hashable:  # noqa: ARG002 - behind a proxy all have the same
        """Return what the connections are counted by."""
        return "TCP"


class PeerServer(LimitedServer):
    """The address of a request's connection is its ``callers.Peer``; each user has a limit of their own."""

    def address_of(self, stream: IOStream, address: Any) -> Any:  # noqa: ARG002 - Unix sockets have none
        """Return the peer."""
        return peer_of(stream.socket)

    def counted(self, address: Any) -> Hashable:
        """Return the uid, and whether in a container: root there must not be in the way of root here."""
        where = " in a container" if address.contained else ""
        return f"uid {address.uid}{where}"
