"""Who may ask the supervisor of a pod's kernel, and in which form: signed lines over TCP.

Each side begins with a line of 64 hexadecimal digits, which are random. Every other line is a MAC, a space
and JSON with a counter ``n``, from 1 on. Nothing else that is said is secret: only ``sealed`` is encrypted::

    base    = HMAC-SHA256(the key of the kernel's connection file, "gpu-pool supervisor")
    session = HMAC-SHA256(base, the server's line + the client's line)
    MAC     = HMAC-SHA256(session, ">" + JSON) of the client's lines, and "<" of the server's
    of_line = HMAC-SHA256(session, "sealed" + n)
    sealed  = Base64(content XOR block 0, block 1, ...), where block i = HMAC-SHA256(of_line, i in 8 bytes)

So a line is good for one connection, one side and one place in it, and no two are sealed with the same
blocks. What is wrong ends the connection, without a word. The other side is
``gpu_pool_provisioner.launchers.supervised``.
"""

import base64
import contextlib
import hmac
import json
import os
import socket
import time
from typing import Any, Iterator  # noqa: UP035 - for Python 3.8

#: Bytes that a line may have at most before its sender has proved that it has the key.
MAX_LINE = 4096
#: Bytes that it may have at most afterwards.
MAX_LONG_LINE = 1 << 18
#: Seconds in which who connects has shown that it has the key.
_SHOWN_WITHIN = 10.0
#: Connections at a time whose sender has proved that it has the key; one more ends the oldest.
_MAX_KNOWN = 3
#: The same for those whose sender has not.
_MAX_UNKNOWN = 16
#: Of a connection in which nothing is said: seconds until it is asked whether it still is, and how often.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_NONCE_DIGITS = 64
#: The kernel listens at all addresses of its pod.
_EVERYWHERE = ("", "*", "0.0.0.0")  # noqa: S104 - a pod's


class Untrusted(Exception):
    """A line that the other side cannot have sent who has the key, or that is none."""


class SignedLines:
    """The server's side of one conversation, without the connection."""

    def __init__(self, key: bytes) -> None:
        self._base = hmac.new(key, b"gpu-pool supervisor", "sha256").digest()
        #: The first line that is sent.
        self.nonce = os.urandom(_NONCE_DIGITS // 2).hex().encode()
        self._session = b""
        self._unfinished = b""
        self._received = self._sent = 0

    @property
    def is_trusted(self) -> bool:
        """Whether the other side has shown that it has the key."""
        return self._received > 0

    def read(self, data: bytes) -> "list[dict[str, Any]]":
        """Return what is asked in these bytes and those before. Raises ``Untrusted``."""
        lines = (self._unfinished + data).split(b"\n")
        self._unfinished = lines.pop()
        most = MAX_LONG_LINE if self.is_trusted else MAX_LINE
        if any(len(line) > most for line in (*lines, self._unfinished)):
            raise Untrusted("a line is too long")
        return [found for found in map(self._read_line, lines) if found is not None]

    def _read_line(self, line: bytes) -> "dict[str, Any] | None":
        if not self._session:
            if len(line) != _NONCE_DIGITS:
                raise Untrusted("that is no first line")
            self._session = hmac.new(self._base, self.nonce + line, "sha256").digest()
            return None
        mac, _, content = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(b">", content)):
            raise Untrusted("the MAC is wrong")
        try:
            message = json.loads(content)
        except (RecursionError, ValueError) as error:
            raise Untrusted("that is no JSON") from error
        # The same line again has the same MAC.
        if not isinstance(message, dict) or message.get("n") != self._received + 1:
            raise Untrusted("that is not the next line")
        self._received += 1
        return message

    def unsealed(self, message: "dict[str, Any]") -> bytes:
        """Return what a line that was read has sealed. Raises ``ValueError`` where it has nothing."""
        data = base64.b64decode(str(message.get("sealed", "")), validate=True)
        key = hmac.new(self._session, b"sealed%d" % message["n"], "sha256").digest()
        blocks = (hmac.new(key, n.to_bytes(8, "big"), "sha256").digest() for n in range(-(-len(data) // 32)))
        stream = b"".join(blocks)[: len(data)]
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def line(self, message: "dict[str, Any]") -> bytes:
        """Return the next line to send."""
        self._sent += 1
        content = json.dumps({**message, "n": self._sent}).encode()
        return self._mac(b"<", content) + b" " + content + b"\n"

    def _mac(self, direction: bytes, content: bytes) -> bytes:
        return hmac.new(self._session, direction + content, "sha256").hexdigest().encode()


class ControlConnection:
    """One client of the port."""

    def __init__(self, connected: socket.socket, key: bytes, now: float) -> None:
        connected.setblocking(False)
        keep_alive(connected)
        self.socket = connected
        self._lines = SignedLines(key)
        #: When it must have shown that it has the key.
        self.give_up_at = now + _SHOWN_WITHIN
        self.is_open = True
        self._send(self._lines.nonce + b"\n")

    @property
    def is_trusted(self) -> bool:
        """Whether it has shown that it has the key."""
        return self._lines.is_trusted

    def read(self) -> "list[dict[str, Any]]":
        """Return what it has asked; close it where it has gone, or is not who it must be."""
        try:
            data = self.socket.recv(MAX_LINE)
            if data:
                return self._lines.read(data)
        except BlockingIOError:
            return []
        except (OSError, Untrusted):
            pass
        self.close()
        return []

    def unsealed(self, message: "dict[str, Any]") -> bytes:
        """Return what it has sealed in what it has asked. Raises ``ValueError`` where that is nothing."""
        return self._lines.unsealed(message)

    def send(self, message: "dict[str, Any]") -> None:
        """Tell it something; close it where it does not read: the system keeps many lines for who does."""
        if self.is_open:
            self._send(self._lines.line(message))

    def _send(self, line: bytes) -> None:
        try:
            is_sent = self.socket.send(line) == len(line)
        except OSError:
            is_sent = False
        if not is_sent:
            self.close()

    def close(self) -> None:
        """Close it. May be repeated."""
        self.is_open = False
        self.socket.close()


class ControlPort:
    """The port by which a supervisor is asked."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Listen at a port of the address at which the kernel does. Raises ``OSError``."""
        self._listener = _listener(address, port)
        self._key = key
        self._connections = []  # type: list[ControlConnection]
        #: When one who has the key was last seen to be connected, of ``time.monotonic()``.
        self._known_at = float("-inf")

    def was_asked_within(self, seconds: float) -> bool:
        """Whether one who has the key is connected, or was within so many seconds."""
        is_known = any(each.is_trusted and each.is_open for each in self._connections)
        return is_known or time.monotonic() <= self._known_at + seconds

    def awaits_somebody(self) -> bool:
        """Whether somebody is connected who has yet to show that they have the key."""
        return not all(each.is_trusted for each in self._connections)

    def sockets(self) -> "list[socket.socket]":
        """Return those that are to be read once there is something."""
        # Those that were closed after all were heard, since they read no reply, are dropped when these are.
        return [self._listener, *(each.socket for each in self._connections if each.is_open)]

    def asked(self, readable: "Any") -> "Iterator[tuple[ControlConnection, dict[str, Any]]]":
        """Yield what is asked by those that can be read now."""
        now = time.monotonic()
        if self._listener in readable:
            with contextlib.suppress(OSError):
                self._connections.append(ControlConnection(self._listener.accept()[0], self._key, now))
        for each in self._connections[:]:
            if each.socket in readable:
                for message in each.read():
                    yield each, message
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Close those that have not shown who they are, or are too many, and drop those that are closed."""
        for each in self._connections:
            if each.is_trusted:
                self._known_at = now
            elif now > each.give_up_at:
                each.close()
        living = [each for each in self._connections if each.is_open]
        known = [each for each in living if each.is_trusted]
        unknown = [each for each in living if not each.is_trusted]
        for each in (*known[:-_MAX_KNOWN], *unknown[:-_MAX_UNKNOWN]):
            each.close()
        self._connections = [each for each in living if each.is_open]

    def tell(self, message: "dict[str, Any]") -> None:
        """Tell all who have shown that they have the key."""
        for each in self._connections:
            if each.is_trusted:
                each.send(message)


def keep_alive(connected: socket.socket) -> None:
    """Let a machine that is gone without a word end the connection, within half a minute."""
    with contextlib.suppress(OSError):  # it has ended
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _listener(address: str, port: int) -> socket.socket:
    places = [(socket.AF_INET, address)]
    if address in _EVERYWHERE:
        places = [(socket.AF_INET6, "::"), (socket.AF_INET, "")]
    for family, place in places:
        found = None
        try:
            found = socket.socket(family, socket.SOCK_STREAM)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind((place, port))
            found.listen(_MAX_UNKNOWN)
            found.setblocking(False)
        except OSError:
            if found is not None:
                found.close()
            if family == socket.AF_INET:
                raise
        else:
            return found
    raise AssertionError
