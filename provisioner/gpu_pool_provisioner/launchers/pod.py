"""One run of the real kernel in a pod, which the pool launches, follows and ends.

Nothing of it is on this machine. For whoever manages the kernel the proxy stands
in for it all the time, and the relay connects to the pod itself: encrypted,
since there is a network in between, and signed. After a restart the next kernel
is the same pod's, if that lives and its supervisor answers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq
from jupyter_client.session import Session

from gpu_pool_client import GpuPoolError, Lease, Process, format_duration
from gpu_pool_client._log import get_logger
from gpu_pool_client._pods import last_output
from gpu_pool_provisioner.launchers.base import (
    START_TIMEOUT,
    HeldLease,
    KernelRun,
    NotReadyError,
    NotStartedError,
    ProxiedKernel,
    before,
)
from gpu_pool_provisioner.launchers.lease_pod import LeasePod
from gpu_pool_provisioner.launchers.supervised import KernelNotStarted, SupervisorAway, SupervisorConnection
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.relay import Relay, UnencryptedError
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.session import MARGIN

#: What a kernel publishes to ask for another size, see gpu_pool_kernels.inkernel.slice_requests.
USE: Final = "gpu_pool_use"
#: What it publishes to have it printed how much memory it uses.
MEMORY: Final = "gpu_pool_memory"
#: Seconds in which the pool says whether another size can be had, or what is used.
_RESIZED_WITHIN: Final = 5.0
#: Seconds in which a kernel listens that is started in a pod which runs, before a new pod is made.
_RESTARTED_WITHIN: Final = 20.0
#: Seconds in which a kernel ends that is killed.
_KILLED_WITHIN: Final = 2.0
#: Seconds until a connection is made again that was lost or could not be made; and most of them, where nobody
#: has answered yet.
_CONNECT_AGAIN: Final = 2.0
_CONNECT_SELDOM: Final = 60.0
_NO_ANSWER: Final = "The GPU pool did not answer in time: the size stays as it is. Try again."

_NOT_TOLD: Final = "The GPU pool did not say in time how much memory this kernel uses."
_FAILED: Final = "The kernel proxy failed at that: {}. The kernel goes on."

_OUT_OF_MEMORY: Final = (
    "It used more than the memory of its pod or job (not of the GPU), and was ended. Load less at a time."
)
_OLD_KERNEL: Final = (
    "The kernel does not encrypt its connection, so nothing was sent to it. "
    "Its image or environment needs ipykernel 7.4 or newer: tell your instructor."
)
_SILENT: Final = (
    "The kernel was started, but nothing has answered from it within {}. If that happens again, tell whoever "
    "runs this server: a network policy may be in the way, or its image or environment may be broken."
)


class NotRestartedError(Exception):
    """The kernel was not started in the last one's pod, or in a prepared one: it needs a new one."""


@dataclass(frozen=True, slots=True)
class PodRequests:
    """What a pod's kernel asks for that only the pool can do or say."""

    #: Changes its size, or keeps the request until it restarts; returns what its user reads.
    resize: Callable[[str], Awaitable[str]]
    #: Says how much memory it uses.
    memory: Callable[[], Awaitable[str]]
    #: Why the last change of size came to nothing; empty if it did not.
    notice: str


class PodRun(KernelRun):
    """One kernel in a pod, which is launched for it unless it was for the one before."""

    def __init__(
        self,
        pod: LeasePod,
        lease: HeldLease,
        session: Session,
        front: Channels,
        requests: PodRequests,
        shown: Lease | None = None,
    ) -> None:
        """``shown`` is the slice that the kernel is to know; None where it knows that of its pod for good."""
        super().__init__(lease, asyncio.get_running_loop().create_future())
        self._pod = pod
        self._shown = shown
        #: Whether it listens to what it may use on top of its slice.
        self.follows = shown is not None and bool(shown.limit_mib)
        #: Whether the pod was launched for a kernel before this one.
        self._is_next = pod.is_launched
        self._sides = session, front
        self._requests = requests
        self._watching: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._showing: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        pod.ended.add_done_callback(self._ended_with_pod)

    async def until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        """Start it and return its introduction; see ``KernelRun.until_ready``.

        Raises ``NotStartedError`` where that comes to nothing, ``NotReadyError`` where it was killed, and
        ``NotRestartedError``.
        """
        try:
            introduction = await before(self.end, self._ready(kernel))
        except GpuPoolError as error:
            raise NotStartedError(str(error)) from error
        if introduction is not None:
            return introduction
        if self._killing is not None:
            raise NotReadyError("The kernel was ended before it was ready.")
        if (self._is_next or self._pod.is_prepared) and self._pod.taken is None:
            raise NotRestartedError
        raise NotStartedError(self._pod.fault)

    async def _ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        # No process here is the kernel. What ends with this one is the holder.
        holder = Process.current()
        within = min(kernel.start_timeout + kernel.ready_timeout + MARGIN, START_TIMEOUT)
        await self._lease.attach(holder, ready_within=within, grace=0.0)
        if not self._is_next:
            self._pod.launch()
        address = await self._pod.started(kernel.start_timeout)
        await self._begin()
        self._relay = Relay({**self._pod.command.connection, **self._pod.ports, "ip": address}, *self._sides)
        try:
            introduction = await asyncio.wait_for(self._relay.ready(), kernel.ready_timeout)
        except UnencryptedError:
            raise NotStartedError(_OLD_KERNEL) from None
        except asyncio.TimeoutError:
            raise NotStartedError(_SILENT.format(format_duration(kernel.ready_timeout))) from None
        await self._lease.attach(holder, grace=0.0)
        self._pod.on_trouble = self._relay.tell
        self._relay.messages[USE] = self._resize
        self._relay.messages[MEMORY] = self._say_memory
        if self._requests.notice:
            self._relay.tell(self._requests.notice)
        self._watching = asyncio.create_task(self._watch())
        return introduction

    async def _begin(self) -> None:
        """Have the kernel begin, where a pod that runs does not see to that by itself."""
        try:
            if self._is_next:
                if self._shown is not None:
                    await self._pod.tell(self._shown)
                await (await self._pod.supervisor()).restart(within=_RESTARTED_WITHIN)
            await self._pod.begin()
        except (SupervisorAway, KernelNotStarted) as error:
            get_logger().warning("A kernel is started in a new pod or job: %s", error)
            raise NotRestartedError from error

    async def _watch(self) -> None:
        """Hear of the kernel's end from its supervisor; without one, it is that of its pod."""
        status = await self._status(await self._supervisor())
        if status != 0 and self._killing is None:
            connected = self._pod.connected
            how = _how(status, connected.last_words if connected is not None else "")
            is_out_of_memory = connected is not None and connected.out_of_memory
            self.exit_message = texts.ended_by_itself(_OUT_OF_MEMORY if is_out_of_memory else how)
        self._finish()

    async def _supervisor(self) -> SupervisorConnection:
        """Return the connection to the supervisor, once that answers: on a busy machine it may come later."""
        pause = _CONNECT_AGAIN
        while True:
            try:
                return await self._pod.supervisor()
            except SupervisorAway as error:
                get_logger().debug(
                    "Until then the end of a kernel's pod or job is that of its kernel: %s", error
                )
                self._pod.lost()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _CONNECT_SELDOM)

    async def _status(self, supervisor: SupervisorConnection) -> int:
        """Return how the kernel has ended, once it has, however often the connection is lost until then."""
        while True:
            try:
                return await supervisor.exited()
            except SupervisorAway as error:
                get_logger().debug("The supervisor of a kernel's pod or job is away: %s", error)
                self._pod.lost()
            await asyncio.sleep(_CONNECT_AGAIN)
            with suppress(SupervisorAway):
                supervisor = await self._pod.supervisor()

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor answers in the pod."""
        return self._pod.connected is not None

    def show(self, lease: Lease) -> None:
        """Let the kernel know its slice as it is now, once its supervisor answers."""
        self._shown, self.follows = lease, bool(lease.limit_mib)
        if self._showing is None or self._showing.done():
            self._showing = asyncio.create_task(self._show())

    async def _show(self) -> None:
        told, pause = None, _CONNECT_AGAIN
        while told is not self._shown and self._shown is not None:
            told = self._shown
            try:
                await self._pod.tell(told)
            except SupervisorAway as error:  # whoever waits for the kernel's end connects again
                get_logger().debug("A kernel in a pod or job does not hear of its slice yet: %s", error)
                told = None
                await asyncio.sleep(pause)
                pause = min(2 * pause, _CONNECT_SELDOM)

    def _resize(self, content: Mapping[str, Any]) -> None:
        """Ask the pool for another size."""
        size, request = content.get("size"), content.get("id")
        if isinstance(size, str):
            asked = self._resized(size, request if isinstance(request, str) else "")
            self._answer(asked, _NO_ANSWER, self.relay.tell)

    async def _resized(self, size: str, request: str) -> str:
        try:
            return await self._requests.resize(size)
        finally:
            if request and self.is_supervised:  # it waits for that, so that no cell after it has the old size
                with suppress(SupervisorAway):
                    await self._pod.answer(request, self._shown)

    def _say_memory(self, _: Mapping[str, Any]) -> None:
        self._answer(self._requests.memory(), _NOT_TOLD, self.relay.show)

    def _answer(self, asked: Awaitable[str], otherwise: str, say: Callable[[str], None]) -> None:
        """Print the pool's answer below the cell. What that shows later waits for it."""
        output, later = self.relay.back["iopub"], list[list[zmq.Frame]]()
        pass_on, output.on_message = output.on_message, later.append
        self._answering = asyncio.create_task(self._answered(asked, otherwise, say, pass_on, later))

    async def _answered(
        self,
        asked: Awaitable[str],
        otherwise: str,
        say: Callable[[str], None],
        pass_on: Callable[[list[zmq.Frame]], None],
        later: list[list[zmq.Frame]],
    ) -> None:
        output, told = self.relay.back["iopub"], ""
        try:
            told = await asyncio.wait_for(asked, _RESIZED_WITHIN)
        except asyncio.TimeoutError:
            told = otherwise
        except Exception as error:  # noqa: BLE001 - a mistake of ours: what the kernel shows is passed on
            get_logger().error("What a kernel in a pod or job has asked for failed.", exc_info=error)
            told = _FAILED.format(repr(error))
        finally:
            output.on_message = pass_on
            if told:  # else this was given up
                say(told)
            for frames in later:
                output.on_message(frames)  # which may be the next request

    def interrupt(self) -> None:
        """Interrupt the kernel and what it has started; without a supervisor, by a message."""
        if self._pod.connected is None:
            super().interrupt()
        else:
            self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and what it has started; to nobody without a supervisor."""
        if self._pod.connected is not None:
            sending = asyncio.create_task(self._send(self._pod.connected, number))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _send(self, supervisor: SupervisorConnection, number: int) -> None:
        try:
            await supervisor.send_signal(number)
        except SupervisorAway as error:
            get_logger().warning("A kernel in a pod or job did not get a signal: %s", error)

    def kill(self) -> None:
        """End the kernel, unless it has ended: in its pod, or with that."""
        if self._killing is None and not self.end.done():
            self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        supervisor = self._pod.connected
        if supervisor is not None and self._watching is not None:
            try:
                await asyncio.wait_for(supervisor.send_signal(signal.SIGKILL), _KILLED_WITHIN)
                await asyncio.wait({self.end}, timeout=_KILLED_WITHIN)
            except (SupervisorAway, asyncio.TimeoutError) as error:
                get_logger().warning("A kernel is ended with its pod or job: %r", error)
        if not self.end.done():
            await self._pod.end()

    def _ended_with_pod(self, _: asyncio.Future[None]) -> None:
        if not self.end.done():
            self.taken, self.exit_message = self._pod.taken, self._pod.exit_message
        self._finish()

    def _finish(self) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def leave(self) -> None:
        """Let go of it: its pod ends with its lease, or gives way to the next one that is launched on it."""
        self.close()

    def close(self) -> None:
        """Let go of the kernel; its pod may run another. May be repeated."""
        self._pod.on_trouble = None
        self._pod.ended.remove_done_callback(self._ended_with_pod)
        for task in filter(None, (self._watching, self._answering, self._showing)):
            task.cancel()
        super().close()


def _how(status: int, last_words: str) -> str:
    """Say how a kernel has ended by its exit status, or by minus the signal, and what it wrote last."""
    last = last_output(last_words)
    said = f" Its last output: {last}" if last else ""
    if status >= 0:
        return f"It ended with status {status}.{said}"
    try:
        return f"It was ended by the signal {signal.Signals(-status).name}.{said}"
    except ValueError:
        return f"It was ended by the signal {-status}.{said}"
