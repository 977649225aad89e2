"""The server's end of reverse tunnels: jobs connect to it, and it reaches their kernels' ports through that.

``gpu_pool_kernels.inkernel.reverse_tunnel`` is the other end, and says how the two talk. What passes is
encrypted (Curve) or signed by those who talk through it, as it is where the server connects to the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from gpu_pool_client import BadRequest
from gpu_pool_client._background import background_loop
from gpu_pool_client._forks import close_in_children
from gpu_pool_client._log import get_logger

T = TypeVar("T")
_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: The ports of a job that can be reached, by the names that its supervisor gives them.
NAMES: Final = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port", "supervisor")
#: Seconds in which a job shows that it has its key, and in which it makes a connection that it was asked for.
_WITHIN: Final = 10.0
#: Connections at a time of which it is not known yet whose they are; one more is closed at once.
_MOST_UNKNOWN: Final = 64
#: Of a connection in which nothing is said: seconds until it is asked whether it still is, and how often.
#: The jobs' ends do the same.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
#: Bytes that are passed on at a time.
_CHUNK: Final = 65_536


@dataclass(slots=True)
class _Tunnel:
    """What is known of one job."""

    key: bytes
    #: The connection in which it is asked for others; None while there is none.
    control: asyncio.StreamWriter | None = None
    #: Ports of this machine at which the job's are reached, by name.
    ports: Mapping[str, int] = field(default_factory=dict)
    servers: list[asyncio.Server] = field(default_factory=list)
    #: Connections that it was asked for, by their names.
    awaited: dict[str, asyncio.Future[_Streams]] = field(default_factory=dict)


class _Sockets:
    """Sockets of jobs' tunnels, of which a child that is forked from this process is to have none.

    A job takes its connection for a sign that its server lives, which may have been killed.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[asyncio.StreamWriter | asyncio.Server] = weakref.WeakSet()

    def add(self, opened: asyncio.StreamWriter | asyncio.Server) -> None:
        """Have it closed in children, for as long as anybody has it."""
        self._all.add(opened)

    def close(self) -> None:
        """Let go of them in a child, not telling their transports: the selector is the parent's, too."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for opened in list(self._all):
            one = opened.sockets if isinstance(opened, asyncio.Server) else [opened.get_extra_info("socket")]
            for each in one:
                if each.fileno() >= 0:
                    os.dup2(nothing, each.fileno(), inheritable=False)
        os.close(nothing)
        self._all.clear()


class ReverseTunnels:
    """Listens for jobs, from the first that may connect on, in a thread of its own.

    Parameters
    ----------
    ports
        Where to listen: the first of these that is free; 0 for any.
    """

    def __init__(self, ports: Sequence[int] = (0,)) -> None:
        self._ports = ports
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._tunnels: dict[str, _Tunnel] = {}
        self._unknown = 0
        #: What a job would take for a sign of this process's life.
        self._sockets = _Sockets()
        close_in_children(self._sockets)

    async def expect(self, name: str) -> Mapping[str, Any]:
        """Return what the job of this name needs to connect: ``port``, ``name`` and ``key``.

        Raises ``BadRequest`` where none of the ports can be listened at.
        """
        tunnel = _Tunnel(secrets.token_bytes(32))
        port = await self._do(self._expect(name, tunnel))
        return {"port": port, "name": name, "key": tunnel.key.hex()}

    def ports(self, name: str) -> Mapping[str, int]:
        """Return where on this machine a job's ports are reached, by name; none while it is not connected."""
        tunnel = self._tunnels.get(name)
        return tunnel.ports if tunnel is not None and tunnel.control is not None else {}

    def forget(self, name: str) -> None:
        """Close the tunnel of a job that has ended."""
        tunnel = self._tunnels.pop(name, None)
        if tunnel is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(_close, tunnel)

    async def close(self) -> None:
        """Close them all, and listen no more."""
        if self._loop is not None:
            await self._do(self._close())

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = background_loop("slurm-tunnels")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for tunnel in self._tunnels.values():
            _close(tunnel)
        self._tunnels.clear()
        self._server = None

    async def _expect(self, name: str, tunnel: _Tunnel) -> int:
        server = self._server or await self._listen()
        before = self._tunnels.get(name)
        if before is not None:
            _close(before)
        self._tunnels[name] = tunnel
        return int(server.sockets[0].getsockname()[1])

    async def _listen(self) -> asyncio.Server:
        for port in self._ports:
            with suppress(OSError):
                self._server = await asyncio.start_server(self._accept, None, port, family=socket.AF_INET)
                self._sockets.add(self._server)
                return self._server
        raise BadRequest(
            f"None of the {len(self._ports)} ports is free at which jobs were to connect to this server.",
            "Name more in c.SlurmSettings.server_ports.",
        )

    # -- Jobs that connect ---------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sockets.add(writer)
        _keep_alive(writer.get_extra_info("socket"))
        if self._unknown >= _MOST_UNKNOWN:
            writer.close()
            return
        self._unknown += 1
        try:
            found = await asyncio.wait_for(self._identify(reader, writer), _WITHIN)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            found = None
        finally:
            self._unknown -= 1
        if found is None:
            writer.close()
            return
        tunnel, what = found
        if what == "control":
            await self._keep(tunnel, reader, writer)
        elif (wanted := tunnel.awaited.pop(what, None)) is not None and not wanted.done():
            wanted.set_result((reader, writer))
        else:
            writer.close()

    async def _identify(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[_Tunnel, str] | None:
        """Return whose connection it is and what for; None for nobody's."""
        ours = secrets.token_hex(16)
        writer.write(ours.encode() + b"\n")
        name, what, theirs, shown = (await reader.readuntil()).decode().split()
        tunnel = self._tunnels.get(name)
        # Somebody else's takes as long as one of ours with another key.
        key = secrets.token_bytes(32) if tunnel is None else tunnel.key
        if not hmac.compare_digest(shown.encode(), _proof(key, "job", what, ours, theirs).encode()):
            get_logger().warning("A connection was refused that did not come from a kernel's job.")
            return None
        writer.write(_proof(key, "server", what, ours, theirs).encode() + b"\n")
        await writer.drain()
        return None if tunnel is None else (tunnel, what)

    async def _keep(
        self, tunnel: _Tunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Have a job's ports reachable for as long as this connection lasts."""
        if tunnel.control is not None:
            tunnel.control.close()  # it has connected anew
        if not tunnel.ports:
            try:
                await _listen_for(tunnel)
            except OSError as error:  # too many files are open, say: the job connects again
                get_logger().warning("The ports of a kernel's job cannot be reached yet: %s", error)
                writer.close()
                return
        tunnel.control = writer
        with suppress(OSError):
            await reader.read()  # it says nothing more: this ends with it
        writer.close()
        if tunnel.control is writer:
            tunnel.control = None


async def _listen_for(tunnel: _Tunnel) -> None:
    """Listen for whoever wants to reach a job, at a port for each of its own. Raises ``OSError``."""
    servers: list[asyncio.Server] = []
    try:
        for name in NAMES:
            server = await asyncio.start_server(_opener(tunnel, name), "127.0.0.1", 0)
            servers.append(server)  # also of those before one that fails
    except BaseException:
        for server in servers:
            server.close()
        raise
    tunnel.servers = servers
    ports = (int(server.sockets[0].getsockname()[1]) for server in servers)
    tunnel.ports = dict(zip(NAMES, ports, strict=True))


def _opener(tunnel: _Tunnel, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return what connects whoever connects here with a port of a job."""

    async def opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what = secrets.token_hex(8)
        wanted = tunnel.awaited[what] = asyncio.get_running_loop().create_future()
        try:
            if tunnel.control is None:
                return
            tunnel.control.write(f"{what} {name}\n".encode())
            there = await asyncio.wait_for(wanted, _WITHIN)
            await _pass_on((reader, writer), there)
        except (OSError, asyncio.TimeoutError):
            get_logger().debug("The job did not connect its %s.", name)
        finally:
            tunnel.awaited.pop(what, None)
            writer.close()

    return opened


async def _pass_on(one: _Streams, other: _Streams) -> None:
    """Pass on what two connections send to one another, until one of them ends."""
    ways = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one[1].close()
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _keep_alive(connected: socket.socket) -> None:
    """Let a node that is gone without a word end the connection, within half a minute."""
    with suppress(OSError):  # it has ended
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # other systems name them otherwise
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _close(tunnel: _Tunnel) -> None:
    for server in tunnel.servers:
        server.close()
    if tunnel.control is not None:
        tunnel.control.close()


def _proof(key: bytes, *parts: str) -> str:
    return hmac.new(key, " ".join(parts).encode(), hashlib.sha256).hexdigest()
