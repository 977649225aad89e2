"""The sockets on which a proxy listens in its kernel's place, and what anybody may send there.

Every user of the machine reaches them, most of them without the kernel's key. So whatever is not signed with
it ends here, what may be sent is limited, and whoever goes on is disconnected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

import zmq
from jupyter_client.session import Session

from gpu_pool_client._log import RareWarnings
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy.channels import (
    Channel,
    HeartbeatChannel,
    address,
    context,
    ignore,
    use_keys,
)
from gpu_pool_provisioner.proxy.messages import is_signed

_FRONT: Final = {
    "shell": zmq.ROUTER,
    "control": zmq.ROUTER,
    "stdin": zmq.ROUTER,
    "hb": zmq.ROUTER,
    "iopub": zmq.XPUB,
}
#: Milliseconds for which the last replies may still be sent after a socket has been closed.
_LINGER_MS: Final = 1_000
#: Bytes of one frame of a message to the kernel. A Jupyter server passes on ten MiB at most (tornado's
#: websocket_max_message_size); programs that speak to kernels themselves may send more.
_LARGEST_FRAME: Final = 256 << 20
#: Bytes of a heartbeat (jupyter_client sends four), and of a subscription: the topic of a kernel's output.
_LARGEST_BEAT: Final = 256
_LARGEST_TOPIC: Final = 1_024
#: Messages of one connection that may wait to be read here. Then the sender waits.
_QUEUE: Final = 100
#: Messages without a signature after which a connection is closed, and changes of subscriptions.
_MOST_UNSIGNED: Final = 20
_MOST_SUBSCRIPTIONS: Final = 100
#: Connections that are counted at a time.
_MOST_COUNTED: Final = 1_024
#: Changes of subscriptions that are heeded in a second; each is answered, to everybody.
_SUBSCRIPTIONS_A_SECOND: Final = 50


class PortTakenError(OSError):
    """Another program listens where the kernel was to listen; the text says where, and what helps."""


def bind_front(
    connection: Mapping[str, Any], session: Session, reserved: PortReservation | None = None
) -> dict[str, Channel]:
    """Listen where a kernel's frontends look for it; answer heartbeats, and nothing else yet.

    ``reserved`` are its ports, where they are listened on already. Until the caller's loop goes on,
    messages wait in their sockets. Raises :class:`PortTakenError`, and ``zmq.ZMQError`` for an address that
    cannot be listened on.
    """
    sockets = {}
    try:
        for channel, kind in _FRONT.items():
            sockets[channel] = _front_socket(channel, kind, connection)
            _bind(sockets[channel], connection, channel, reserved)
    except BaseException:
        for opened in sockets.values():
            opened.close(linger=0)
        raise
    warnings = RareWarnings()
    front: dict[str, Channel] = {
        "hb": HeartbeatChannel(sockets["hb"], ignore),
        "iopub": _SubscriptionChannel(sockets["iopub"], warnings),
    }
    for channel in ("shell", "control", "stdin"):
        front[channel] = _SignedChannel(sockets[channel], session, warnings)
    front["hb"].on_message = front["hb"].send
    return front


class _SignedChannel(Channel):
    """Takes what is signed with the kernel's key. The rest never gets any further."""

    def __init__(self, sock: zmq.Socket[bytes], session: Session, warnings: RareWarnings) -> None:
        super().__init__(sock, ignore)
        self._session = session
        self._warnings = warnings
        self._unsigned = _CountByConnection(sock, _MOST_UNSIGNED)

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        if is_signed(self._session, frames):
            self.on_message(frames)
            return
        self._warnings.warn("Ignored a message to a kernel that is not signed with its key.")
        self._unsigned.note(frames[-1])


class _SubscriptionChannel(Channel):
    """Publishes the kernel's output; what arrives are changes of subscriptions."""

    def __init__(self, sock: zmq.Socket[bytes], warnings: RareWarnings) -> None:
        super().__init__(sock, ignore)
        self._warnings = warnings
        self._changes = _CountByConnection(sock, _MOST_SUBSCRIPTIONS)
        self._second, self._heeded = 0, 0

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._heeded = second, 0
        self._heeded += 1
        if not self._changes.note(frames[-1]) and self._heeded <= _SUBSCRIPTIONS_A_SECOND:
            self.on_message(frames)
            return
        self._warnings.warn("Somebody subscribes to a kernel's output over and over again.")


class _CountByConnection:
    """Counts what comes over each connection of a socket, and closes one over which too much has come."""

    def __init__(self, sock: zmq.Socket[bytes], most: int) -> None:
        transport, _, name = str(sock.getsockopt_string(zmq.LAST_ENDPOINT)).partition("://")
        #: What tells the endpoint from others of this process: its port, or its path.
        self._endpoint: int | str = int(name.rpartition(":")[2]) if transport == "tcp" else name
        self._most = most
        #: By the number of a connection, and its far end.
        self._counts: dict[tuple[int, Any], int] = {}

    def note(self, frame: zmq.Frame) -> bool:
        """Count one; return whether its connection has been closed for it."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # ZeroMQ itself says so of somebody who is gone
            return False
        # Its thread may have closed the connection meanwhile, and the number may stand for something else.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getsockname()
            if (name[1] if isinstance(name, tuple) else os.fsdecode(name)) != self._endpoint:
                return False
            # Numbers are given again, as to a page that is reloaded; with TCP the far end is new then.
            who = descriptor, connection.getpeername()
            count = self._counts.pop(who, 0) + 1
            if count > self._most:
                connection.shutdown(socket.SHUT_RDWR)  # ZeroMQ has no call for it
                return True
            if len(self._counts) >= _MOST_COUNTED:
                self._counts.clear()
            self._counts[who] = count
        return False


def _front_socket(channel: str, kind: int, connection: Mapping[str, Any]) -> zmq.Socket[bytes]:
    sock = context(os.getpid()).socket(kind)
    sock.linger = _LINGER_MS
    sock.maxmsgsize = {"hb": _LARGEST_BEAT, "iopub": _LARGEST_TOPIC}.get(channel, _LARGEST_FRAME)
    sock.rcvhwm = _QUEUE
    if kind == zmq.ROUTER:
        sock.router_handover = True  # a page that was reloaded takes over its identity
    else:
        sock.setsockopt(zmq.XPUB_VERBOSE, 1)
    if "curve_secretkey" in connection:
        use_keys(sock, connection)
        sock.curve_server = True
    return sock


def _bind(
    sock: zmq.Socket[bytes],
    connection: Mapping[str, Any],
    channel: str,
    reserved: PortReservation | None,
) -> None:
    port = connection[f"{channel}_port"]
    is_reserved = reserved is not None and connection["transport"] == "tcp" and port in reserved.ports
    if reserved is not None and is_reserved:
        # ZeroMQ takes it over, and closes it.
        sock.setsockopt(zmq.USE_FD, reserved.descriptor(port))
    where = address(connection, channel)
    try:
        sock.bind(where)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        raise PortTakenError(
            error.errno,
            f"Another program listens at {where}, where this kernel was to answer on its {channel} channel. "
            "Nothing was started. Start the kernel again: it is given other ports then",
        ) from error
