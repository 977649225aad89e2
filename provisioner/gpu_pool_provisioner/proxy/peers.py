"""Who listens on this machine's ports, and who is at the other end of a connection: as Linux tells everybody.

See proc_net_tcp.rst in Linux's documentation for the columns of ``/proc/net/tcp``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Whether this system tells it.
KNOWN: Final = sys.platform == "linux" and os.access("/proc/net/tcp", os.R_OK)

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ANY: Final = "0" * 8
_LISTENS: Final = 0x0A
_IS_CONNECTED: Final = 0x01


@dataclass(frozen=True, slots=True)
class _Row:
    """One socket of this machine."""

    #: As it is written there.
    address: str
    port: int
    far_port: int
    state: int
    uid: int


def listeners(ip: str, ports: Collection[int]) -> dict[int, set[int]]:
    """Return by port the ids of the users who listen there, at this IPv4 address or at all addresses."""
    found: dict[int, set[int]] = {port: set() for port in ports}
    address = f"{int.from_bytes(socket.inet_aton(ip), sys.byteorder):08X}"
    for row in _rows():
        # The last part of an IPv6 address is the IPv4 address that is mapped into it.
        if row.state == _LISTENS and row.port in found and row.address[-8:] in (address, _ANY):
            found[row.port].add(row.uid)
    return found


def answerers(ports: Collection[int], uid: int) -> dict[int, set[int]]:
    """Return by port the ids of those who have answered there to connections that ``uid`` has made.

    A connection that nobody has taken yet is left out: to Linux it is root's, and the port of nothing.
    """
    rows = [row for row in _rows() if row.state == _IS_CONNECTED]
    ours = {(row.far_port, row.port) for row in rows if row.uid == uid and row.far_port in ports}
    found: dict[int, set[int]] = {port: set() for port in ports}
    for row in rows:
        if (row.port, row.far_port) in ours:
            found[row.port].add(row.uid)
    return found


def _rows() -> Iterator[_Row]:
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # without IPv6
            continue
        for line in lines:
            fields = line.split()
            _, local, far, state = fields[:4]
            inode = int(fields[9])
            if inode or int(state, 16) == _LISTENS:
                address = local.partition(":")[0]
                yield _Row(address, _port(local), _port(far), int(state, 16), int(fields[7]))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
