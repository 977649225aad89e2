"""Ports that nobody else is given while a kernel starts, runs and restarts.

The stock provisioner picks a port by binding to port 0, closes the socket and
hopes that the port is still free when the kernel binds it; among fifty kernels
started at once, about one loses that race and never answers.

Here the socket stays open, bound and never listening. On Linux a second socket
may bind the same port when both have ``SO_REUSEADDR`` and none of them listens
(socket(7)). Every kernel's sockets have it: libzmq, and the TCP servers of
Go, Java and Rust, set it on Unix. Meanwhile the system gives the port neither
to a bind to port 0 nor to an outgoing connection.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Sequence

from jupyter_client.connect import LocalPortCache

#: Whether a bound socket keeps its port for the kernel on this system.
SUPPORTED = sys.platform == "linux"


class PortReservation:
    """Some TCP ports of one local address, kept until :meth:`close`.

    Raises ``OSError`` when the address is not local or no port is left.
    The ports are also entered in jupyter_client's own ``LocalPortCache``, so
    that kernels of the stock provisioner in this process are not given them.
    """

    def __init__(self, ip: str, count: int) -> None:
        sockets = _bound_sockets(ip, count)
        #: The reserved port numbers, ``count`` of them.
        self.ports: tuple[int, ...] = tuple(sock.getsockname()[1] for sock in sockets)
        LocalPortCache.instance().currently_used_ports.update(self.ports)
        self._close = weakref.finalize(self, _let_go, sockets, self.ports)

    def close(self) -> None:
        """Let go of the ports. May be repeated; also happens when this object is collected."""
        self._close()


def _bound_sockets(ip: str, count: int) -> list[socket.socket]:
    """Bind ``count`` sockets to ports that no stock kernel of this process is about to bind."""
    taken = LocalPortCache.instance().currently_used_ports
    kept: list[socket.socket] = []
    passed: list[socket.socket] = []
    try:
        while len(kept) < count:
            sock = _bound_socket(ip)
            (passed if sock.getsockname()[1] in taken else kept).append(sock)
    except OSError:
        _close_all(kept)
        raise
    finally:
        _close_all(passed)
    return kept


def _bound_socket(ip: str) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((ip, 0))
    except OSError:
        sock.close()
        raise
    return sock


def _let_go(sockets: Sequence[socket.socket], ports: Sequence[int]) -> None:
    _close_all(sockets)
    LocalPortCache.instance().currently_used_ports.difference_update(ports)


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
