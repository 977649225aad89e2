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
from functools import partial
from typing import IO, Any, Final, TypeVar, cast

from jupyter_client.session import Session

from gpu_pool_client import Process
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.launchers.base import (
    HeldLease,
    KernelRun,
    NotReadyError,
    ProxiedKernel,
    before,
)
from gpu_pool_provisioner.proxy.backend import BackendConnection, PortStolenError
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.relay import Relay, UnencryptedError
from gpu_pool_provisioner.session.session import MARGIN

T = TypeVar("T")

#: Seconds between two looks at a process that is nobody's child here, where the system has no pidfd.
_LOOK_EVERY: Final = 0.05
#: And where a loop waits for the end of one.
_LOOK_SELDOM: Final = 0.5
#: The most milliseconds that poll(2) takes.
_LONGEST_POLL: Final = 2**31 - 1
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
        process, within = Process.of(self._pid), kernel.ready_timeout
        try:
            if process is None:
                raise NotReadyError(_ENDED_EARLY)  # noqa: TRY301 - as where it ends later
            attach = partial(self._lease.attach, process, grace=kernel.grace)
            await self._while_alive(attach(ready_within=within + MARGIN))
            introduction = await self._while_alive(asyncio.wait_for(self._first_answer(), within))
            await self._while_alive(attach())
        except asyncio.TimeoutError:
            self.kill()
            await self.end
            await self._lease.give_back()
            raise NotReadyError(f"The kernel did not become ready within {within:g} seconds.") from None
        except UnencryptedError as error:
            raise NotReadyError(_UNENCRYPTED) from error
        except NotReadyError:
            if self._backend.is_stolen(self._pid):  # which is why it has ended
                raise PortStolenError from None
            raise
        return introduction

    async def answers_again(self, kernel: ProxiedKernel, before: Relay, *, stayed: bool = False) -> None:
        """Connect to a kernel that goes on, and tie its lease to it; ``before`` is its relay until then.

        Raises ``NotReadyError`` where it does not, and the pool's errors; of one that has ``stayed`` awake
        only ``LeaseGone`` and ``BadRequest``.
        """
        process = Process.of(self._pid)
        try:
            await self._while_alive(asyncio.wait_for(self._first_answer(), kernel.ready_timeout))
        except asyncio.TimeoutError:
            raise NotReadyError("it does not answer.") from None
        assert process is not None
        await self._while_alive(self._lease.attach(process, grace=kernel.grace, has_kernel=stayed))
        self.relay.go_on(before)

    def on(self, pid: int) -> ProcessRun:
        """Return a run of the same kernel as another process: one that was on disk."""
        return ProcessRun(self._lease, pid, self._backend, *self._sides)

    async def keep_lease(self) -> None:
        """Tie the lease to this process: the kernel's is about to end. Raises the pool's errors."""
        await self._lease.attach(Process.current(), grace=0.0)

    @property
    def sockets(self) -> str:
        """How the paths of the sockets begin on which the kernel listens."""
        return str(self._backend.connection["ip"])

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns. Raises ``NotReadyError`` if the kernel ends before that."""
        done = await before(self.end, work)
        if self.end.done():
            raise NotReadyError(_ENDED_EARLY)
        return cast(T, done)

    def signal(self, number: int) -> None:
        """Send a signal to the process and what it has started, unless it has ended."""
        if not self.end.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)  # it leads its own process group

    def kill(self) -> None:
        """Kill the process and what it has started, unless it has ended."""
        self.signal(signal.SIGKILL)

    def leave(self) -> None:
        """Kill it, and let go of it."""
        self.kill()
        self.close()

    async def _first_answer(self) -> Mapping[str, Any]:
        self._relay = await self._backend.connected(*self._sides, self._pid)
        return await self._relay.ready()


async def ended(pid: int) -> None:
    """Return once the process has ended, and never before. It need not be a child; a zombie has ended."""
    while True:
        try:
            process = Process.of(pid)
            break
        except OSError as error:  # such as too many open files
            get_logger().debug("Whether process %d lives cannot be told yet: %s", pid, error)
        await asyncio.sleep(_LOOK_SELDOM)
    if process is None:
        return
    try:
        await _told_of_end(pid)
    except (AttributeError, NotImplementedError, OSError) as error:  # this system tells nobody, or not now
        get_logger().debug("The end of process %d is looked for now and then: %s", pid, error)
    else:
        return
    while _may_live(process):  # noqa: ASYNC110 - as above
        await asyncio.sleep(_LOOK_SELDOM)


async def _told_of_end(pid: int) -> None:
    """Return when the system says that a process has ended. Raises ``OSError`` where it does not say so."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


def _may_live(process: Process) -> bool:
    """Whether it lives, or that cannot be told."""
    try:
        return bool(process.is_alive())
    except OSError:
        return True


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
            ended = select.poll()  # not select(2), which takes none from the 1,024th on
            ended.register(descriptor, select.POLLIN)
            within = None if timeout is None else min(max(0.0, timeout) * 1000, _LONGEST_POLL)
            if self._process.is_alive() and not ended.poll(within):
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
