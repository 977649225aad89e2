"""tornado's HTTP server with limits for everybody, and the Unix socket on which it knows every peer."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tornado.http1connection import HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream
from tornado.web import Application

from gpu_pool.audit.callers import Peer
from gpu_pool.service.callers import ACCOUNTS, PeerIdentity, peer_of
from gpu_pool.service.connections import (
    Connection,
    ConnectionLimits,
    ConnectionOwner,
    Connections,
    client_address,
    counted_by,
    is_within,
)
from gpu_pool_client import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client._forks import close_in_children
from gpu_pool_client._remote.bodies import MOST_BODY
from gpu_pool_client._remote.endpoints import check_length

_MOST_HEADERS: Final = 16 * 1024
#: Seconds in which a request's headers must have come, idle time before them included.
_HEADERS_WITHIN: Final = 60.0
#: Seconds in which its body must have come then.
_BODY_WITHIN: Final = 10.0


class LimitedServer(HTTPServer):
    """Serves an application to so many connections at once: by address until it is known whose they are.

    What is said of clients on their way is passed over, unless a trusted proxy says it.
    """

    name = "TCP"
    _connections_of: dict[IOStream, Connection]

    def initialize(  # type: ignore[override]
        self,
        application: Application,
        log: logging.Logger,
        limits: ConnectionLimits,
        holds: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Take the settings. Called by tornado when the server is made."""
        super().initialize(
            application,
            max_header_size=_MOST_HEADERS,
            idle_connection_timeout=_HEADERS_WITHIN,
            body_timeout=_BODY_WITHIN,
            max_body_size=MOST_BODY,
            max_buffer_size=2 * MOST_BODY,
        )
        self._counts = Connections(self.name, limits, log, holds)
        self._connections_of = {}

    def add_sockets(self, sockets: Iterable[socket.socket]) -> None:
        """Listen there. Called by tornado. No child that is forked does, which may outlive this process."""
        listening = list(sockets)
        for each in listening:
            close_in_children(each)
        super().add_sockets(listening)

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection, unless there are too many already. Called by tornado for each."""
        close_in_children(stream.socket)
        try:
            address = self.address_of(stream, address)
        except OSError:  # it has gone again
            stream.close()
            return
        connection = Connection(stream, self.owner(address))
        if not self._counts.add(connection):
            stream.close()
            return
        self._connections_of[stream] = connection
        super().handle_stream(stream, address)

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Wait for a request. Called by tornado for each, before anything of it has come."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        connection, context = self._connections_of[server_conn.stream], server_conn.context
        is_first = not hasattr(context, "counted")
        context.counted = connection  # type: ignore[attr-defined] # read by connection_of and client_of
        self.note_address(connection, context, "")
        self._counts.wait(connection, is_waiting=True)
        alarm = None
        if is_first:
            within = self._counts.limits.first_request_within
            alarm = asyncio.get_running_loop().call_later(within, connection.stream.close)
        return _RequestObserver(
            self, super().start_request(server_conn, request_conn), connection, context, alarm
        )

    def note_address(self, connection: Connection, context: Any, forwarded: str) -> bool:
        """Note the address of a request; return False where too many connections are that address's.

        Of a connection that a trusted proxy has opened each request has an address of its own.
        """
        proxies = self._counts.limits.proxies
        context.client = counted_by(client_address(context.remote_ip, forwarded, proxies))
        if not is_within(context.remote_ip, proxies):
            return True
        return self._counts.assign(connection, self._at(context.client))

    def note_complete(self, connection: Connection) -> None:
        """Take note that a request has come as a whole, and is answered now."""
        self._counts.wait(connection, is_waiting=False)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection. Called by tornado at its end."""
        super().on_close(server_conn)
        assert isinstance(server_conn, HTTP1ServerConnection)
        connection = self._connections_of.pop(server_conn.stream, None)
        if connection is not None:
            self._counts.remove(connection)

    def address_of(self, stream: IOStream, address: Any) -> Any:  # noqa: ARG002 - for those that look
        """Return what is known of whoever has connected. Raises ``OSError`` if they have gone again."""
        return address

    def owner(self, address: Any) -> ConnectionOwner:
        """Return whose a new connection is."""
        return self._at(counted_by(address[0]))

    def _at(self, client: str) -> ConnectionOwner:
        """Return whose the connections are of which an address is all that is known."""
        limits = self._counts.limits
        most = None if is_within(client, limits.proxies) else limits.per_address
        return ConnectionOwner(f"address {client}", most, is_address=True)


class PeerServer(LimitedServer):
    """A request comes from the ``gpu_pool.audit.callers.Peer`` of its connection; each person has a limit."""

    name = "The socket"

    def initialize(  # type: ignore[override]
        self,
        application: Application,
        log: logging.Logger,
        limits: ConnectionLimits,
        identity: PeerIdentity,
        holds: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Take the settings; ``identity`` says who a peer is to the pool. Called by tornado."""
        super().initialize(application, log, limits, holds)
        self._identity = identity

    def address_of(self, stream: IOStream, address: Any) -> Any:  # noqa: ARG002 - Unix sockets have none
        """Return the peer."""
        return peer_of(stream.socket)

    def owner(self, address: Any) -> ConnectionOwner:
        """Return the person, and whether they are somebody for whom connections are kept."""
        try:
            caller = self._identity.caller(address)
        except NotAllowed:  # one that cannot be seen, who is told so at the first request
            return self._counts.person(person(address), "", is_admin=False)
        return self._counts.person(person(address), caller.user, is_admin=caller.is_admin)


def person(peer: Peer) -> str:
    """Return what somebody's connections are counted by: their uid's name, or that of its owner.

    Whoever has a person's uid in a container of somebody else's must not be in that person's way.
    The subordinate uids of a person are all theirs, wherever they are.
    """
    where = " in a container" if peer.contained and ACCOUNTS.account(peer.uid) is not None else ""
    return f"user {ACCOUNTS.user(peer.uid)}{where}"


class _RequestObserver(HTTPMessageDelegate):
    """Tells the server how far a request has come, and passes it on."""

    def __init__(
        self,
        server: LimitedServer,
        inner: HTTPMessageDelegate,
        connection: Connection,
        context: Any,
        alarm: asyncio.TimerHandle | None,
    ) -> None:
        self._server = server
        self._inner = inner
        self._connection = connection
        self._context = context
        self._alarm = alarm

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Take the headers, which say where the request comes from. Called by tornado."""
        self._end_alarm()
        forwarded = headers.get("X-Forwarded-For", "")
        if not self._server.note_address(self._connection, self._context, forwarded):
            self._connection.stream.close()
        return self._inner.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        """Take a part of the body. Called by tornado."""
        return self._inner.data_received(chunk)

    def finish(self) -> None:
        """Answer the request, which is there as a whole. Called by tornado."""
        self._server.note_complete(self._connection)
        self._inner.finish()

    def on_connection_close(self) -> None:
        """Give up. Called by tornado."""
        self._end_alarm()
        self._inner.on_connection_close()

    def _end_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()


#: Connections that may wait to be accepted: a class that arrives at once. The system may allow fewer.
BACKLOG: Final = 4096
_OTHER_FOLDER: Final = "Choose a socket in a folder that only you can write: --socket PATH."


class ServiceSocket:
    """A socket that is listened on, from construction to :meth:`close`."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = check_length(path.absolute())
        _prepare_folder(self.path.parent)
        with _locked(self.path):
            _clear(self.path)
            self.listener = _listen(self.path, mode)
            self._identity = _identity(self.path)

    def close(self) -> None:
        """Stop listening, and remove the file unless it is another's by now."""
        self.listener.close()
        with suppress(FileNotFoundError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


def _prepare_folder(folder: Path) -> None:
    """Make the folder, and refuse one into which others could put a socket of theirs."""
    try:
        folder.mkdir(parents=True)
        # Others come through it to the socket, whose own mode says who may.
        folder.chmod(0o755)
    except FileExistsError:
        pass
    except OSError as error:
        raise NotAllowed(
            f"The folder {folder} cannot be created: {error.strerror}.", _OTHER_FOLDER
        ) from error
    found = folder.resolve().stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAllowed(f"The folder {folder} can be written to by other users.", _OTHER_FOLDER)
    for above in folder.resolve().parents:
        found = above.stat()
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or others:
            raise NotAllowed(f"Other users can replace {folder}: {above} belongs to them.", _OTHER_FOLDER)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no two services look for a socket and make one at once."""
    # A file of its own, which others cannot open: they could lock the folder, too.
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotAllowed(f"{lock} cannot be created: {error.strerror}.", _OTHER_FOLDER) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    """Remove the socket of a service that is gone; refuse one that is served, and any other file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BadRequest(f"{path} exists and is not a socket.", "Choose another name: --socket PATH.")
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # so many wait to be served that its backlog is full
            raise PoolUnreachable(f"{path} is already served, by a process that is very busy.") from None
        # For the one that connects these are the credentials of the one that listens.
        process = peer_of(probe).process
        raise PoolUnreachable(
            f"{path} is already served by process {process.pid if process else '(not to be seen)'}.",
            "End that process first, or choose another socket: --socket PATH.",
        )


def _listen(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        # Nobody can connect before listen, so nobody comes in between.
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = os.strerror(error.errno or errno.EIO)
        raise NotAllowed(f"The socket {path} cannot be created: {why}.", _OTHER_FOLDER) from error
    return listener


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
