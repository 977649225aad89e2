"""The pod of a lease, which the pool launches, follows and ends; kernels run in it one after the other.

Its main process is a supervisor, where the image has what that needs: it tells how a kernel has ended, and
starts the next one in the same pod. Where it does not answer, a kernel's end is that of its pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from gpu_pool_client import (
    Beginning,
    GpuPoolError,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    PodPhase,
    format_duration,
)
from gpu_pool_client._framework_caps import pod_caps
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.launchers.base import HeldLease, NotStartedError
from gpu_pool_provisioner.launchers.supervised import PORT, SupervisorAway, SupervisorConnection
from gpu_pool_provisioner.pools import NOT_NOW, retry, words_of
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep
from gpu_pool_provisioner.session.idling import taken

T = TypeVar("T")

#: Seconds in which a pool has taken the order to end a pod.
_END_WITHIN: Final = 10.0
#: Seconds in which a pod's supervisor answers: packets to a pod that is gone, or behind a firewall, vanish.
_ANSWERS_WITHIN: Final = 2.0
#: Seconds in which the supervisor of a prepared pod answers, and between two attempts: its container may just
#: have started; and in which its kernel listens then.
_PREPARED_WITHIN, _PREPARED_AGAIN, _BEGUN_WITHIN = 5.0, 0.05, 20.0
#: What changes while a pod runs, and its kernel need not hear of: what is enforced at the moment, and since
#: when the lease has its slices as they are.
_PASSING: Final = ("GPU_POOL_ENFORCED", "GPU_POOL_HELD_SINCE")
#: What it hears of while it runs: what it may use now, with its burst, and torch up to how much of a device.
_BURST: Final = ("GPU_POOL_ALLOWED_MIB", "GPU_POOL_TORCH_FRACTION")
#: Names the last request of the kernel for another size that has an answer; ``slice_requests`` reads it.
ANSWERED: Final = "GPU_POOL_ANSWERED"
_FINE_AGAIN: Final = "Its machine answers again."
#: What is said where the pool answers with what nobody foresaw.
_NOT_KNOWN: Final = "How the machine of this kernel is cannot be known at the moment: {} Still trying."
_KNOWN_AGAIN: Final = "How the machine of this kernel is can be known again."
_LOST: Final = "The connection to the kernel's supervisor was given up."
_SLOW: Final = "The kernel did not start within {}. Its last report: {}"


class LeasePod:
    """One pod, from before its launch."""

    def __init__(self, held: HeldLease, lease: Lease, command: KernelCommand) -> None:
        """Take what it is launched with; ``held`` tells how far its start has come."""
        loop = asyncio.get_running_loop()
        self._held, self._lease, self.command = held, lease, command
        #: Done when it has ended.
        self.ended: asyncio.Future[None] = loop.create_future()
        #: Why the cluster or the pool has taken it; None where it ended by itself.
        self.taken: ExpiryStep | None = None
        #: Why no kernel has come of it, and how its last one ended by itself, in sentences.
        self.fault, self.exit_message = "", ""
        #: Is told what troubles it while it runs.
        self.on_trouble: Callable[[str], None] | None = None
        self._is_ended_by_us = False
        #: Whether it was there before its launch; and what its kernel waits for to be told.
        self.is_prepared = False
        self._beginning: Beginning | None = None
        self._supervisor_key = str(command.connection["key"]).encode()
        self._address: asyncio.Future[str] = loop.create_future()
        #: What its kernel has heard of its slice: of a burst nothing, which may have changed meanwhile.
        self._heard: Mapping[str, str] = {
            name: each for name, each in self._told(lease).items() if not (lease.limit_mib and name in _BURST)
        }
        self._progress = ""
        #: What the pool has answered that nobody foresaw, since its last answer; empty if nothing.
        self._unforeseen = ""
        #: At which ports it listens, and not at those of its command; see :attr:`KernelPod.ports`.
        self.ports: Mapping[str, int] = {}
        #: Whether it waits in the cluster's own queue, and until when it did; no time counts until then.
        self._queued, self._counts_from = False, loop.time()
        self._following: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[SupervisorConnection] | None = None
        #: The connection to its supervisor, while there is one.
        self.connected: SupervisorConnection | None = None

    def fits(self, lease: Lease, command: KernelCommand) -> bool:
        """Whether it runs, and is what would be launched now for this lease and this command.

        Where the pool divides devices it need not be made for the size of its slice: it is told of that.
        """
        known = self._lease
        is_same = (known.id, _devices(known)) == (lease.id, _devices(lease))
        if not lease.terms.parks_in_pod:
            is_same = is_same and (known.request, _lasting(known)) == (lease.request, _lasting(lease))
        return is_same and self.command == command and self._address.done() and not self.ended.done()

    @property
    def is_launched(self) -> bool:
        """Whether it is, or was, on its way."""
        return self._following is not None

    def launch(self) -> None:
        """Have the pool launch it, and follow it from now on."""
        self._following = asyncio.create_task(self._follow())

    async def started(self, within: float) -> str:
        """Return its address once it runs, at most so many seconds after it was queued.

        Raises ``NotStartedError``.
        """
        loop = asyncio.get_running_loop()
        while not self._address.done() and (self._queued or loop.time() < self._counts_from + within):
            left = within if self._queued else self._counts_from + within - loop.time()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._address), left)
        if self._address.done():
            return self._address.result()
        raise NotStartedError(_SLOW.format(format_duration(within), self._progress or "none."))

    # -- What the pool says of it ------------------------------------------

    async def _follow(self) -> None:
        """Launch it, and look at it until it has ended."""
        try:
            pool, lease_id = self._held.pool, self._held.id
            pod = await retry(partial(pool.launch, lease_id, self.command), self._note_fault)
            if pod.beginning is not None:
                self.is_prepared, self._beginning = True, pod.beginning
                self._supervisor_key = pod.beginning.key.encode()
            while pod.phase is not PodPhase.ENDED:
                self._note_state(pod)
                pod = await self._ask(partial(pool.pod, lease_id, pod.version))
            await self._account_for(pod)
        except LeaseGone:
            await self._note_taken("")
        except GpuPoolError as error:
            self.fault = str(error)
            self.taken = ExpiryStep(ExpiryAction.END, f"The kernel was ended. {error}")
        except Exception as error:  # noqa: BLE001 - no fault of ours leaves a cell without a word
            get_logger().exception("The pod or job of a kernel cannot be followed.")
            self.fault = f"{type(error).__name__}: {error}"
        finally:
            self._finish()

    def _note_state(self, pod: KernelPod) -> None:
        before, self._progress = self._progress, pod.message
        if pod.phase is PodPhase.RUNNING and pod.message != before:
            self._tell_trouble(pod.message or _FINE_AGAIN)
        if self._queued:
            self._counts_from = asyncio.get_running_loop().time()
        self._queued = pod.phase is PodPhase.QUEUED
        if pod.phase is PodPhase.RUNNING and pod.address and not self._address.done():
            self.ports = pod.ports
            self._address.set_result(pod.address)
        elif not self._address.done():
            held = self._held
            held.has_waited = held.has_waited or self._queued
            waiting = self._queued and texts.waiting(held.size, pod.message)
            held.tell(waiting or held.starting(pod.message))

    async def _account_for(self, pod: KernelPod) -> None:
        """Take note of why it has ended."""
        if pod.exit_code is None:
            await self._note_taken(pod.message)
            return
        how = pod.message or f"It ended with exit status {pod.exit_code}."
        self.fault = f"The kernel ended before it was ready. {how}"
        if pod.exit_code != 0 and not self._is_ended_by_us:
            self.exit_message = texts.ended_by_itself(how)

    async def _note_taken(self, message: str) -> None:
        """Note that it was taken: with the notice of its lease, if that has ended, or this message."""
        if not self._is_ended_by_us:
            self.taken = await self._step(message)
            self.fault = self.taken.message

    async def _step(self, message: str) -> ExpiryStep:
        try:
            lease = await self._ask(partial(self._held.pool.get_lease, self._held.id))
        except LeaseGone as error:
            return taken(error.reason, message)
        if lease.state is LeaseState.ENDED:
            return taken(lease.end_reason.value if lease.end_reason else None, lease.notice or message)
        return ExpiryStep(ExpiryAction.END, f"The kernel was ended. {message}".rstrip())

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the pool until it answers. Raises ``LeaseGone``, and ``BadRequest`` of no pod.

        Until the pod has run, raises what else the pool does. A kernel that runs goes on whatever that is: it
        ends with its lease, or with its pod.
        """
        is_running = self._address.done() and not self.ended.done()
        answer = await retry(ask, self._note_fault, has_kernel=is_running)
        if self._unforeseen:
            self._unforeseen = ""
            self._tell_trouble(_KNOWN_AGAIN)
        return answer

    def _tell_trouble(self, words: str) -> None:
        if self.on_trouble is not None:
            self.on_trouble(words)

    def _note_fault(self, error: Exception) -> None:
        """Take note of why the pool does not answer; it is asked again, and the pod goes on without us."""
        known = words_of(error)
        if not self._address.done():
            self._held.tell(self._held.starting(f"{known} Still trying."))
        elif not isinstance(error, NOT_NOW):
            if known == self._unforeseen:  # it is the same every time, for hours perhaps
                return
            self._unforeseen = known
            self._tell_trouble(_NOT_KNOWN.format(known))
        get_logger().warning("The pool did not report the state of a kernel's pod or job: %r", error)

    # -- Its supervisor ----------------------------------------------------

    async def supervisor(self) -> SupervisorConnection:
        """Return the connection to its supervisor. Raises ``SupervisorAway``.

        It is made at the first use, and again only once it was :meth:`lost`.
        """
        if self._connecting is None:
            port = self.ports.get("supervisor", PORT)
            connect = SupervisorConnection.connect(
                self._address.result(), self._supervisor_key, port=port, within=_ANSWERS_WITHIN
            )
            self._connecting = asyncio.create_task(connect)
        connecting = self._connecting
        await asyncio.wait({connecting})  # not ended with whoever waits for it
        if connecting.cancelled():  # by another who waits: who asks again has a connection of its own
            raise SupervisorAway(_LOST)
        connected = connecting.result()
        if self._connecting is not connecting:
            connected.close()
            raise SupervisorAway(_LOST)
        self.connected = connected
        return connected

    async def tell(self, lease: Lease) -> None:
        """Let its kernel know its slice as it is now. Raises ``SupervisorAway``."""
        changed = self.change(lease)
        if changed:
            await (await self.supervisor()).change(changed)
            self._heard = self._told(lease)

    async def answer(self, request: str, lease: Lease | None) -> None:
        """Let its kernel know its slice, and that this request has its answer. Raises ``SupervisorAway``."""
        if lease is not None:
            await self.tell(lease)
        await (await self.supervisor()).change({ANSWERED: (None, request)})

    def change(self, lease: Lease) -> dict[str, tuple[str | None, str | None]]:
        """Return the variables of which its kernel has not heard yet, each with its value before and now."""
        before, now = self._heard, self._told(lease)
        changed = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
        return {name: values for name, values in changed.items() if values[0] != values[1]}

    def _told(self, lease: Lease) -> Mapping[str, str]:
        """Return what a kernel hears of its slice that the pool divides."""
        caps = pod_caps(lease.slices, self.command.environment)
        return {**_lasting(lease), **caps}

    async def begin(self) -> None:
        """Have its kernel begin, if it only waits for that; its address is known.

        Raises ``SupervisorAway`` and ``KernelNotStarted``.
        """
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return
        give_up_at = asyncio.get_running_loop().time() + _PREPARED_WITHIN
        while True:
            try:
                supervisor = await self.supervisor()
                break
            except SupervisorAway:
                self.lost()
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
            await asyncio.sleep(_PREPARED_AGAIN)
        await supervisor.begin(beginning.content, within=_BEGUN_WITHIN)

    def lost(self) -> None:
        """Let go of the connection to its supervisor, which does not answer any more."""
        if self.connected is not None:
            self.connected.close()
        if self._connecting is not None:
            self._connecting.cancel()
        self.connected = self._connecting = None

    # -- Its end -----------------------------------------------------------

    async def end(self) -> None:
        """Have the pool end it, unless it has ended."""
        self._is_ended_by_us = True
        try:
            await asyncio.wait_for(self._held.pool.end_pod(self._held.id), _END_WITHIN)
        except (GpuPoolError, asyncio.TimeoutError) as error:
            get_logger().warning(
                "A kernel's pod or job ends with its lease, or at the next launch: %r", error
            )
        finally:
            self._finish()

    async def end_before_next(self) -> None:
        """Have the pool end it before another one is launched; it stays where the pool does not answer."""
        self._is_ended_by_us = True
        try:
            await asyncio.wait_for(self._held.pool.without_retries().end_pod(self._held.id), _END_WITHIN)
        except (GpuPoolError, asyncio.TimeoutError) as error:
            get_logger().warning("A kernel's pod or job stays as it is: %r", error)
            self._is_ended_by_us = False
        else:
            self._finish()

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Let go of it: it ends with its lease, or gives way to the next one there. May be repeated."""
        if self._following is not None:
            self._following.cancel()
        self.lost()


def _devices(lease: Lease) -> list[str]:
    return [part.device.uuid for part in lease.slices]


def _lasting(lease: Lease) -> Mapping[str, str]:
    """Return what a kernel is told of its slice that stays so, or that it hears of when it changes.

    Which devices it sees is the cluster's affair, by the names that it has there.
    """
    kept = lease.environment.items()
    return {name: value for name, value in kept if name not in _PASSING and name != "CUDA_VISIBLE_DEVICES"}
