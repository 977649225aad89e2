"""Frames from the frontends to the real kernel and back, as they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import zmq
from jupyter_client.session import DELIM, Session
from traitlets.log import get_logger

from gpu_pool_provisioner.room.wires import Wires, close_all, connect_back

#: Seconds after which a kernel that has answered is asked again, and how often, until its output is heard.
_ASK_AGAIN: Final = 0.2
_TRIES: Final = 10
#: No status message of a kernel has more bytes of content.
_STATUS_BYTES: Final = 64
#: What in a status message's parent says that somebody works with the kernel.
_WORK: Final = (b'"execute_request"', b'"comm_msg"', b'"comm_open"')
_BOTH_WAYS: Final = ("shell", "control", "stdin", "hb")


class Relay:
    """Stands between the front of a kernel and the real one, which may not listen yet."""

    def __init__(self, connection: Mapping[str, Any], session: Session, front: Wires) -> None:
        self._session = session
        self._front = front
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Whether the kernel works on what somebody submitted.
        self.busy = False
        #: When it last began or ended such work, in Unix seconds; None if it never did.
        self.last_activity: float | None = None
        handlers = {**dict.fromkeys(_BOTH_WAYS, self._take_answer), "iopub": self._output}
        self.back = connect_back(connection, handlers)

    async def ready(self) -> dict[str, Any]:
        """Return the content of the kernel's first kernel_info_reply, once its output is heard as well.

        A kernel that knows no control channel answers on shell.
        """
        self._ask("control")
        self._ask("shell")
        answer, heard = await self._answer, self._heard
        for _ in range(_TRIES):
            await asyncio.wait({heard}, timeout=_ASK_AGAIN)
            if heard.done():
                break
            self._ask("shell")
        return answer

    def begin(self) -> None:
        """Connect the two sides. What was held is to be sent before anything else happens on the loop."""
        for channel in _BOTH_WAYS:
            self._front[channel].on_message = self.back[channel].send
            self.back[channel].on_message = self._front[channel].send

    def close(self) -> None:
        """Let go of the kernel. May be repeated."""
        close_all(self.back)

    def _ask(self, channel: str) -> None:
        self.back[channel].send(self._session.serialize(self._session.msg("kernel_info_request", {})))

    def _take_answer(self, frames: list[zmq.Frame]) -> None:
        if self._answer.done() or frames[0].bytes != DELIM:
            return
        try:
            message = self._session.deserialize(frames[1:], copy=False)
        except (ValueError, TypeError, KeyError) as error:
            get_logger().warning("Ignored what is not a kernel's signed reply: %s", error)
            return
        self._answer.set_result(message["content"])

    def _output(self, frames: list[zmq.Frame]) -> None:
        self._front["iopub"].send(frames)
        if not self._heard.done():
            self._heard.set_result(None)
        if len(frames[-1]) <= _STATUS_BYTES and len(frames) > 3 and b'"execution_state"' in frames[-1].bytes:
            self._observe(frames[-3].bytes, frames[-1].bytes)

    def _observe(self, parent: bytes, content: bytes) -> None:
        if any(kind in parent for kind in _WORK):
            self.busy = b'"busy"' in content
            self.last_activity = time.time()
