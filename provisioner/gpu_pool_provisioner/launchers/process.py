"""One run of the real kernel as a process of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from jupyter_client.session import Session

from gpu_pool_client import EndReason, Lease, Process
from gpu_pool_provisioner.launchers.base import KernelRun, Launch, NotReadyError, ProxiedKernel
from gpu_pool_provisioner.lease_client import LeaseClient
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.events import before, ended, kill_group
from gpu_pool_provisioner.proxy.relay import UnencryptedError
from gpu_pool_provisioner.session.session import MARGIN

_ENDED_EARLY: Final = "The kernel ended before it was ready."
_UNENCRYPTED: Final = "The kernel does not encrypt its connection, although it was configured to."


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
