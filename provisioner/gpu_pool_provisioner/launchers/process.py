"""One run of the real kernel as a process of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import IO, Any, Final

from jupyter_client.session import Session

from gpu_pool_client import Process
from gpu_pool_provisioner.launchers.base import (
    HeldLease,
    KernelRun,
    NotReadyError,
    ProxiedKernel,
)
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.events import before, ended, kill_group
from gpu_pool_provisioner.proxy.relay import UnencryptedError
from gpu_pool_provisioner.session.session import MARGIN

#: Seconds between two looks at a process that is nobody's child here, where the system has no pidfd.
_LOOK_EVERY: Final = 0.05
#: prctl(2): the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG: Final = 1
_ENDED_EARLY: Final = "The kernel ended before it was ready."
_UNENCRYPTED: Final = "The kernel does not encrypt its connection, although it was configured to."


class ProcessRun(KernelRun):
    """A process of this machine."""

    def __init__(
        self, lease: HeldLease, pid: int, backend: BackendConnection, session: Session, front: Channels
    ) -> None:
        super().__init__(lease, asyncio.ensure_future(ended(pid)))
        self._pid = pid
        self._backend = backend
        self._sides = session, front

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
        await self._while_alive(self._lease.attach(process, ready_within=within, grace=kernel.grace))
        introduction = await self._answer(kernel.ready_timeout)
        if introduction is None:
            self.kill()
            await self.end
            await self._lease.give_back()
            raise NotReadyError(f"The kernel did not become ready within {kernel.ready_timeout:g} seconds.")
        await self._while_alive(self._lease.attach(process, grace=kernel.grace))
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


def die_with_parent() -> Callable[[], object] | None:
    """Return what a child calls before its program starts, so that it ends with its parent however that ends.

    The system ends it with the *thread* that has started it. None where the system cannot.
    """
    if not sys.platform.startswith("linux"):
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def ask_for_the_signal() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended in between
            os._exit(1)

    return ask_for_the_signal


class ContinuedProcess:
    """Of :class:`subprocess.Popen`'s methods those that jupyter_client uses, for a process that is no child.

    How it has ended is not known, so its status is 0.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    def poll(self) -> int | None:
        """Return None while it runs."""
        return None if self._process.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once it has ended. Raises ``subprocess.TimeoutExpired``."""
        if not hasattr(os, "pidfd_open"):
            return self._poll_until_ended(timeout)
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return 0
        try:
            # Opened first: whoever is not alive now is not the process whose number this was.
            seconds = None if timeout is None else max(0.0, timeout)
            if self._process.is_alive() and not select.select([descriptor], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        finally:
            os.close(descriptor)
        return 0

    def _poll_until_ended(self, timeout: float | None) -> int:
        """Do what :meth:`wait` does on a system that tells nobody of the end of others' processes."""
        give_up_at = math.inf if timeout is None else time.monotonic() + timeout
        while self._process.is_alive():
            if time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK_EVERY)
        return 0

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
