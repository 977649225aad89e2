"""One kernel's turn: its position in the queue, what can be said about it, and the lease that comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from traitlets.log import get_logger

from gpu_pool_client import (
    Activity,
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    PoolUnreachable,
    Process,
)
from gpu_pool_provisioner.kernel_slice import KernelSlice
from gpu_pool_provisioner.outages import NOT_NOW, RETRY_EVERY, Outage, retry
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.process_ends import first_of
from gpu_pool_provisioner.proxy.queue_watch import QueueEntry, noticed, queue_watch_of
from gpu_pool_provisioner.resizing import request_resize
from gpu_pool_provisioner.returning import give_back

#: Seconds between two explanations, which cost a few milliseconds each: for the first in the queue, for
#: those further back (their place over two), and for those whose place has not changed.
_SOON: Final = 3.0
_SELDOM: Final = 60.0
_FEW: Final = 3


class LeaseClient:
    """Asks for a kernel's slice and waits for it. To be used on one event loop."""

    def __init__(self, claim: KernelSlice, holder: Holder, outage_timeout: float) -> None:
        """``outage_timeout`` is for how many seconds a kernel that starts waits for a pool that is away."""
        self._claim = claim
        self._holder = holder
        self._outage_timeout = outage_timeout
        #: Shows in the waiting cell how things stand. There is none until somebody sets this.
        self.tell: Callable[[str], None] = _tell_nobody
        #: The request that is under way, and since when the pool has not answered.
        self._asking: asyncio.Task[Lease] | None = None
        self._outage: Outage | None = None

    @property
    def size(self) -> str:
        """The slice that is waited for: ``2%``."""
        return self._claim.request.size

    async def begin(self, within: float) -> Lease | None:
        """Ask for the slice; return None where the pool is away, or has not answered within so many seconds.

        Then :meth:`ask` goes on. Raises what ``Pool.request`` raises.
        """
        self._outage = Outage(self._outage_timeout)
        try:
            return await self._answer(within)
        except PoolUnreachable as error:
            if not error.may_pass or not self._outage_timeout:
                raise
            self._log(error)
            return None

    async def ask(self) -> Lease:
        """Join the queue, at its end; where the pool is away, tell so and wait for it.

        Raises what ``Pool.request`` raises, and ``PoolUnreachable`` after the outage's timeout.
        """
        outage, self._outage = self._outage or Outage(self._outage_timeout), None
        why = messages.NO_ANSWER
        try:
            while True:
                try:
                    lease = await self._answer(_SOON)
                except PoolUnreachable as error:
                    why, lease = self._borne(error, outage), None
                    await asyncio.sleep(RETRY_EVERY)
                if lease is not None:
                    return lease
                self.tell(messages.away(self.size, why, outage.words))
        except asyncio.CancelledError:
            self.stop()
            raise

    def _borne(self, error: PoolUnreachable, outage: Outage) -> str:
        """Tell why the pool does not answer, and return it; raise it if that is not to be waited for."""
        if not error.may_pass:
            raise error
        if outage.left <= 0:
            raise outage.too_long(error) from error
        self._log(error)
        self.tell(messages.away(self.size, error.message, outage.words))
        return error.message

    async def _answer(self, seconds: float) -> Lease | None:
        """Return the answer to the one request, which may be under way; None if there is none in time."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._claim.take(self._holder))
            self._asking.add_done_callback(noticed)
        asking = self._asking
        await asyncio.wait({asking}, timeout=seconds)
        if not asking.done():
            return None
        if self._asking is asking:
            self._asking = None
        return None if asking.cancelled() else asking.result()

    def stop(self) -> None:
        """Ask no more, withdraw what is under way, and ask anew the next time. May be repeated."""
        asking, self._asking = self._asking, None
        if asking is not None and asking.cancel():
            self._claim.ask_anew()

    async def granted(
        self, lease_id: str, tell: Callable[[str], None], somebody_looks: asyncio.Event
    ) -> Lease:
        """Return the lease once it is held; meanwhile ``tell`` in words how things stand, if somebody looks.

        Raises ``LeaseGone`` when it has ended. Cancelling leaves it in the queue.
        """
        with queue_watch_of(self._claim.pool).standing(lease_id) as standing:
            told: tuple[float, int | None] = (0.0, None)
            while not standing.left:
                if not somebody_looks.is_set():
                    await first_of(somebody_looks.wait(), standing.until_left(_SELDOM))
                elif standing.fault is not None:
                    tell(messages.unreachable(self.size, standing.fault))
                    await standing.until_left(_SOON)
                else:
                    told = await self._explain(lease_id, standing, told, tell)
                    await standing.until_left(_pace(standing.position))
        return await retry(
            lambda: self._claim.pool.wait(lease_id),
            lambda error: tell(messages.unreachable(self.size, error)),
        )

    async def _explain(
        self,
        lease_id: str,
        standing: QueueEntry,
        told: tuple[float, int | None],
        tell: Callable[[str], None],
    ) -> tuple[float, int | None]:
        """Tell how things stand, unless that was told of the same place lately; return when and of which."""
        when, place = told
        now = time.monotonic()
        if place is not None and place > _FEW and place == standing.position and now < when + _SELDOM:
            return told
        try:
            outlook = await self._claim.pool.explain(lease_id)
        except (BadRequest, LeaseGone):  # it has just left the queue
            return told
        except NOT_NOW as error:
            tell(messages.unreachable(self.size, error))
            return told
        tell(messages.waiting(self.size, str(outlook)))
        return now, outlook.position

    async def attach(self, process: Process, *, ready_within: float, grace: float) -> None:
        """Tie the lease to the kernel's process, which has yet to work. Raises ``LeaseGone``.

        Tries again while the pool cannot answer; raises ``PoolUnreachable`` after the outage's timeout.
        """
        attach = partial(self._claim.pool.attach, self._held, process)
        attach = partial(attach, ready_within=ready_within, grace=grace)
        await retry(attach, self._note_fault, self._outage_timeout)

    async def confirm(self, process: Process, grace: float) -> None:
        """Say that the kernel works. Raises and waits as :meth:`attach` does."""
        attach = partial(self._claim.pool.attach, self._held, process, grace=grace)
        await retry(attach, self._note_fault, self._outage_timeout)

    def _note_fault(self, error: GpuPoolError) -> None:
        """Tell whoever waits for the kernel to start why that takes long."""
        self._log(error)
        self.tell(messages.starting(self.size, f"{error.message} Still trying."))

    def _log(self, error: GpuPoolError) -> None:
        get_logger().warning("The GPU pool at %s does not answer a kernel: %s", self._claim.url, error)

    async def lease(self) -> Lease:
        """Return the lease as it is now. Raises ``LeaseGone``, and what is ``NOT_NOW``."""
        return await self._claim.pool.get_lease(self._held)

    async def activity(self) -> Activity:
        """Return what the kernel's process does with its device, as the pool sees it."""
        return await self._claim.pool.activity(self._held)

    async def park(self) -> Lease:
        """Lend the slice to others, or leave the queue for it. Raises ``NotAllowed`` where it holds state."""
        return await self._claim.pool.park(self._held)

    async def resume(self) -> Lease:
        """Ask for the parked slice again; it may have to wait in the queue."""
        return await self._claim.pool.resume(self._held)

    async def launch(self, kernel: KernelCommand) -> KernelPod:
        """Let the pool start the kernel in a pod, in place of one before; see ``Pool.launch``."""
        return await self._claim.pool.launch(self._held, kernel)

    async def pod(self, seen: str) -> KernelPod:
        """Return how the kernel's pod is, once that differs from what was seen, or after some seconds."""
        return await self._claim.pool.pod(self._held, seen)

    async def end_pod(self) -> None:
        """End the kernel's pod, and keep the lease."""
        if self._claim.lease_id is not None:
            await self._claim.pool.end_pod(self._claim.lease_id)

    def wish(self, size: str) -> str:
        """Wish for another size at the next restart; return what the user reads."""
        return request_resize(self._claim, size)

    @property
    def news(self) -> str:
        """Why the last wish came to nothing; empty if none did."""
        return self._claim.notice

    @property
    def _held(self) -> str:
        assert self._claim.lease_id is not None
        return self._claim.lease_id

    async def give_up(self, reason: EndReason) -> None:
        """Leave the queue, or give the slice back. The next :meth:`ask` begins anew."""
        await self._release(self._claim.let_go(), reason)

    async def lose(self, reason: EndReason) -> None:
        """Give the slice back for good: a restart that nobody asked for must not get another."""
        await self._release(self._claim.lease_id, reason)

    async def _release(self, lease_id: str | None, reason: EndReason) -> None:
        if lease_id is not None:
            await give_back(self._claim.pool, lease_id, reason)


def _tell_nobody(_: str) -> None:
    """Show nothing: there is no cell yet."""


def _pace(place: int | None) -> float:
    return max(_SOON, (place or 0) / 2)
