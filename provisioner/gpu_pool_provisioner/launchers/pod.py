"""One run of the real kernel in a pod, which the pool launches, follows and ends.

Nothing of it is on this machine. For whoever manages the kernel the proxy stands
in for it all the time, and the relay connects to the pod itself: encrypted,
since there is a network in between, and signed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from string import Template
from typing import Any, Final

import zmq
from jupyter_client.connect import port_names
from jupyter_client.session import Session

from gpu_pool_client import (
    GpuPoolError,
    KernelPod,
    LeaseGone,
    LeaseState,
    PodPhase,
    Process,
    format_duration,
)
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.environment import kernel_command
from gpu_pool_provisioner.launchers.base import (
    START_TIMEOUT,
    HeldLease,
    KernelRun,
    LaunchPlan,
    NotReadyError,
    ProxiedKernel,
    before,
)
from gpu_pool_provisioner.pools import retry
from gpu_pool_provisioner.proxy.channels import Channels
from gpu_pool_provisioner.proxy.relay import Relay, UnencryptedError
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep
from gpu_pool_provisioner.session.idling import taken
from gpu_pool_provisioner.session.session import MARGIN

#: Where kernels listen in their pods. Always the same, since a pod has an address of its own: so a
#: cluster's rules can let exactly these through. Below what systems give to outgoing connections.
PORTS: Final = dict(zip(port_names, range(9751, 9751 + len(port_names)), strict=True))
#: What a kernel publishes to ask for another size, see gpu_pool_kernels.inkernel.slice_requests.
USE: Final = "gpu_pool_use"
#: Seconds in which a pool has taken the order to end a pod.
_END_WITHIN: Final = 10.0
#: Seconds in which it says whether another size can be had.
_RESIZED_WITHIN: Final = 5.0
_NO_ANSWER: Final = "The GPU pool did not answer in time: the size stays as it is. Try again."

_OLD_KERNEL: Final = (
    "The kernel in its pod does not encrypt its connection, so nothing was sent to it. "
    "The course's image needs ipykernel 7.4 or newer: tell your instructor."
)
_SILENT: Final = (
    "The kernel's pod runs, but nothing has answered from it within {}. If that happens again, tell whoever "
    "runs this server: a network policy may be in the way, or the image's kernel may be broken."
)
_FINE_AGAIN: Final = "Its machine answers again."
_SLOW: Final = "The kernel's pod did not start within {}. Its last report: {}"


class NotStartedError(Exception):
    """No kernel has come of a pod; the text says why, in sentences."""


def pod_connection(outer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a connection file in a pod says, but for its ``ip``.

    ``outer`` is the frontends' connection: messages pass as they are, so the
    key that signs them is the same. The keys that encrypt are new every time.
    """
    public, secret = zmq.curve_keypair()
    kept = {name: outer[name] for name in ("key", "signature_scheme", "kernel_name") if outer.get(name)}
    keys = {"curve_publickey": public.decode(), "curve_secretkey": secret.decode()}
    return {**kept, **keys, "transport": "tcp", **PORTS}


@dataclass(frozen=True, slots=True)
class PodSizes:
    """What a pod's kernel has to do with sizes, which cannot change while it runs."""

    #: Keeps a request for another size until it restarts; returns what its user reads.
    at_restart: Callable[[str], Awaitable[str]]
    #: Why the last change of size came to nothing; empty if it did not.
    notice: str


class PodRun(KernelRun):
    """A pod, from before its launch."""

    is_process = False

    def __init__(
        self,
        plan: LaunchPlan,
        connection: Mapping[str, Any],
        lease: HeldLease,
        session: Session,
        front: Channels,
        sizes: PodSizes,
    ) -> None:
        """Take the connection that the pod is told; ``lease`` tells how far its start has come."""
        loop = asyncio.get_running_loop()
        super().__init__(lease, loop.create_future())
        self._connection = connection
        self._command = plan.in_pod(connection)
        self._sides = session, front
        self._sizes = sizes
        self._address: asyncio.Future[str] = loop.create_future()
        self._progress = ""
        #: Whether it waits in the cluster's own queue, and until when it did; no time counts until then.
        self._queued, self._counts_from = False, loop.time()
        self._fault = ""
        self._following: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._resizing: asyncio.Task[None] | None = None

    async def until_ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        """Launch it and return its introduction; see ``KernelRun.until_ready``.

        Raises ``NotStartedError`` where that comes to nothing, and ``NotReadyError`` where it was killed.
        """
        try:
            introduction = await before(self.end, self._ready(kernel))
        except GpuPoolError as error:
            raise NotStartedError(str(error)) from error
        if introduction is not None:
            return introduction
        if self._killing is not None:
            raise NotReadyError("The kernel was ended before it was ready.")
        raise NotStartedError(self._fault)

    async def _ready(self, kernel: ProxiedKernel) -> Mapping[str, Any]:
        # No process here is the kernel. What ends with this one is the holder.
        holder = Process.current()
        within = min(kernel.start_timeout + kernel.ready_timeout + MARGIN, START_TIMEOUT)
        await self._lease.attach(holder, ready_within=within, grace=0.0)
        self._following = asyncio.create_task(self._follow())
        address = await self._started(kernel.start_timeout)
        self._relay = Relay({**self._connection, "ip": address}, *self._sides)
        try:
            introduction = await asyncio.wait_for(self._relay.ready(), kernel.ready_timeout)
        except UnencryptedError:
            raise NotStartedError(_OLD_KERNEL) from None
        except asyncio.TimeoutError:
            raise NotStartedError(_SILENT.format(format_duration(kernel.ready_timeout))) from None
        await self._lease.attach(holder, grace=0.0)
        self._relay.messages[USE] = self._resize
        if self._sizes.notice:
            self._relay.tell(self._sizes.notice)
        return introduction

    async def _started(self, within: float) -> str:
        """Return the address of the pod once it runs, at most so many seconds after it was queued."""
        loop = asyncio.get_running_loop()
        while self._queued or loop.time() < self._counts_from + within:
            left = within if self._queued else self._counts_from + within - loop.time()
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._address), left)
        raise NotStartedError(_SLOW.format(format_duration(within), self._progress or "none."))

    def _resize(self, content: Mapping[str, Any]) -> None:
        """Ask the pool for another size. What the cell that asks shows later waits for the answer."""
        size = content.get("size")
        if isinstance(size, str):
            output, later = self.relay.back["iopub"], list[list[zmq.Frame]]()
            pass_on, output.on_message = output.on_message, later.append
            self._resizing = asyncio.create_task(self._resized(size, pass_on, later))

    async def _resized(
        self, size: str, pass_on: Callable[[list[zmq.Frame]], None], later: list[list[zmq.Frame]]
    ) -> None:
        try:
            told = await asyncio.wait_for(self._sizes.at_restart(size), _RESIZED_WITHIN)
        except asyncio.TimeoutError:
            told = _NO_ANSWER
        output = self.relay.back["iopub"]
        output.on_message = pass_on
        self.relay.tell(told)
        for frames in later:
            output.on_message(frames)  # which may be the next request

    async def _follow(self) -> None:
        """Launch the pod, and look at it until it has ended."""
        try:
            pool, lease_id = self._lease.pool, self._lease.id
            pod = await retry(partial(pool.launch, lease_id, self._command), self._note_fault)
            while pod.phase is not PodPhase.ENDED:
                self._note_state(pod)
                pod = await retry(partial(pool.pod, lease_id, pod.version), self._note_fault)
            await self._account_for(pod)
        except LeaseGone:
            await self._note_taken("")
        except GpuPoolError as error:
            self._fault = str(error)
            self.taken = ExpiryStep(ExpiryAction.END, f"The kernel was ended. {error}")
        finally:
            self._finish()

    def _note_state(self, pod: KernelPod) -> None:
        before, self._progress = self._progress, pod.message
        if self._relay is not None and pod.phase is PodPhase.RUNNING and pod.message != before:
            self._relay.tell(pod.message or _FINE_AGAIN)
        if self._queued:
            self._counts_from = asyncio.get_running_loop().time()
        self._queued = pod.phase is PodPhase.QUEUED
        if pod.phase is PodPhase.RUNNING and pod.address and not self._address.done():
            self._address.set_result(pod.address)
        elif not self._address.done():
            lease = self._lease
            lease.has_waited = lease.has_waited or self._queued
            waiting = self._queued and texts.waiting(lease.size, pod.message)
            lease.tell(waiting or lease.starting(pod.message))

    async def _account_for(self, pod: KernelPod) -> None:
        """Take note of why the pod has ended."""
        if pod.exit_code is None:
            await self._note_taken(pod.message)
            return
        status = f"It ended with exit status {pod.exit_code}."
        self._fault = f"The kernel ended before it was ready. {pod.message or status}"
        if pod.exit_code != 0 and self._killing is None:
            self.exit_message = (
                f"The kernel ended by itself, and its variables are gone. {pod.message or status}"
            )

    async def _note_taken(self, message: str) -> None:
        """Note that the pod was taken: with the notice of its lease, if that has ended, or this message."""
        if self._killing is None:
            self.taken = await self._step(message)
            self._fault = self.taken.message

    async def _step(self, message: str) -> ExpiryStep:
        try:
            lease = await retry(partial(self._lease.pool.get_lease, self._lease.id), self._note_fault)
        except LeaseGone as error:
            return taken(error.reason, message)
        if lease.state is LeaseState.ENDED:
            return taken(lease.end_reason.value if lease.end_reason else None, lease.notice or message)
        return ExpiryStep(ExpiryAction.END, f"The kernel was ended. {message}".rstrip())

    def _note_fault(self, error: GpuPoolError) -> None:
        """Take note of why the pool does not answer; it is asked again, and the pod goes on without us."""
        get_logger().warning("The pool did not report the state of a kernel's pod: %s", error)
        if not self._address.done():
            self._lease.tell(self._lease.starting(f"{error.message} Still trying."))

    def kill(self) -> None:
        """End the pod, unless it has ended."""
        if self._killing is None and not self.end.done():
            self._killing = asyncio.create_task(self._end_pod())

    async def _end_pod(self) -> None:
        try:
            await asyncio.wait_for(self._lease.pool.end_pod(self._lease.id), _END_WITHIN)
        except (GpuPoolError, asyncio.TimeoutError) as error:
            get_logger().warning("A kernel's pod ends with its lease, or at the next launch: %r", error)
        finally:
            self._finish()

    def _finish(self) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def leave(self) -> None:
        """Let go of it: the pod ends with its lease, or gives way to the next one that is launched on it."""
        self.close()

    def close(self) -> None:
        """Let go of the pod. May be repeated."""
        for task in filter(None, (self._following, self._resizing)):
            task.cancel()
        super().close()


#: Stands in a command for where the pod finds its connection file.
CONNECTION_FILE: Final = "{connection_file}"
#: The name under which images have Python; not all have "python".
_PYTHON: Final = "python3"
_ANY_PYTHON: Final = re.compile(r"python[0-9.]*t?")
#: What proves to a JupyterHub who this server is: never a kernel's, whatever a kernelspec names.
_SECRETS: Final = ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN")


def command_in_pod(command: Sequence[str], connection_file: str) -> tuple[str, ...]:
    """Return a kernel's command as a pod is to run it.

    Where its program lies on this machine means nothing there: it is found by
    its name, and every Python is ``python3``.
    """
    name = PurePath(command[0]).name
    program = _PYTHON if _ANY_PYTHON.fullmatch(name) else name
    arguments = [word.replace(connection_file, CONNECTION_FILE) for word in command[1:]]
    return tuple(kernel_command([program, *arguments], installed=True))


def variables_in_pod(
    of_kernelspec: Mapping[str, str], here: Mapping[str, str], passed_on: Collection[str]
) -> dict[str, str]:
    """Return the variables of a kernel in a pod: the kernelspec's own, and those of ``here`` that are named.

    ``${NAME}`` in the kernelspec's stands for a variable that is passed on.
    """
    known = {name: here[name] for name in passed_on if name in here and name not in _SECRETS}
    own = {name: Template(value).safe_substitute(known) for name, value in of_kernelspec.items()}
    return {**known, **own}


def folder_in_pod(folder: str | None, home: Path | None) -> str | None:
    """Return where a kernel is to start, seen from the home; None for the home, and for what is elsewhere."""
    if not folder or home is None:
        return None
    path = Path(folder).resolve()
    base = home.resolve()
    return str(path.relative_to(base)) if path != base and path.is_relative_to(base) else None
