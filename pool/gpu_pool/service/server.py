"""tornado's HTTP server on a Unix socket: it knows every peer, and keeps each within limits."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application

from gpu_pool.service.callers import peer_of
from gpu_pool_client.remote.wire import MOST_BODY

_MOST_HEADERS: Final = 16 * 1024
#: Seconds in which a request's headers have come, idle time before them included, and its body.
_HEADERS_WITHIN, _BODY_WITHIN = 60.0, 10.0


class PeerServer(HTTPServer):
    """Serves an application; the address of a request's connection is its :class:`Peer`."""

    _log: logging.Logger
    _most: int
    #: By uid, and whether in a container: root there must not be in the way of root here.
    _open: Counter[tuple[int, bool]]

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

    def handle_stream(self, stream: IOStream, address: Any) -> None:  # noqa: ARG002 - Unix sockets have none
        """Serve a connection, unless its user has too many already. Called by tornado for each."""
        try:
            peer = peer_of(stream.socket)
        except OSError:  # it has gone again
            stream.close()
            return
        if self._open[peer.uid, peer.contained] >= self._most:
            self._log.warning("uid %d has %d connections already: one more is refused", peer.uid, self._most)
            stream.close()
            return
        self._open[peer.uid, peer.contained] += 1
        super().handle_stream(stream, peer)  # type: ignore[arg-type]

    def on_close(self, server_conn: object) -> None:
        """Forget a connection. Called by tornado at its end."""
        super().on_close(server_conn)
        peer = server_conn.context.address  # type: ignore[attr-defined]
        self._open[peer.uid, peer.contained] -= 1
        if not self._open[peer.uid, peer.contained]:
            del self._open[peer.uid, peer.contained]
