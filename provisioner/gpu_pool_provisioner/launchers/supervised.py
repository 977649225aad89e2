"""The supervisor of a kernel's pod, asked from here: it restarts the kernel in place, and tells of its end.

``gpu_pool_kernels.inkernel.control`` has the other side, and what is said.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Final

from gpu_pool_client._log import get_logger

#: Where a supervisor listens in its pod.
PORT: Final = 9750
_MAX_LINE: Final = 4096
#: Seconds in which a signal is passed on.
_ANSWERS_WITHIN: Final = 5.0
#: Of a connection in which nothing is said: seconds until it is asked whether it still is, and how often.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_SILENT: Final = "The kernel's supervisor does not answer{}."
_NOT_UNDERSTOOD: Final = "What the kernel's supervisor says is not understood: it may be of another version."
_STRANGER: Final = "What answers at the port of the kernel's supervisor does not have the kernel's key."


class SupervisorAway(Exception):
    """A pod's supervisor does not answer, or there is none; the text says why, in a sentence."""


class KernelNotStarted(Exception):
    """The supervisor could not start the kernel again; the text says why, in a sentence."""


class SupervisorConnection:
    """A connection to the supervisor of one pod."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: bytes) -> None:
        self._reader, self._writer, self._session = reader, writer, session
        self._sent = self._received = 0
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        #: The kernel's number, as the supervisor counts them, and how those have ended that are known of.
        self._start = 0
        self._exits: dict[int, asyncio.Future[int]] = {}
        #: Whether the kernel that has ended last had used up the container's memory.
        self.out_of_memory = False
        #: What it had written last to standard error.
        self.last_words = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, address: str, key: bytes, *, port: int = PORT, within: float
    ) -> SupervisorConnection:
        """Connect to the supervisor in the pod with this address, with the key of its kernel's connection.

        Raises ``SupervisorAway`` where nobody answers with that key within so many seconds.
        """
        try:
            return await asyncio.wait_for(cls._connected(address, key, port), within)
        except asyncio.TimeoutError:
            raise SupervisorAway(_SILENT.format(f" within {within:g} s")) from None
        except OSError as error:
            raise SupervisorAway(_SILENT.format(f": {error}")) from error

    @classmethod
    async def _connected(cls, address: str, key: bytes, port: int) -> SupervisorConnection:
        reader, writer = await asyncio.open_connection(address, port, limit=_MAX_LINE)
        try:
            _keep_alive(writer.get_extra_info("socket"))
            theirs = (await reader.readuntil()).rstrip(b"\n")
            ours = secrets.token_hex(32).encode()
            writer.write(ours + b"\n")
            base = hmac.digest(key, b"gpu-pool supervisor", "sha256")
            made = cls(reader, writer, hmac.digest(base, theirs + ours, "sha256"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.close()
            raise SupervisorAway(_STRANGER) from None
        except BaseException:
            writer.close()
            raise
        try:
            await made._refresh()
        except BaseException:
            made.close()
            raise
        return made

    async def _refresh(self) -> None:
        state = await self._ask({"verb": "state"})
        self._note_start(int(state["start"]))
        if state["status"] is not None:
            self.last_words = str(state.get("last", ""))
            self._note_exit(self._start, int(state["status"]))

    async def restart(self, *, within: float) -> None:
        """End the kernel, and start the next one; it listens at the same ports when this returns.

        Raises ``SupervisorAway`` where that is not so within so many seconds, and ``KernelNotStarted``.
        """
        await self._start_next({"verb": "restart"}, "The kernel could not be started again", within)

    async def begin(self, content: str, *, within: float) -> None:
        """Start the first kernel of a pod that was prepared; it listens when this returns.

        ``content`` is that of ``Beginning``, and crosses the network encrypted. Raises as :meth:`restart`.
        """
        asked = {"verb": "begin", "sealed": self._sealed(content.encode())}
        await self._start_next(asked, "The kernel could not begin in a prepared pod", within)

    def _sealed(self, content: bytes) -> str:
        """Return what the next line may say without anybody reading it."""
        key = hmac.digest(self._session, b"sealed%d" % (self._sent + 1), "sha256")
        numbers = range(-(-len(content) // 32))
        stream = b"".join(hmac.digest(key, n.to_bytes(8, "big"), "sha256") for n in numbers)[: len(content)]
        mixed = int.from_bytes(content, "big") ^ int.from_bytes(stream, "big")
        return base64.b64encode(mixed.to_bytes(len(content), "big")).decode()

    async def _start_next(self, message: Mapping[str, Any], otherwise: str, within: float) -> None:
        try:
            told = await asyncio.wait_for(self._ask(message), within)
        except asyncio.TimeoutError:
            raise SupervisorAway(_SILENT.format(f" within {within:g} s")) from None
        if "failed" in told:
            raise KernelNotStarted(f"{otherwise}: {told['failed']}.")
        if told.get("cold"):
            get_logger().info("This kernel starts cold: %s.", told["cold"])
        self._note_start(int(told["start"]))

    async def send_signal(self, number: int) -> None:
        """Send a signal to the kernel and what it has started, unless it has ended.

        Raises ``SupervisorAway``, and ``ValueError`` for what is no signal.
        """
        try:
            told = await asyncio.wait_for(self._ask({"verb": "signal", "number": number}), _ANSWERS_WITHIN)
        except asyncio.TimeoutError:
            raise SupervisorAway(_SILENT.format(f" within {_ANSWERS_WITHIN:g} s")) from None
        if "failed" in told:
            raise ValueError(f"{number} is no signal")

    async def change(self, variables: Mapping[str, tuple[str | None, str | None]]) -> None:
        """Tell the kernel, and those after it, of its slice's variables: each one's value before and now.

        Raises ``SupervisorAway``; one that is older than this has no ear for it.
        """
        try:
            told = await asyncio.wait_for(
                self._ask({"verb": "change", "variables": variables}), _ANSWERS_WITHIN
            )
        except asyncio.TimeoutError:
            raise SupervisorAway(_SILENT.format(f" within {_ANSWERS_WITHIN:g} s")) from None
        if "failed" in told:
            get_logger().warning("A kernel in a pod or job does not hear of its slice: %s", told["failed"])

    async def exited(self) -> int:
        """Return how the kernel that runs now has ended, once it has: its exit status, or minus the signal.

        Raises ``SupervisorAway`` if the connection ends before.
        """
        found = self._exit(self._start)
        if self._reading.done() and not found.done():
            raise SupervisorAway(_SILENT.format(" any more"))
        return await asyncio.shield(found)

    def close(self) -> None:
        """Close the connection; the kernel goes on. May be repeated."""
        self._reading.cancel()
        self._writer.close()
        self._lose(SupervisorAway("The connection to the kernel's supervisor was closed."))

    # -- What is said --------------------------------------------------------

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._reading.done():
            raise SupervisorAway(_SILENT.format(" any more"))
        self._sent += 1
        number = self._sent
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        content = json.dumps({**message, "n": number}).encode()
        try:
            self._writer.write(self._mac(b">", content) + b" " + content + b"\n")
            return await answer
        finally:
            self._answers.pop(number, None)

    async def _read(self) -> None:
        why = _SILENT.format(" any more")
        try:
            while line := await self._reader.readline():
                self._take(line.rstrip(b"\n"))
        except OSError:
            pass
        except _Forged as error:
            why = str(error)
        except Exception:  # noqa: BLE001 - one of another version, say; whoever waits for it hears of it
            get_logger().exception("What the supervisor of a kernel's pod or job says is not understood.")
            why = _NOT_UNDERSTOOD
        finally:
            self._writer.close()
            self._lose(SupervisorAway(why))

    def _take(self, line: bytes) -> None:
        mac, _, content = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(b"<", content)):
            raise _Forged(_STRANGER)
        message = json.loads(content)
        if message["n"] != self._received + 1:
            raise _Forged(_STRANGER)
        self._received += 1
        if "exited" in message:
            self.out_of_memory = bool(message["out_of_memory"])
            self.last_words = str(message.get("last", ""))
            self._note_exit(int(message["exited"]), int(message["status"]))
        answer = self._answers.get(message.get("to", 0))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _mac(self, direction: bytes, content: bytes) -> bytes:
        return hmac.digest(self._session, direction + content, "sha256").hex().encode()

    def _note_start(self, start: int) -> None:
        self._exits = {number: found for number, found in self._exits.items() if number >= start}
        self._start = start

    def _note_exit(self, start: int, status: int) -> None:
        found = self._exit(start)
        if not found.done():
            found.set_result(status)

    def _exit(self, start: int) -> asyncio.Future[int]:
        if start not in self._exits:
            self._exits[start] = asyncio.get_running_loop().create_future()
        return self._exits[start]

    def _lose(self, why: SupervisorAway) -> None:
        awaited: list[asyncio.Future[Any]] = [*self._answers.values(), *self._exits.values()]
        for future in awaited:
            if not future.done():
                future.set_exception(why)
                future.exception()  # whoever awaits it is told, and it may be nobody


class _Forged(ValueError):
    """A line that the supervisor cannot have sent."""


def _keep_alive(connected: socket.socket) -> None:
    """Let a network that is lost end the connection within half a minute."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
