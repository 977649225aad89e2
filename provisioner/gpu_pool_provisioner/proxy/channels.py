"""A kernel's five sockets, seen from its frontends (front) and towards the real kernel (back).

Messages are lists of frames and are not copied. Everything here belongs to one
event loop, and may be used on its thread only. Only what arrives as a
heartbeat is handled on another, see ``loops``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hmac
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import zmq
from jupyter_client.session import DELIM, Session

from gpu_pool_client._background import background_loop
from gpu_pool_client._log import get_logger

Frames = list[zmq.Frame] | list[bytes]
Handler = Callable[[list[zmq.Frame]], None]
Channels = Mapping[str, "Channel"]

#: Messages handled before other sockets are served.
_BATCH: Final = 50
#: Sockets in one process: 200 kernels with ten each are far from the limit. The default is 1023.
_MAX_SOCKETS: Final = 16_384
#: Messages of the kernel's output that may wait for this process. Beyond, ZeroMQ drops them, as it
#: would between the kernel and a slow frontend; ten times its default, since this hop must lose nothing.
_OUTPUT_QUEUE: Final = 10_000
#: Milliseconds for which the last replies may still be sent after a socket has been closed.
_LINGER_MS: Final = 1_000
#: Seconds in which the thread of the heartbeats stops listening.
_CLOSES_WITHIN: Final = 5.0

#: Seconds without a message after which the system looks whether a connection is still there.
_KEEPALIVE: Final = 300

#: As plain numbers, and without pyzmq's own multipart calls: a message takes a third of the time.
_NOW: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

_FRONT: Final = {
    "shell": zmq.ROUTER,
    "control": zmq.ROUTER,
    "stdin": zmq.ROUTER,
    "hb": zmq.ROUTER,
    "iopub": zmq.XPUB,
}
_BACK: Final = {
    "shell": zmq.DEALER,
    "control": zmq.DEALER,
    "stdin": zmq.DEALER,
    "hb": zmq.DEALER,
    "iopub": zmq.SUB,
}


class Channel:
    """One socket: each whole message that arrives is passed to ``on_message``."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Handler, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Listen on the running loop, or on another thread's."""
        self._socket = socket
        self._pid = os.getpid()
        self._loop = loop or asyncio.get_running_loop()
        self._due = False
        #: May be replaced at any time.
        self.on_message = on_message
        if loop is None:
            self._listen()
        else:
            loop.call_soon_threadsafe(self._listen)

    def echo(self) -> None:
        """Send back whatever arrives from now on: the answer to a heartbeat."""
        self.on_message = self.send

    def send(self, frames: Frames) -> None:
        """Send a message. Never blocks: what cannot be queued for a frontend is dropped."""
        if self._socket.closed:
            return
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE, False)
        self._socket.send(frames[-1], _NOW, False)
        self._look_again()

    def close(self) -> None:
        """Stop. May be repeated. A forked child does nothing: loop and socket are its parent's."""
        if self._pid == os.getpid() and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._look_again()

    def _receive(self) -> None:
        self._due = False
        try:
            for _ in range(_BATCH):
                if self._socket.closed:
                    break
                self.on_message(self._message())
        except zmq.Again:
            pass  # that was all
        finally:
            self._look_again()

    def _message(self) -> list[zmq.Frame]:
        frames = [self._socket.recv(_NOW, False)]
        while frames[-1].more:
            frames.append(self._socket.recv(_NOW, False))
        return frames

    def _look_again(self) -> None:
        """Do not rely on the file descriptor alone: using a socket takes its signal back."""
        if not self._due and not self._socket.closed and int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            self._due = True
            self._loop.call_soon(self._receive)


class HeartbeatChannel(Channel):
    """One socket of heartbeats, which goes on while the thread that made it is busy.

    ``on_message`` and :meth:`send` are called on the thread of the heartbeats.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Handler) -> None:
        super().__init__(socket, on_message, background_loop("heartbeats"))

    def close(self) -> None:
        """Stop, and return when nothing listens any more, or after some seconds. May be repeated.

        A forked child does nothing: it has no such thread, and would wait for ever.
        """
        if self._pid != os.getpid():
            return
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._close, closed)
        try:
            closed.result(_CLOSES_WITHIN)
        except concurrent.futures.TimeoutError:
            get_logger().warning(
                "The thread of the kernels' heartbeats did not stop listening within %g seconds.",
                _CLOSES_WITHIN,
            )

    def _close(self, closed: concurrent.futures.Future[None]) -> None:
        try:
            super().close()
        finally:
            closed.set_result(None)


def bind_front(connection: Mapping[str, Any]) -> dict[str, Channel]:
    """Listen on a kernel's own ports; answer heartbeats, and nothing else yet.

    Until the caller's loop goes on, other messages wait in their sockets.
    Raises ``zmq.ZMQError`` when one of the ports is taken.
    """
    sockets = {}
    try:
        for channel, kind in _FRONT.items():
            sockets[channel] = _front_socket(kind, connection)
            sockets[channel].bind(_address(connection, channel))
    except BaseException:
        for socket in sockets.values():
            socket.close(linger=0)
        raise
    front = {channel: _kind(channel)(socket, ignore) for channel, socket in sockets.items()}
    front["hb"].echo()
    return front


def connect_back(connection: Mapping[str, Any], handlers: Mapping[str, Handler]) -> dict[str, Channel]:
    """Connect to a kernel that may not listen yet; what is sent before waits.

    The handler of "connected" is called when the kernel can be heard on stdin. It needs to be known:
    on this channel a kernel speaks first, and what it asks before is lost. It is also called when
    the kernel listens, but not in the way that ``connection`` says; see :func:`is_refusal`.
    """
    # A kernel asks for input on the stdin socket, at the address from which it got the request on shell.
    identity = uuid.uuid4().hex.encode()
    sockets = {}
    for channel, kind in _BACK.items():
        sockets[channel] = socket = _context(os.getpid()).socket(kind)
        if kind == zmq.SUB:
            socket.rcvhwm = _OUTPUT_QUEUE
            socket.subscribe(b"")
        else:
            socket.identity = identity
            socket.sndhwm = 0  # a busy kernel reads late; nothing that was submitted may be lost
        if "curve_publickey" in connection:
            # As KernelManager does: the one key pair of the connection file serves both ends.
            _use_keys(socket, connection)
            socket.curve_serverkey = connection["curve_publickey"].encode()
        socket.linger = 0
        # Networks forget connections over which nothing comes for long.
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, _KEEPALIVE
    # The last, so that it is closed after the socket that it watches.
    # Named by itself: pyzmq names it after a number that the next socket may get before this name is free.
    sockets["connected"] = sockets["stdin"].get_monitor_socket(
        int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
        addr=f"inproc://connected-{identity.decode()}",
    )
    for channel in _BACK:
        sockets[channel].connect(_address(connection, channel))
    return {channel: _kind(channel)(socket, handlers[channel]) for channel, socket in sockets.items()}


def is_refusal(event: list[zmq.Frame]) -> bool:
    """Whether the handler of "connected" is told that the kernel does not speak as it should."""
    kind = int.from_bytes(event[0].bytes[:2], sys.byteorder)
    return kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def ignore(frames: list[zmq.Frame]) -> None:
    """Do nothing with a message: nobody is there to answer."""


def close_all(channels: Channels) -> None:
    """Close every socket of one side."""
    for channel in channels.values():
        channel.close()


def _kind(channel: str) -> Callable[[zmq.Socket[bytes], Handler], Channel]:
    return HeartbeatChannel if channel == "hb" else Channel


def _front_socket(kind: int, connection: Mapping[str, Any]) -> zmq.Socket[bytes]:
    socket = _context(os.getpid()).socket(kind)
    socket.linger = _LINGER_MS
    if kind == zmq.ROUTER:
        socket.router_handover = True  # a page that was reloaded takes over its identity
    else:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    if "curve_secretkey" in connection:
        _use_keys(socket, connection)
        socket.curve_server = True
    return socket


def _use_keys(socket: zmq.Socket[bytes], connection: Mapping[str, Any]) -> None:
    socket.curve_secretkey = connection["curve_secretkey"].encode()
    socket.curve_publickey = connection["curve_publickey"].encode()


def _address(connection: Mapping[str, Any], channel: str) -> str:
    separator = ":" if connection["transport"] == "tcp" else "-"
    return f"{connection['transport']}://{connection['ip']}{separator}{connection[channel + '_port']}"


@functools.cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:  # noqa: ARG001 - a forked child needs its own
    """Return the context of all proxies of this process, which nobody else can end."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


Message = dict[str, Any]

#: What jupyter_client raises on what is no message, or on one whose parts are not what they should be.
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


#: Where the delimiter, the signature and the signed parts of a message without buffers are, from its end.
_DELIMITER: Final = 6
_SIGNATURE: Final = 5
_PARTS: Final = 4


class UnreadableMessageError(Exception):
    """It is no signed message of the protocol; the text says why."""


def read_message(
    session: Session, frames: list[zmq.Frame], *, replayed: bool = False
) -> tuple[list[bytes], Message]:
    """Return the identities and the message of these frames. Raises :class:`UnreadableMessageError`.

    Each signature is taken once, unless the message may have been read before and be ``replayed``.
    """
    try:
        identities, rest = session.feed_identities(frames, copy=False)
        if replayed:
            session.digest_history.discard(cast(zmq.Frame, rest[0]).bytes)
        message = session.deserialize(rest, copy=False)
    except _FAILURES as error:
        raise UnreadableMessageError(f"{type(error).__name__}: {error}") from error
    if not _is_whole(message):
        raise UnreadableMessageError("its parts are not what they should be")
    return identities, message


def is_signed(session: Session, frames: list[zmq.Frame]) -> bool:
    """Whether a message without buffers was signed with the session's key, if that has one.

    Reads nothing of it and takes no note of its signature, so it may be read before and after.
    """
    if len(frames) < _DELIMITER or frames[-_DELIMITER].bytes != DELIM:
        return False
    if session.auth is None:
        return True
    signature = session.sign([frame.bytes for frame in frames[-_PARTS:]])
    return hmac.compare_digest(signature, frames[-_SIGNATURE].bytes)


def _is_whole(message: Mapping[str, Any]) -> bool:
    """Whether the parts of a message are of the kinds that everybody relies on."""
    header = message["header"]
    return (
        all(isinstance(header.get(key), str) for key in ("msg_id", "msg_type"))
        and isinstance(message["parent_header"], dict)
        and isinstance(message["content"], dict)
    )
