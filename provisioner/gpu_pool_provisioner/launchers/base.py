"""What a session needs of whatever launches its kernel, signals it and sees its end."""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import zmq

from gpu_pool_client import EndReason, KernelCommand, Lease, Pool, Process
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.pools import retry, words_of
from gpu_pool_provisioner.proxy.backend import BackendConnection
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.events import Launched
from gpu_pool_provisioner.session.expiry_policy import ExpiryStep

T = TypeVar("T")

#: Seconds in which a pod must run, if its pool lets it take that long; and the most that a pool takes.
START_TIMEOUT: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How the real kernel is launched on a held lease."""

    #: Its command, as its kernelspec has it.
    command: Sequence[str]
    #: Launches it on this machine, tells it the given connection, and returns its pid and what the session is
    #: to know of it. May raise ``OSError``.
    here: Callable[[Lease, BackendConnection], Awaitable[tuple[int, Launched]]]
    #: Says what the pool is to launch, with the given connection, where it runs kernels in pods.
    in_pod: Callable[[Mapping[str, Any]], KernelCommand]


class NotReadyError(Exception):
    """The real kernel does not run; the text says why, in a sentence."""


class NotStartedError(Exception):
    """No kernel has come of a pod; the text says why, in sentences."""


class CannotSleepError(OSError):
    """No kernel that may sleep on disk was launched; one that stays awake can be. The text says why."""


class StaysAwakeError(Exception):
    """The kernel was not written to disk and runs as before; the text says why, in a sentence."""


class CannotWakeError(Exception):
    """What is on disk cannot go on now; the text says why, in a sentence. Nothing of it is lost."""


class ImageGoneError(CannotWakeError):
    """Nothing is on disk any more."""


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


@dataclass(slots=True)
class HeldLease:
    """The lease on which a kernel is launched."""

    pool: Pool
    id: str
    size: str
    #: Seconds for which a start waits for a pool that is away.
    outage_timeout: float
    #: Shows whoever waits for the kernel how its start is going.
    tell: Callable[[str], None]
    #: Whether the slice was not there at once, so that its wait is over now.
    has_waited: bool

    async def attach(
        self, process: Process, *, ready_within: float | None = None, grace: float, has_kernel: bool = False
    ) -> None:
        """Attach the lease to the kernel's process, which has yet to answer within so many seconds, if any.

        Tries again while the pool cannot answer. Raises ``LeaseGone``, and ``PoolUnreachable`` after the
        outage's timeout. Where it ``has_kernel``, which is not to end, it tries until the pool does as asked.
        """
        attach = partial(self.pool.attach, self.id, process, ready_within=ready_within, grace=grace)
        limit = None if has_kernel else self.outage_timeout
        await retry(attach, self._note_fault, limit, has_kernel=has_kernel)

    def _note_fault(self, error: Exception) -> None:
        get_logger().warning("The GPU pool at %s does not answer a kernel: %r", self.pool.url, error)
        self.tell(self.starting(f"{words_of(error)} Still trying."))

    def starting(self, progress: str = "") -> str:
        """Say that the slice is there and the kernel starts; ``progress`` says how far it is."""
        return texts.starting(self.size, progress, waited=self.has_waited)

    async def give_back(self) -> None:
        """Give the slice back: its kernel has not become ready."""
        await self.pool.give_back(self.id, EndReason.NOT_READY)


class KernelRun(abc.ABC):
    """One run of the real kernel, and the relay to it."""

    def __init__(self, lease: HeldLease, end: asyncio.Future[None]) -> None:
        self._lease = lease
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

    async def read_last(self, within: float) -> None:
        """Return once all that an ended kernel has sent was passed on, or so many seconds later."""
        if self._relay is not None:
            await self._relay.read_last(within)

    def end_halves(self) -> None:
        """End what the kernel, which has ended, has either answered or done, without saying the other."""
        if self._relay is not None:
            self._relay.end_halves()

    @abc.abstractmethod
    async def until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        """Return how the kernel introduces itself, once it answers and its lease is safe.

        Raises ``NotReadyError``, and ``LeaseGone`` where the slice was lost meanwhile.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End the kernel, unless it has ended; :attr:`end` tells when it has."""

    def interrupt(self) -> None:
        """Interrupt the kernel, by a message where it takes no signals."""
        self.relay.interrupt()

    @abc.abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the kernel and what it has started, unless it has ended, or nobody can."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Have nothing more to do with the kernel. Nobody waits for its end."""

    def close(self) -> None:
        """Let go of the kernel. May be repeated."""
        if self._relay is not None:
            self._relay.close()
        self.end.cancel()


async def before(end: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns, or None if ``end`` is done before that."""
    task = asyncio.create_task(work)
    whatever_first: set[asyncio.Future[Any]] = {end, task}
    try:
        await asyncio.wait(whatever_first, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() and not end.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
