"""What a kernel's five sockets have in common, and those by which a proxy speaks to the real kernel.

Those on which it listens in the kernel's place are in ``front``.

Messages are lists of frames and are not copied. Everything here belongs to one
event loop, and may be used on its thread only. Only what arrives as a
heartbeat is handled on another, see ``loops``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import zmq

from gpu_pool_client._background import background_loop
from gpu_pool_client._log import get_logger

Frames = list[zmq.Frame] | list[bytes]
Handler = Callable[[list[zmq.Frame]], None]
#: Takes the channel on which something has happened to the connection, and what: one of ZeroMQ's events.
EventHandler = Callable[[str, int], None]
Channels = Mapping[str, "Channel"]

#: Messages handled before other sockets are served.
_BATCH: Final = 50
#: Sockets in one process: 200 kernels with ten each are far from the limit. The default is 1023.
_MAX_SOCKETS: Final = 16_384
#: Messages of the kernel's output that may wait for this process. Beyond, ZeroMQ drops them, as it
#: would between the kernel and a slow frontend; ten times its default, since this hop must lose nothing.
_OUTPUT_QUEUE: Final = 10_000
#: Seconds in which the thread of the heartbeats stops listening.
_CLOSES_WITHIN: Final = 5.0

#: Seconds without a message after which the system looks whether a connection is still there.
_KEEPALIVE: Final = 300

#: As plain numbers, and without pyzmq's own multipart calls: a message takes a third of the time.
_NOW: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

_BACK: Final = {
    "shell": zmq.DEALER,
    "control": zmq.DEALER,
    "stdin": zmq.DEALER,
    "hb": zmq.DEALER,
    "iopub": zmq.SUB,
}
#: On which an ended kernel may have sent what was not read yet.
ANSWERING: Final = ("shell", "control", "iopub")
#: What is told of a connection.
_TOLD: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
#: Milliseconds between two attempts to connect to a kernel that does not listen yet, and as much again at
#: random (libzmq's stream_connecter_base_t::get_new_reconnect_ivl). With its 100, the last of a kernel's
#: sockets is connected an eighth of a second after it listens.
_CONNECT_EVERY_MS: Final = 20
#: Milliseconds after which a connection would be made again that is not to be: days. With -1, which is for
#: that, ZeroMQ forgets what has arrived and was not read when the connection ends (libzmq's
#: session_base_t::reconnect, pipe_t::terminate).
_DAYS_MS: Final = 1_000_000_000


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

    def send(self, frames: Frames) -> None:
        """Send a message. Never blocks: what cannot be queued for a frontend is dropped."""
        if self._socket.closed:
            return
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE, False)
        self._socket.send(frames[-1], _NOW, False)
        self._poll_again()

    async def read(self) -> None:
        """Return once all that has arrived was passed on."""
        while self._poll_again():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop. May be repeated. A forked child does nothing: loop and socket are its parent's."""
        if self._pid == os.getpid() and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            _close(self._socket)

    def _listen(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._poll_again()

    def _receive(self) -> None:
        self._due = False
        try:
            for _ in range(_BATCH):
                if self._socket.closed:
                    break
                frames = [self._socket.recv(_NOW, False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_NOW, False))
                self._deliver(frames)
        except zmq.Again:
            pass  # that was all
        finally:
            self._poll_again()

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        """Do with a message what is to be done; a front looks first who sends it."""
        self.on_message(frames)

    def _poll_again(self) -> bool:
        """Do not rely on the file descriptor alone: using a socket takes its signal back.

        Returns whether something is to be read.
        """
        if not self._due and not self._socket.closed and int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            self._due = True
            self._loop.call_soon(self._receive)
        return self._due


class HeartbeatChannel(Channel):
    """One socket of heartbeats, which goes on while the thread that made it is busy.

    ``on_message`` and :meth:`send` are called on the thread of the heartbeats.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Handler) -> None:
        super().__init__(socket, on_message, background_loop("heartbeats"))

    def close(self, within: float = _CLOSES_WITHIN) -> None:
        """Stop, and return when nothing listens any more, or after so many seconds. May be repeated.

        A forked child does nothing: it has no such thread, and would wait for ever.
        """
        if self._pid != os.getpid():
            return
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._close, closed)
        try:
            closed.result(within)
        except concurrent.futures.TimeoutError:
            get_logger().warning(
                "The thread of the kernels' heartbeats did not stop listening within %g seconds.",
                within,
            )

    def _close(self, closed: concurrent.futures.Future[None]) -> None:
        try:
            super().close()
        finally:
            closed.set_result(None)


def connect_back(
    connection: Mapping[str, Any],
    handlers: Mapping[str, Handler],
    on_event: EventHandler,
    *,
    once: Collection[str] | None = None,
) -> dict[str, Channel]:
    """Connect to a kernel that may not listen yet; what is sent before waits.

    With ``once``, it is connected to on these channels alone, on which it does listen, and a connection
    that is lost is not made again: somebody else may listen there then. So who hears that one of
    ``ANSWERING`` is lost has to close it once it is read.

    ``on_event`` hears of the connections on these and on stdin: ``EVENT_HANDSHAKE_SUCCEEDED`` when the
    kernel can be heard there, which needs to be known of stdin, since on this channel a kernel speaks first,
    and what it asks before is lost; ``EVENT_HANDSHAKE_FAILED_PROTOCOL`` when the kernel listens, but not in
    the way that ``connection`` says; and ``EVENT_DISCONNECTED``. Raises ``zmq.ZMQError``, with nothing
    left open.
    """
    # A kernel asks for input on the stdin socket, at the address from which it got the request on shell.
    identity = uuid.uuid4().hex.encode()
    sockets: dict[str, zmq.Socket[bytes]] = {}
    handlers = dict(handlers)
    try:
        for channel in _BACK:
            sockets[channel] = _back_socket(channel, connection, identity, once)
        for channel in (*ANSWERING, "stdin"):
            # The last, so that they are closed after the sockets that they watch. Named by itself: pyzmq
            # names it after a number that the next socket may get before this name is free.
            named = f"inproc://{channel}-{identity.decode()}"
            sockets[f"{channel} events"] = sockets[channel].get_monitor_socket(int(_TOLD), named)
            handlers[f"{channel} events"] = partial(_tell, on_event, channel)
        for channel in _BACK:
            is_there = once is None or channel in once
            nobody = f"inproc://nobody-{identity.decode()}-{channel}"
            sockets[channel].connect(address(connection, channel) if is_there else nobody)
    except BaseException:  # as where this process may open no more files
        for socket in sockets.values():
            _close(socket)
        raise
    kinds: dict[str, type[Channel]] = {"hb": HeartbeatChannel}
    return {
        channel: kinds.get(channel, Channel)(socket, handlers[channel]) for channel, socket in sockets.items()
    }


def _back_socket(
    channel: str, connection: Mapping[str, Any], identity: bytes, once: Collection[str] | None
) -> zmq.Socket[bytes]:
    """Return a socket as :func:`connect_back` needs it, which is not connected."""
    kind = _BACK[channel]
    socket = context(os.getpid()).socket(kind)
    if kind == zmq.SUB:
        socket.rcvhwm = _OUTPUT_QUEUE
        socket.subscribe(b"")
    else:
        socket.identity = identity
        socket.sndhwm = 0  # a busy kernel reads late; nothing that was submitted may be lost
    if "curve_publickey" in connection:
        # As KernelManager does: the one key pair of the connection file serves both ends.
        use_keys(socket, connection)
        socket.curve_serverkey = connection["curve_publickey"].encode()
    socket.linger = 0
    socket.reconnect_ivl = _CONNECT_EVERY_MS
    if once is not None:
        socket.reconnect_ivl = _DAYS_MS if channel in ANSWERING else -1
    # Networks forget connections over which nothing comes for long.
    socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, _KEEPALIVE
    return socket


def _close(socket: zmq.Socket[bytes]) -> None:
    # Else ZeroMQ's thread, which serves all sockets, would wait for ever to tell of the end of a
    # connection where nobody hears that any more (libzmq's socket_base_t::monitor_event).
    socket.disable_monitor()
    socket.close()


def _tell(on_event: EventHandler, channel: str, frames: list[zmq.Frame]) -> None:
    on_event(channel, int.from_bytes(frames[0].bytes[:2], sys.byteorder))


def ignore(frames: list[zmq.Frame]) -> None:
    """Do nothing with a message: nobody is there to answer."""


def close_all(channels: Channels) -> None:
    """Close every socket of one side."""
    for channel in channels.values():
        channel.close()


def use_keys(socket: zmq.Socket[bytes], connection: Mapping[str, Any]) -> None:
    """Encrypt with the keys of a connection file."""
    socket.curve_secretkey = connection["curve_secretkey"].encode()
    socket.curve_publickey = connection["curve_publickey"].encode()


def address(connection: Mapping[str, Any], channel: str) -> str:
    """Return where a channel of a kernel is, as ZeroMQ writes it."""
    separator = ":" if connection["transport"] == "tcp" else "-"
    return f"{connection['transport']}://{connection['ip']}{separator}{connection[channel + '_port']}"


@functools.cache
def context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:  # noqa: ARG001 - a forked child needs its own
    """Return the context of all proxies of this process, which nobody else can end."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def send_last() -> None:
    """Return once what was sent on sockets that are closed now is on its way: a process is about to end.

    At its end, it would be dropped, however long the sockets linger.
    """
    context(os.getpid()).destroy()
