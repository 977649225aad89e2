"""One run of the real kernel, from its launch to its end: as a process of this machine, here.

A run in a pod is in ``pod_runs``.
"""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
from jupyter_client.session import Session

from gpu_pool_client import EndReason, KernelCommand, Lease, Process
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.events import before, ended, kill_group
from gpu_pool_provisioner.proxy.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.relay import Relay, UnencryptedError
from gpu_pool_provisioner.session.expiry_policy import ExpiryStep
from gpu_pool_provisioner.session.session import MARGIN

#: Seconds in which a pod must run, if its pool lets it take that long; and the most that a pool takes.
START_TIMEOUT: Final = 86_400.0

_ENDED_EARLY: Final = "The kernel ended before it was ready."
_UNENCRYPTED: Final = "The kernel does not encrypt its connection, although it was configured to."


@dataclass(frozen=True, slots=True)
class Launch:
    """How the real kernel is launched on a held lease."""

    #: Its command, as its kernelspec has it.
    command: Sequence[str]
    #: Launches it on this machine, tells it the given connection, and returns its pid. May raise ``OSError``.
    here: Callable[[Lease, BackendConnection], Awaitable[int]]
    #: Says what the pool is to launch, with the given connection, where it runs kernels in pods.
    in_pod: Callable[[Mapping[str, Any]], KernelCommand]
    #: Where it listens, if it was launched already, by another process.
    continues: BackendConnection | None = None


class NotReadyError(Exception):
    """The real kernel does not run; the text says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class ProxiedKernel:
    """What a proxy has to know of the kernel it speaks for."""

    #: The connection file that its frontends read.
    connection_file: str
    #: The content of the kernel_info_reply to give while it does not run.
    introduction: Mapping[str, Any]
    #: Seconds in which it must answer once it runs.
    ready_timeout: float
    #: Seconds for which its death is forgiven, so that it can be launched again on its slice.
    grace: float
    #: Whether somebody is shutting it down: then an interrupt is not meant to give up the wait.
    ending: Callable[[], bool] = bool
    #: Seconds in which its pod must run.
    start_timeout: float = START_TIMEOUT

    def connection(self) -> dict[str, Any]:
        """Read what the connection file says."""
        found: dict[str, Any] = json.loads(Path(self.connection_file).read_text())
        return found


class KernelRun(abc.ABC):
    """One run of the real kernel, and the relay to it."""

    #: Whether it is a process of this machine: that takes signals, and is seen by whoever manages the kernel.
    is_process = True

    def __init__(self, lease_client: LeaseClient, end: asyncio.Future[None]) -> None:
        self._lease_client = lease_client
        #: Done when the kernel has ended.
        self.end = end
        #: Why the pool has taken the slice; None where the kernel ended by itself.
        self.taken: ExpiryStep | None = None
        #: What is known of an end by itself, in a sentence.
        self.exit_message = ""
        self._relay: Relay | None = None

    @property
    def relay(self) -> Relay:
        """Passes messages on; it is there once :meth:`until_ready` has returned."""
        assert self._relay is not None
        return self._relay

    def unanswered(self) -> list[list[zmq.Frame]]:
        """Return the code that was passed on and has had no reply, in order."""
        return self._relay.unanswered() if self._relay else []

    @abc.abstractmethod
    async def until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        """Return how the kernel introduces itself, once it answers and its lease is safe.

        Raises ``NotReadyError``, and ``LeaseGone`` where the slice was lost meanwhile.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End the kernel, unless it has ended; :attr:`end` tells when it has."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Have nothing more to do with the kernel. Nobody waits for its end."""

    def close(self) -> None:
        """Let go of the kernel. May be repeated."""
        if self._relay is not None:
            self._relay.close()
        self.end.cancel()


class ProcessRun(KernelRun):
    """A process of this machine."""

    def __init__(
        self,
        lease_client: LeaseClient,
        pid: int,
        backend: BackendConnection,
        session: Session,
        front: Channels,
    ) -> None:
        super().__init__(lease_client, asyncio.ensure_future(ended(pid)))
        self._pid = pid
        self._backend = backend
        self._sides = session, front

    @classmethod
    async def launched(
        cls,
        launch: Launch,
        lease: Lease,
        backend: BackendConnection,
        lease_client: LeaseClient,
        session: Session,
        front: Channels,
    ) -> ProcessRun:
        """Launch the kernel. Raises ``OSError``."""
        return cls(lease_client, await launch.here(lease, backend), backend, session, front)

    async def until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        """Return its introduction once its lease is attached to it; see ``KernelRun.until_ready``.

        Raises ``PortStolenError`` where another user listens in its place.
        """
        try:
            return await self._until_ready(kernel)
        except NotReadyError:
            if self._backend.is_stolen(self._pid):  # which is why it has ended
                raise PortStolenError from None
            raise

    async def _until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        process = Process.of(self._pid)
        if process is None:
            raise NotReadyError(_ENDED_EARLY)
        within = kernel.ready_timeout + MARGIN
        await self._while_alive(self._lease_client.attach(process, ready_within=within, grace=kernel.grace))
        introduction = await self._answer(kernel.ready_timeout)
        if introduction is None:
            self.kill()
            await self.end
            await self._lease_client.give_up(EndReason.NOT_READY, ask_anew=False)
            raise NotReadyError(f"The kernel did not become ready within {kernel.ready_timeout:g} seconds.")
        await self._while_alive(self._lease_client.confirm(process, kernel.grace))
        return introduction

    async def _while_alive(self, telling: Coroutine[Any, Any, None]) -> None:
        """Tell the pool something, which may take long. Raises ``NotReadyError`` if the kernel ends first."""
        await before(self.end, telling)
        if self.end.done():
            raise NotReadyError(_ENDED_EARLY)

    def kill(self) -> None:
        """Kill the process and what it has started, unless it has ended."""
        if not self.end.done():
            kill_group(self._pid)

    def leave(self) -> None:
        """Kill it, and let go of it."""
        self.kill()
        self.close()

    async def _answer(self, seconds: float) -> Mapping[str, Any] | None:
        """Return the kernel's first answer, None if there is none in time. Raises ``NotReadyError``."""
        answer = asyncio.create_task(self._first_answer())
        whatever_first: set[asyncio.Future[Any]] = {answer, self.end}
        try:
            await asyncio.wait(whatever_first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self.end.done():
                raise NotReadyError(_ENDED_EARLY)
            return answer.result() if answer.done() else None
        except UnencryptedError as error:
            raise NotReadyError(_UNENCRYPTED) from error
        finally:
            answer.cancel()

    async def _first_answer(self) -> Mapping[str, Any]:
        self._relay = await self._backend.connected(*self._sides, self._pid)
        return await self._relay.ready()
