"""The connection between a proxy and its kernel on this machine, which no other user may be in between of.

A kernel that speaks ``ipc`` listens in a folder that is its user's alone. One that speaks only TCP listens
where anybody may have listened before it. So it is told a loopback address and ports that nobody can guess,
and it is looked who listens before anything is connected, and who has answered before anything is sent: Linux
tells everybody who listens on this machine's ports, and who is at the other end of a connection (the columns
of ``/proc/net/tcp`` are those of proc_net_tcp.rst in its documentation).
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jupyter_client.connect import port_names
from jupyter_client.session import Session
from jupyter_core.paths import jupyter_data_dir, secure_write

from gpu_pool_client._folders import HeldFolder
from gpu_pool_provisioner.environment import is_ipython
from gpu_pool_provisioner.ports import SUPPORTED, PortReservation
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.relay import Relay

#: Whether this system tells who listens.
_TELLS: Final = sys.platform == "linux" and os.access("/proc/net/tcp", os.R_OK)
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ANY: Final = "0" * 8
_LISTENS: Final = 0x0A
_IS_CONNECTED: Final = 0x01
#: Loopback TCP, which kernels of every language speak, on systems that have a single such address.
_IP: Final = "127.0.0.1"
#: Where Linux gives no ports to connections and to programs that ask for any (ip_local_port_range).
_PORTS: Final = range(10_000, 32_768)
_random: Final = secrets.SystemRandom()
#: Seconds between two looks at who listens. Kernels take a second to start.
_LOOK_EVERY: Final = 0.02
#: Seconds in which a kernel that listens for requests does so on its other channels; some have no stdin.
_ALL_WITHIN: Final = 3.0
#: How the names of folders for sockets begin.
_SOCKETS: Final = "gpu-pool-"
#: And of those in which one is tried.
_TRIAL: Final = "trial-"
#: Bytes of the longest name of a Unix socket (unix(7)), without the zero at its end.
_LONGEST_PATH: Final = 107


class PortStolenError(Exception):
    """Another user listens where the kernel was to listen. Nothing has been sent there."""


def _fits(sockets: str) -> bool:
    return len(os.fsencode(f"{sockets}-{len(port_names)}")) <= _LONGEST_PATH


def _own_folder() -> str:
    """Return a folder for sockets in which nobody but this user makes any; empty where there is none.

    In Jupyter's data, where that is on a file system that has sockets, and short enough a name.
    """
    folder = Path(jupyter_data_dir(), "gpu-pool", "sockets")
    if not _fits(str(folder / f"{_SOCKETS}01234567-01234567" / "kernel")):
        return ""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        trial = HeldFolder(folder, _TRIAL)
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                tried.bind(f"{trial.path}/tried")
        finally:
            trial.close()
    except OSError:
        return ""
    return str(folder)


class BackendConnection:
    """Where the real kernel listens; keys are those of the frontends' connection.

    The file lies in a private folder beside the frontends' connection file and
    has its name, by which programs in a kernel find out the kernel's id.
    """

    def __init__(
        self, outer_file: str, command: Sequence[str], sockets: str = "", *, outlives_server: bool = False
    ) -> None:
        """Choose where the kernel of this command is to listen, and write the file. Raises ``OSError``.

        ``sockets`` is how the paths of those begin on which a kernel listens that comes back from disk. One
        that outlives its server listens where nobody else can take its paths meanwhile, if there is a place.
        """
        outer = Path(outer_file).resolve()
        asked = json.loads(outer.read_text())
        self._reserved: PortReservation | None = None
        self._sockets: HeldFolder | None = None
        self._folder = HeldFolder(outer.parent, ".gpu-pool-")
        try:
            is_ipc = asked["transport"] == "ipc" or is_ipython(command)
            parent = (_own_folder() if outlives_server else "") or tempfile.gettempdir()
            where = self._ipc(sockets, parent) if is_ipc else None
            #: What the file says.
            self.connection: dict[str, Any] = {**asked, **(where or self._tcp())}
            self.file = f"{self._folder.path}/{outer.name}"
            with secure_write(self.file) as file:
                json.dump(self.connection, file)
        except BaseException:
            self.close()
            raise
        #: How a command may name the frontends' file, which may lie behind a link. The longest first, since
        #: what is relative may be a part of the others.
        names = {str(outer), str(Path(outer_file).absolute()), outer_file}
        self._outer_names = sorted(names, key=len, reverse=True)

    def _ipc(self, again: str, parent: str) -> Mapping[str, Any] | None:
        """Return where the kernel listens in a folder that is its user's alone; None where no path fits."""
        if again:
            self._sockets = HeldFolder.again(str(Path(again).parent), _SOCKETS)
        else:
            # Not beside the file: homes may be on file systems that have no sockets, and have long names.
            self._sockets = HeldFolder(parent, _SOCKETS)
        connection = {"transport": "ipc", "ip": f"{self._sockets.path}/kernel"}
        if not _fits(connection["ip"]):
            return None
        return {**connection, **{name: number for number, name in enumerate(port_names, 1)}}

    def _tcp(self) -> Mapping[str, Any]:
        if _TELLS and SUPPORTED:
            ip, ports = _unguessable(len(port_names))
        else:
            self._reserved = PortReservation(_IP, len(port_names))
            ip, ports = _IP, list(self._reserved.ports)
        return {"transport": "tcp", "ip": ip, **dict(zip(port_names, ports, strict=True))}

    @property
    def _ports(self) -> list[int]:
        return [self.connection[name] for name in port_names]

    @property
    def _is_checked(self) -> bool:
        """Whether others may listen in the kernel's place, and the system tells."""
        return _TELLS and self.connection["transport"] == "tcp"

    def command(self, command: list[str]) -> list[str]:
        """Return a kernel's command with this connection file in place of the frontends'."""
        own: list[str] = []
        for word in command:
            named = next((name for name in self._outer_names if name in word), None)
            own.append(word if named is None else word.replace(named, self.file))
        return own

    async def connected(self, session: Session, front: Channels, pid: int) -> Relay:
        """Return a relay to the kernel with this pid, which may be sent to. Raises ``PortStolenError``.

        Does not return while a kernel that speaks TCP does not listen yet.
        """
        if not self._is_checked:
            return Relay(self.connection, session, front)
        known = {os.getuid(), _uid_of(pid)}
        found = await self._until_it_listens(known)
        relay = Relay(self.connection, session, front, once=[name.removesuffix("_port") for name in found])
        try:
            await self._until_it_has_answered([self.connection[name] for name in found], known)
        except BaseException:
            relay.close()
            raise
        return relay

    def is_stolen(self, pid: int) -> bool:
        """Whether another user listens where the kernel with this pid was to listen."""
        if not self._is_checked:
            return False
        found = _listeners(self.connection["ip"], self._ports)
        return not _only(found, {os.getuid(), _uid_of(pid)})

    async def _until_it_listens(self, known: set[int]) -> list[str]:
        """Return the names of the ports on which the kernel listens: all, unless it leaves some out."""
        give_up_at = math.inf
        while True:
            found = _listeners(self.connection["ip"], self._ports)
            if not _only(found, known):
                raise PortStolenError
            listens = [name for name in port_names if found[self.connection[name]]]
            if len(listens) == len(port_names) or time.monotonic() > give_up_at:
                return listens
            if give_up_at == math.inf and {"shell_port", "iopub_port"} <= set(listens):
                give_up_at = time.monotonic() + _ALL_WITHIN
            await asyncio.sleep(_LOOK_EVERY)

    async def _until_it_has_answered(self, ports: Collection[int], known: set[int]) -> None:
        while True:
            found = _answerers(ports, os.getuid())
            if not _only(found, known):
                raise PortStolenError
            if all(found.values()):
                return
            await asyncio.sleep(_LOOK_EVERY)

    def close(self) -> None:
        """Remove the file and let go of where the kernel listened. May be repeated."""
        if self._reserved is not None:
            self._reserved.close()
        if self._sockets is not None:
            self._sockets.close()
        self._folder.close()


def _unguessable(count: int) -> tuple[str, list[int]]:
    """Return a loopback address and ports of it where nobody listens. Raises ``OSError`` if there are none.

    They are not kept: a socket that keeps them for the kernel shows them to everybody, who could then listen
    there before it. Linux has all of 127.0.0.0/8 (RFC 6890).
    """
    ip = ".".join(["127", *(str(_random.randrange(1, 255)) for _ in range(3))])
    found: list[int] = []
    for port in _random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as trial:
            try:
                trial.bind((ip, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return ip, found
    raise OSError(errno.EADDRINUSE, f"no {count} ports of {ip} are free")


def _only(found: Mapping[int, set[int]], known: set[int]) -> bool:
    return all(uids <= known for uids in found.values())


def _uid_of(pid: int) -> int:
    """Return whose a process is: ours, unless its command changes that; ours as well once it has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return os.getuid()


@dataclass(frozen=True, slots=True)
class _Socket:
    """One socket of this machine."""

    #: As it is written there.
    address: str
    port: int
    far_port: int
    state: int
    uid: int


def _listeners(ip: str, ports: Collection[int]) -> dict[int, set[int]]:
    """Return by port the ids of the users who listen there, at this IPv4 address or at all addresses."""
    found: dict[int, set[int]] = {port: set() for port in ports}
    address = f"{int.from_bytes(socket.inet_aton(ip), sys.byteorder):08X}"
    for row in _rows():
        # The last part of an IPv6 address is the IPv4 address that is mapped into it.
        if row.state == _LISTENS and row.port in found and row.address[-8:] in (address, _ANY):
            found[row.port].add(row.uid)
    return found


def _answerers(ports: Collection[int], uid: int) -> dict[int, set[int]]:
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


def _rows() -> Iterator[_Socket]:
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
                yield _Socket(address, _port(local), _port(far), int(state, 16), int(fields[7]))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
