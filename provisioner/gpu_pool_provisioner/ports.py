"""A kernel's ports, kept for it from the moment they are chosen until it has ended."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import weakref
from collections.abc import Iterable
from typing import Final

from jupyter_client.connect import LocalPortCache

#: Whether a bound socket keeps its port for the kernel on this system.
SUPPORTED = sys.platform == "linux"


class PortReservation:
    """Some TCP ports of one local address, kept until :meth:`close`; never by a child that is forked.

    Raises ``OSError`` when the address is not local or no port is left.
    The ports are also entered in jupyter_client's own ``LocalPortCache``, so
    that kernels of the stock provisioner in this process are not given them.
    """

    def __init__(self, ip: str, count: int, *, listening: bool = False) -> None:
        """Reserve ``count`` ports of the address ``ip``.

        With ``listening``, each socket listens from the moment in which its port is chosen, so that no
        other user of this machine can: whoever is to answer there takes over a :meth:`descriptor`. Without,
        a program that is started later can listen there, and so can anybody else who is sooner.
        """
        theirs = LocalPortCache.instance().currently_used_ports
        opened: list[socket.socket] = []
        ours: dict[int, socket.socket] = {}
        try:
            while len(ours) < count:
                sock = socket.socket()
                opened.append(sock)
                if not listening:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((ip, 0))
                if listening:
                    sock.listen()
                    # Only now, when nobody else can listen here: once this process has ended, whoever goes
                    # on with the kernel is not held up by connections that are just being forgotten.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.setblocking(False)
                port = sock.getsockname()[1]
                if port not in theirs:  # which a stock kernel of this process is about to bind
                    ours[port] = sock
        except OSError:
            ours.clear()
            raise
        finally:
            for sock in opened:
                if sock not in ours.values():
                    sock.close()
        theirs.update(ours)
        self._keep(ours)

    @classmethod
    def inherited(cls, descriptors: Iterable[int]) -> PortReservation:
        """Return the ports at which the process that started this one has listened, by its sockets.

        Raises ``OSError`` for a descriptor that is not a socket's.
        """
        self = cls.__new__(cls)
        opened: dict[int, socket.socket] = {}
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            sock.set_inheritable(False)  # not for the kernel that this process starts
            opened[sock.getsockname()[1]] = sock
        self._keep(opened)
        return self

    def _keep(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        #: The reserved port numbers.
        self.ports = tuple(sockets)
        #: Releases the ports. May be called repeatedly; also happens when this object is collected.
        self.close = weakref.finalize(self, _release, sockets)
        _reservations.add(self)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The sockets, for a process to inherit."""
        return tuple(sock.fileno() for sock in self._sockets.values())

    def descriptor(self, port: int) -> int:
        """Return a new descriptor of the socket that listens on the port; it is the caller's to close."""
        return os.dup(self._sockets[port].fileno())


def _release(sockets: dict[int, socket.socket]) -> None:
    for sock in sockets.values():
        sock.close()
    LocalPortCache.instance().currently_used_ports.difference_update(sockets)


#: Of the process, as that is what is forked.
_reservations: Final[weakref.WeakSet[PortReservation]] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close in a forked child what belongs to its parent's ports: they would outlive the parent by it.

    Those sockets that ZeroMQ has taken over as well, and its connections there, of which it tells nobody: all
    that is bound at these ports. Nobody else uses them in a child, which has none of ZeroMQ's threads.
    """
    ports = {sock.getsockname()[:2] for each in _reservations for sock in each._sockets.values()}
    for each in list(_reservations):
        each.close()
    _reservations.clear()
    if not ports:
        return
    anywhere = {port for host, port in ports if host == "0.0.0.0"}  # noqa: S104 - nothing is bound
    with os.scandir("/proc/self/fd") as listed:
        descriptors = [int(each.name) for each in listed]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the one by which they were listed
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as sock:
                    name = sock.getsockname()
                if name[:2] in ports or (sock.family == socket.AF_INET and name[1] in anywhere):
                    os.close(descriptor)


os.register_at_fork(after_in_child=_let_go_in_child)
