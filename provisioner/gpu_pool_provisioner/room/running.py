"""One run of the real kernel, from its launch to the end of its process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jupyter_client.session import Session

from gpu_pool_client import EndReason, Lease, Process
from gpu_pool_provisioner.room.endings import ended, kill_group
from gpu_pool_provisioner.room.inner import Inner
from gpu_pool_provisioner.room.relay import Relay
from gpu_pool_provisioner.room.turn import Turn
from gpu_pool_provisioner.room.wires import Wires

#: Seconds by which the pool's deadline is later than ours, which ends the kernel before its lease;
#: also what a relaunch may take.
MARGIN: Final = 5.0

#: Launches the kernel on a held lease, tells it the given connection, and returns its pid.
#: May raise ``OSError``.
Launch = Callable[[Lease, Inner], Awaitable[int]]


class NotReadyError(Exception):
    """The real kernel does not run; the text says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a room has to know of the kernel it speaks for."""

    #: The connection file that its frontends read.
    connection_file: str
    #: The content of the kernel_info_reply to give while it does not run.
    introduction: Mapping[str, Any]
    #: Seconds in which it must answer once it has been launched.
    ready_timeout: float
    #: Seconds for which its death is forgiven, so that it can be launched again on its slice.
    grace: float
    #: Whether somebody is shutting it down: then an interrupt is not meant to give up the wait.
    ending: Callable[[], bool] = bool

    def connection(self) -> dict[str, Any]:
        """Read what the connection file says."""
        found: dict[str, Any] = json.loads(Path(self.connection_file).read_text())
        return found


class Run:
    """A process of the real kernel, and the relay to it."""

    def __init__(self, pid: int, relay: Relay) -> None:
        self._pid = pid
        self.relay = relay
        #: Done when the process has ended.
        self.end = asyncio.ensure_future(ended(pid))

    @classmethod
    async def launched(
        cls, launch: Launch, lease: Lease, inner: Inner, session: Session, front: Wires
    ) -> Run:
        """Launch the kernel and begin to listen to it. Raises ``NotReadyError``."""
        try:
            pid = await launch(lease, inner)
        except OSError as error:
            raise NotReadyError(f"The kernel could not be launched: {error}.") from error
        return cls(pid, Relay(inner.connection, session, front))

    async def until_ready(self, kernel: Kernel, turn: Turn) -> Mapping[str, Any]:
        """Return how the kernel introduces itself, once it answers and its lease stands on it.

        Raises ``NotReadyError``, and ``LeaseGone`` where the slice was lost meanwhile.
        """
        process = Process.of(self._pid)
        if process is None:
            raise NotReadyError("The kernel ended before it was ready.")
        await turn.attach(process, ready_within=kernel.ready_timeout + MARGIN, grace=kernel.grace)
        introduction = await self._answer(kernel.ready_timeout)
        if introduction is None:
            self.kill()
            await self.end
            await turn.lose(EndReason.NOT_READY)
            raise NotReadyError(f"The kernel did not become ready within {kernel.ready_timeout:g} seconds.")
        await turn.confirm(process, kernel.grace)
        return introduction

    async def _answer(self, seconds: float) -> Mapping[str, Any] | None:
        answer = asyncio.create_task(self.relay.ready())
        whatever_first: set[asyncio.Future[Any]] = {answer, self.end}
        try:
            await asyncio.wait(whatever_first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self.end.done():
                raise NotReadyError("The kernel ended before it was ready.")
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()

    def kill(self) -> None:
        """Kill the process and what it has started, unless it has ended."""
        if not self.end.done():
            kill_group(self._pid)

    def close(self) -> None:
        """Let go of the kernel. May be repeated."""
        self.relay.close()
        self.end.cancel()
