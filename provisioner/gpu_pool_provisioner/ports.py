"""A local provisioner that reserves its kernel's ports, see :mod:`gpu_pool_provisioner.ports`."""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from jupyter_client.connect import LocalPortCache, port_names
from jupyter_client.localinterfaces import is_local_ip
from jupyter_client.provisioning.local_provisioner import LocalProvisioner


class ReservingProvisioner(LocalProvisioner):
    """The stock provisioner, with ports that nobody else is given meanwhile."""

    _ports: PortReservation | None = None

    @property
    def _manager(self) -> Any:
        """The kernel manager. jupyter_client gives every provisioner one."""
        return self.parent

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports where the stock provisioner would, and keep them reserved."""
        manager = self._manager
        theirs = manager.transport != "tcp" or not manager.cache_ports or not is_local_ip(manager.ip)
        if theirs or not SUPPORTED or (self._ports and 0 not in manager.ports):
            return
        self._close_ports()
        manager.cleanup_connection_file()  # of a start that failed, with other ports in it
        self._ports = PortReservation(manager.ip, len(port_names))
        for name, port in zip(port_names, self._ports.ports, strict=True):
            setattr(manager, name, port)
        self.ports_cached = True

    def _close_ports(self) -> None:
        if self._ports is not None:
            self._ports.close()
            self._ports = None
            self.ports_cached = False


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
        #: Releases the ports. May be called repeatedly; also happens when this object is collected.
        self.close = weakref.finalize(self, _release, sockets, self.ports)


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


def _release(sockets: Sequence[socket.socket], ports: Sequence[int]) -> None:
    _close_all(sockets)
    LocalPortCache.instance().currently_used_ports.difference_update(ports)


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
