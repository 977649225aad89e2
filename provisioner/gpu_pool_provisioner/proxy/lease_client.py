"""Asks for a kernel's slice, waits for it, and says how the queue in front of it stands."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
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
    Pool,
    PoolUnreachable,
    Process,
)
from gpu_pool_provisioner.kernel_slice import KernelSlice
from gpu_pool_provisioner.pools import NOT_NOW, RETRY_EVERY, Outage, give_back, retry
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.loops import first_of
from gpu_pool_provisioner.resizing import request_resize

#: Seconds between two looks; a grant is noticed that late at most, and at once for the first in the queue.
_LOOK_EVERY: Final = 1.0


class QueueEntry:
    """How one lease waits in the queue."""

    def __init__(self) -> None:
        #: Its place when it was last seen, 1 for the next; None before the first look.
        self.position: int | None = None
        #: Why nothing is known at the moment.
        self.fault: GpuPoolError | None = None
        self._left = asyncio.Event()

    @property
    def left(self) -> bool:
        """Whether it is no longer in the queue: held, or gone."""
        return self._left.is_set()

    def leave(self) -> None:
        """Note that it is no longer in the queue."""
        self._left.set()

    async def until_left(self, seconds: float) -> None:
        """Return when it has left the queue, or after so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._left.wait(), seconds)


class QueueWatch:
    """Everybody of one event loop who waits for the same pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._standings: dict[str, QueueEntry] = {}
        self._watching: asyncio.Task[None] | None = None
        #: Waits in the name of one of them, so that the pool does what is due in its queue meanwhile.
        #: Never cancelled, which would withdraw that one; it ends when that one leaves the queue.
        self._delegate: asyncio.Task[Lease] | None = None

    @contextlib.contextmanager
    def standing(self, lease_id: str) -> Iterator[QueueEntry]:
        """Watch a lease for as long as the context lasts."""
        standing = self._standings[lease_id] = QueueEntry()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield standing
        finally:
            self._standings.pop(lease_id, None)

    async def _watch(self) -> None:
        try:
            while self._standings and (pool := self._pool()) is not None:
                await self._look(pool)
        finally:
            # Should this have failed, each of them asks the pool itself, and hears what is wrong.
            for standing in self._standings.values():
                standing.leave()

    async def _look(self, pool: Pool) -> None:
        try:
            await self._wait_a_while(pool)
            # Of who joins the queue while the answer is under way, it says nothing.
            asked = list(self._standings.items())
            places = await pool.positions()
        except NOT_NOW as error:
            for standing in self._standings.values():
                standing.fault = error
            await asyncio.sleep(RETRY_EVERY)
            return
        for lease_id, standing in asked:
            standing.position, standing.fault = places.get(lease_id), None
            if standing.position is None:
                standing.leave()
                if self._standings.get(lease_id) is standing:
                    del self._standings[lease_id]

    async def _wait_a_while(self, pool: Pool) -> None:
        """Return after a second, or when the delegate has left the queue."""
        if self._delegate is None:
            first = min(self._standings, key=lambda lease_id: self._standings[lease_id].position or 0)
            self._delegate = asyncio.create_task(pool.wait(first))
            self._delegate.add_done_callback(noticed)
        await asyncio.wait({self._delegate}, timeout=_LOOK_EVERY)
        if self._delegate.done():
            delegate, self._delegate = self._delegate, None
            with contextlib.suppress(LeaseGone, BadRequest):
                delegate.result()


def noticed(task: asyncio.Task[Lease]) -> None:
    """Take note of a task's error, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


_LINES: weakref.WeakKeyDictionary[Pool, QueueWatch] = weakref.WeakKeyDictionary()


def queue_watch_of(pool: Pool) -> QueueWatch:
    """Return the queue in front of a pool, as seen from the one event loop on which proxies live."""
    return _LINES.setdefault(pool, QueueWatch(pool))


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
        # Cancelling a pool's wait would withdraw the lease.
        return await retry(
            lambda: asyncio.shield(self._claim.pool.wait(lease_id)),
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
        return await self._claim.pool.lease(self._held)

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
