"""Asks for a kernel's slice, waits for it, and says how the queue in front of it stands."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

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
    Outlook,
    OverQuota,
    Pool,
    PoolUnreachable,
    Process,
    format_duration,
)
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.kernel_slice import NOT_NOW, KernelSlice, note_error
from gpu_pool_provisioner.proxy.events import first_of
from gpu_pool_provisioner.resizing import resize_at_restart
from gpu_pool_provisioner.session import texts

#: Seconds between two looks; a grant is noticed that late at most, and at once for the first in the queue.
_LOOK_EVERY: Final = 1.0
#: Seconds to leave a pool alone that cannot answer now.
RETRY_EVERY: Final = 2.0

T = TypeVar("T")


class OutageTimer:
    """For how long a pool has been away, and for how long it may be."""

    def __init__(self, limit: float, since: float | None = None) -> None:
        """``since`` is a time of ``time.monotonic()``, by default now."""
        self.limit = limit
        self._since = time.monotonic() if since is None else since

    @property
    def progress(self) -> str:
        """How long it has been, and may be: ``12s of at most 5min``."""
        return f"{format_duration(time.monotonic() - self._since)} of at most {format_duration(self.limit)}"

    @property
    def left(self) -> float:
        """Seconds until it has been away for too long."""
        return self._since + self.limit - time.monotonic()

    def too_long(self, error: PoolUnreachable) -> PoolUnreachable:
        """Return what to raise then, with what was last heard."""
        waited = f"{error.message} This kernel has waited for it for {format_duration(self.limit)}."
        return PoolUnreachable(waited, error.remedy)


async def retry(
    ask: Callable[[], Awaitable[T]],
    tell: Callable[[PoolUnreachable | OverQuota], None],
    limit: float | None = None,
) -> T:
    """Ask a pool until it answers; ``tell`` why it does not. What else it raises is raised.

    With a ``limit``, ``PoolUnreachable`` is raised once it has been away for so many seconds.
    """
    outage = None if limit is None else OutageTimer(limit)
    while True:
        try:
            return await ask()
        except NOT_NOW as error:  # noqa: PERF203 - what is waited for takes seconds
            if outage is not None and outage.left <= 0 and isinstance(error, PoolUnreachable):
                raise outage.too_long(error) from error
            tell(error)
            await asyncio.sleep(RETRY_EVERY)


class QueueEntry:
    """How one lease waits in the queue."""

    def __init__(self) -> None:
        #: Its position when it was last seen, 1 for the next; None before the first look.
        self.position: int | None = None
        #: Why nothing is known at the moment.
        self.fault: GpuPoolError | None = None
        #: Set once it is no longer in the queue: held, or gone.
        self.left = asyncio.Event()

    async def until_left(self, seconds: float) -> None:
        """Return when it has left the queue, or after so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.left.wait(), seconds)


class QueueWatch:
    """Everybody of one event loop who waits for the same pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._entries: dict[str, QueueEntry] = {}
        self._watching: asyncio.Task[None] | None = None
        #: Waits on behalf of one of them, so that the pool does what is due in its queue meanwhile.
        #: It goes on from one look to the next, and ends when that one leaves the queue.
        self._delegate: asyncio.Task[Lease] | None = None

    @contextlib.contextmanager
    def entry(self, lease_id: str) -> Iterator[QueueEntry]:
        """Watch a lease for as long as the context lasts."""
        entry = self._entries[lease_id] = QueueEntry()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield entry
        finally:
            self._entries.pop(lease_id, None)

    async def _watch(self) -> None:
        try:
            while self._entries and (pool := self._pool()) is not None:
                await self._look(pool)
        finally:
            # Should this have failed, each of them asks the pool itself, and hears what is wrong.
            for entry in self._entries.values():
                entry.left.set()

    async def _look(self, pool: Pool) -> None:
        try:
            await self._wait_a_while(pool)
            # Of who joins the queue while the answer is under way, it says nothing.
            asked = list(self._entries.items())
            positions = await pool.positions()
        except NOT_NOW as error:
            for entry in self._entries.values():
                entry.fault = error
            await asyncio.sleep(RETRY_EVERY)
            return
        for lease_id, entry in asked:
            entry.position, entry.fault = positions.get(lease_id), None
            if entry.position is None:
                entry.left.set()
                if self._entries.get(lease_id) is entry:
                    del self._entries[lease_id]

    async def _wait_a_while(self, pool: Pool) -> None:
        """Return after a second, or when the delegate has left the queue."""
        if self._delegate is None:
            first = min(self._entries, key=lambda lease_id: self._entries[lease_id].position or 0)
            self._delegate = asyncio.create_task(pool.wait(first))
            self._delegate.add_done_callback(note_error)
        await asyncio.wait({self._delegate}, timeout=_LOOK_EVERY)
        if self._delegate.done():
            delegate, self._delegate = self._delegate, None
            with contextlib.suppress(LeaseGone, BadRequest):
                delegate.result()


_WATCHES: weakref.WeakKeyDictionary[Pool, QueueWatch] = weakref.WeakKeyDictionary()


def queue_watch_of(pool: Pool) -> QueueWatch:
    """Return the queue in front of a pool, as seen from the one event loop on which proxies live."""
    return _WATCHES.setdefault(pool, QueueWatch(pool))


#: Seconds between two explanations, which cost a few milliseconds each: for the first in the queue, for
#: those further back (their position over two), and for those whose position has not changed.
_SOON: Final = 3.0
_SELDOM: Final = 60.0
_FEW: Final = 3


class LeaseClient:
    """Asks for a kernel's slice and waits for it. Use it on one event loop."""

    def __init__(
        self,
        kernel_slice: KernelSlice,
        holder: Holder,
        outage_timeout: float,
        idle_others: Callable[[], str] = lambda: "",
    ) -> None:
        """Ask for nothing yet.

        ``outage_timeout`` is for how many seconds a kernel that starts waits for a pool that is away.
        ``idle_others`` names idle kernels of the same user that hold slices, in a sentence or not at all.
        """
        self._idle_others = idle_others
        self._kernel_slice = kernel_slice
        self._holder = holder
        self._outage_timeout = outage_timeout
        #: Shows in the waiting cell how the wait is going. Does nothing until somebody sets it.
        self.tell: Callable[[str], None] = _tell_nobody
        #: When the pool was first asked, by ``time.monotonic()``, where that was before :meth:`ask`.
        self.away_since: float | None = None
        #: Why the lease waits, as the pool said last; None where it has not said, or does not answer.
        self.outlook: Outlook | None = None
        self._entry: QueueEntry | None = None
        #: Whether the slice that it has, or asks for, was not there at once.
        self.has_waited = False

    @property
    def size(self) -> str:
        """The slice that is waited for: ``2%``."""
        return self._kernel_slice.request.size

    @property
    def seen(self) -> Lease | None:
        """The lease as it was last seen, by whomever; None before there is one."""
        return self._kernel_slice.lease

    @property
    def last_activity(self) -> Activity:
        """What the kernel's process was last seen to do with its device."""
        return self._kernel_slice.activity or Activity()

    @property
    def position(self) -> int | None:
        """The position in the queue as it was last seen; None where the lease does not wait."""
        if self._entry is None:
            return None
        lease = self.seen
        return self._entry.position or (lease.position if lease else None)

    async def ask(self) -> Lease:
        """Join the queue, at its end; where the pool is away, tell so and wait for it.

        Raises what ``Pool.request`` raises, and ``PoolUnreachable`` after the outage's timeout.
        """
        outage = OutageTimer(self._outage_timeout, self.away_since)
        self.has_waited = self.away_since is not None
        self.away_since = None
        why = texts.NO_ANSWER
        try:
            while True:
                try:
                    lease = await self._kernel_slice.take_within(self._holder, _SOON)
                except PoolUnreachable as error:
                    why, lease = self._borne(error, outage), None
                    await asyncio.sleep(RETRY_EVERY)
                if lease is not None:
                    return lease
                self.has_waited = True
                self.tell(texts.away(self.size, why, outage.progress))
        except asyncio.CancelledError:
            await self._kernel_slice.stop_asking()
            raise

    def _borne(self, error: PoolUnreachable, outage: OutageTimer) -> str:
        """Tell why the pool does not answer, and return it; raise it if there is no point in waiting."""
        if not error.may_pass:
            raise error
        if outage.left <= 0:
            raise outage.too_long(error) from error
        self._log(error)
        self.has_waited = True
        self.tell(texts.away(self.size, error.message, outage.progress))
        return error.message

    async def granted(
        self, lease_id: str, tell: Callable[[str], None], somebody_looks: asyncio.Event
    ) -> Lease:
        """Return the lease once it is held; meanwhile ``tell`` how the wait is going, if somebody looks.

        Raises ``LeaseGone`` when it has ended. Cancelling leaves it in the queue.
        """
        self.has_waited = True
        with self._queued(lease_id) as entry:
            last: tuple[float, int | None] = (0.0, None)
            while not entry.left.is_set():
                if not somebody_looks.is_set():
                    await first_of(somebody_looks.wait(), entry.until_left(_SELDOM))
                elif entry.fault is not None:
                    self.outlook = None
                    tell(texts.unreachable(self.size, entry.fault))
                    await entry.until_left(_SOON)
                else:
                    last = await self._explain(lease_id, entry, last, tell)
                    await entry.until_left(max(_SOON, (entry.position or 0) / 2))
        held = await retry(
            lambda: self._kernel_slice.pool.wait(lease_id),
            lambda error: tell(texts.unreachable(self.size, error)),
        )
        return self._kernel_slice.see(held)

    @contextlib.contextmanager
    def _queued(self, lease_id: str) -> Iterator[QueueEntry]:
        """Watch the queue for as long as the context lasts, also for those who ask for :attr:`position`."""
        try:
            with queue_watch_of(self._kernel_slice.pool).entry(lease_id) as self._entry:
                yield self._entry
        finally:
            self._entry = self.outlook = None

    async def _explain(
        self,
        lease_id: str,
        entry: QueueEntry,
        last: tuple[float, int | None],
        tell: Callable[[str], None],
    ) -> tuple[float, int | None]:
        """Tell how things stand, unless told lately for the same position; return when, and which."""
        when, position = last
        now = time.monotonic()
        if position is not None and position > _FEW and position == entry.position and now < when + _SELDOM:
            return last
        try:
            outlook = await self._kernel_slice.pool.explain(lease_id)
        except (BadRequest, LeaseGone):  # it has just left the queue
            return last
        except NOT_NOW as error:
            tell(texts.unreachable(self.size, error))
            return last
        self.outlook = outlook
        tell(texts.waiting(self.size, f"{outlook} {self._idle_others()}".rstrip()))
        return now, outlook.position

    async def attach(self, process: Process, *, ready_within: float, grace: float) -> None:
        """Attach the lease to the kernel's process, which has yet to answer. Raises ``LeaseGone``.

        Tries again while the pool cannot answer; raises ``PoolUnreachable`` after the outage's timeout.
        """
        pool, lease_id = self._kernel_slice.pool, self._held
        attach = partial(pool.attach, lease_id, process, ready_within=ready_within, grace=grace)
        await retry(attach, self._note_fault, self._outage_timeout)

    async def confirm(self, process: Process, grace: float) -> None:
        """Say that the kernel works. Raises and waits as :meth:`attach` does."""
        attach = partial(self._kernel_slice.pool.attach, self._held, process, grace=grace)
        await retry(attach, self._note_fault, self._outage_timeout)

    def _note_fault(self, error: GpuPoolError) -> None:
        """Tell whoever waits for the kernel to start why that takes long."""
        self._log(error)
        self.tell(self.starting(f"{error.message} Still trying."))

    def starting(self, progress: str = "") -> str:
        """Say that the slice is there and the kernel starts; ``progress`` says how far it is."""
        return texts.starting(self.size, progress, waited=self.has_waited)

    def _log(self, error: GpuPoolError) -> None:
        get_logger().warning("The GPU pool at %s does not answer a kernel: %s", self._kernel_slice.url, error)

    async def lease(self) -> Lease:
        """Return the lease as it is now. Raises ``LeaseGone``, and what is ``NOT_NOW``."""
        return self._kernel_slice.see(await self._kernel_slice.pool.get_lease(self._held))

    async def activity(self) -> Activity:
        """Return what the kernel's process does with its device, as the pool sees it."""
        activity = await self._kernel_slice.pool.activity(self._held)
        self._kernel_slice.activity = activity
        return activity

    async def report_busy(self, spans: Sequence[tuple[float, float]]) -> None:
        """Tell the pool when the kernel worked. What it cannot hear of is left out of its history."""
        if spans:
            with contextlib.suppress(GpuPoolError):
                await self._kernel_slice.pool.report_busy(self._held, spans)

    async def park(self) -> Lease:
        """Lend the slice to others, or leave the queue for it. Raises ``NotAllowed`` where it holds state."""
        return self._kernel_slice.see(await self._kernel_slice.pool.park(self._held))

    async def resume(self) -> Lease:
        """Ask for the parked slice again; it may have to wait in the queue."""
        return self._kernel_slice.see(await self._kernel_slice.pool.resume(self._held))

    async def launch(self, kernel: KernelCommand) -> KernelPod:
        """Let the pool start the kernel in a pod, in place of one before; see ``Pool.launch``."""
        return await self._kernel_slice.pool.launch(self._held, kernel)

    async def pod(self, seen: str) -> KernelPod:
        """Return how the kernel's pod is, once that differs from what was seen, or after some seconds."""
        return await self._kernel_slice.pool.pod(self._held, seen)

    async def end_pod(self) -> None:
        """End the kernel's pod, and keep the lease."""
        if self._kernel_slice.lease_id is not None:
            await self._kernel_slice.pool.end_pod(self._kernel_slice.lease_id)

    async def resize(self, size: str) -> str:
        """Ask for another size at the next restart; return what the user reads."""
        return await resize_at_restart(self._kernel_slice, size)

    @property
    def notice(self) -> str:
        """Why the last change of size came to nothing; empty if it did not."""
        return self._kernel_slice.notice

    @property
    def _held(self) -> str:
        assert self._kernel_slice.lease_id is not None
        return self._kernel_slice.lease_id

    async def granted_now(self) -> Lease:
        """Return the lease if it is held. Raises ``TimedOut``, saying why it is not, and ``LeaseGone``."""
        return self._kernel_slice.see(await self._kernel_slice.pool.wait(self._held, 0))

    async def give_up(self, reason: EndReason, *, ask_anew: bool = True) -> None:
        """Leave the queue, or give the slice back.

        The next :meth:`ask` begins anew, unless a restart that nobody asked for must not get another slice.
        """
        if not ask_anew:
            await self._kernel_slice.give_back(reason)
            return
        lease_id, self._kernel_slice.lease_id = self._kernel_slice.lease_id, None
        self._kernel_slice.lease = self._kernel_slice.activity = None
        self._kernel_slice.renew_key()
        await self._kernel_slice.give_back(reason, lease_id=lease_id)


def _tell_nobody(_: str) -> None:
    """Show nothing: there is no cell yet."""
