"""The steps by which a pool is kept in order, and where they are done again and again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Final, Protocol

from gpu_pool.pool.backend import Backend, Taken
from gpu_pool.pool.reconciler import Facts, Reconciler, Step
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.leases import LeaseStore
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import Lease, LeaseGone, LeaseState, PoolUnreachable, Process

#: How old, in seconds, what is known of the devices may be where nobody asks for any.
SELDOM: Final = 10.0
#: Seconds without a sign of the process that keeps the pool in order after which another one does it.
_STANDS_STILL: Final = 2.5
#: The queue is served, although nothing has ended, whenever so many times as long has passed as that takes.
_SERVE_TIMES: Final = 20.0
#: Seconds in which the last pass ends when the pool is closed.
_LAST_PASS_WITHIN: Final = 5.0


class OrderedPool(Protocol):
    """What is asked of the pool that is kept in order."""

    url: str
    store: StoreThread
    backend: Backend
    registry: DeviceRegistry

    async def refresh(self, max_age: float) -> None:
        """Write down which devices there are, by a look that is not older."""

    async def end_taken(self, lease_id: str, taken: Taken) -> bool:
        """End a lease since what it needs is gone; return whether it had not ended yet."""

    async def count(self, lease_id: str, *, waits: bool) -> Lease:
        """Count a lease's slice, or nothing while it waits in somebody else's queue."""


class Passes:
    """What keeps one pool in order: see :class:`Reconciler`."""

    def __init__(self, pool: OrderedPool) -> None:
        self._pool, self._store, self._backend = pool, pool.store, pool.backend
        self._reconciler = Reconciler(
            (
                Step("observe", self._observe),
                Step("end what is gone", self._end_gone),
                Step("end what expired", self._end_expired),
                Step("serve the queue", self._serve_queue),
                Step("bind", self._bind),
                Step("unbind leftovers", self._unbind),
            )
        )
        self.once, self.wake, self.on_change = (
            self._reconciler.once,
            self._reconciler.wake,
            self._reconciler.on_change,
        )
        self.counts = self._reconciler.counts
        #: None where this process makes no passes by itself.
        self._running: Future[None] | None = None
        self._starting = threading.Lock()
        #: When the queue is served next although nothing has happened (``time.monotonic()``).
        self._serve_at = 0.0
        #: Leases that were parked since they wait in somebody else's queue, by id.
        self._outside: set[str] = set()
        #: What was held at the last pass, all of which is bound.
        self._bound: Sequence[Lease] = ()

    @property
    def are_made(self) -> bool:
        """Whether this process makes passes by itself."""
        return self._running is not None

    def begin(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Make passes from now on: in this event loop, or in one of this process's own."""
        with self._starting:
            if self._running is not None:
                return
            # What follows by itself is in nobody's name, whoever asks at this moment.
            run, in_nobodys_name = self._reconciler.run, Context().run
            if loop is not None:
                self._running = in_nobodys_name(asyncio.run_coroutine_threadsafe, run(), loop)
            else:
                # A thread that ends with the passes: one that stayed would take signals which are for others.
                self._running = in_nobodys_name(_in_thread, run)

    async def end(self) -> None:
        """Make no passes any more, and wait for the last one."""
        running, self._running = self._running, None
        self._reconciler.stop()
        if running is not None:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.wrap_future(running), _LAST_PASS_WITHIN)

    # -- The steps -------------------------------------------------------------

    async def _observe(self, facts: Facts) -> bool:
        """See which devices there are, and which processes are gone. One bad node hides no dead process."""
        try:
            if self._backend.is_owner:
                await self._pool.refresh(SELDOM)
        finally:
            await self._store.run(self._look_around, facts)
        return False

    def _look_around(self, store: LeaseStore, facts: Facts) -> None:
        with contextlib.suppress(OtherDevices):
            self._pool.registry.register_awaited(store)
        facts.leads = self._backend.is_owner or store.leads(_STANDS_STILL)
        facts.findings, facts.somebody_waits = store.findings(), store.somebody_waits()

    async def _end_gone(self, facts: Facts) -> bool:
        """End what was kept alive by processes that are gone, and what has lost its devices."""
        if not facts.leads:
            return False
        changed = bool(facts.findings.dead) and await self._store.run(LeaseStore.end_gone, facts.findings)
        for lease_id, taken in (await self._backend.observe(self._living)).items():
            changed = await self._pool.end_taken(lease_id, taken) or changed
        return changed

    async def _end_expired(self, facts: Facts) -> bool:
        if not (facts.leads and facts.findings.overdue):
            return False
        return await self._store.run(LeaseStore.end_overdue, facts.findings)

    async def _serve_queue(self, facts: Facts) -> bool:
        """Grant to whoever's turn has come: since something has ended, and now and then as time decides."""
        if self._backend.queue is not None:
            await self._follow_queue(self._backend.queue.waits)
        began = time.monotonic()
        if not (facts.leads and facts.somebody_waits and (facts.findings or began >= self._serve_at)):
            return False
        granted = await self._store.run(LeaseStore.serve_queue, tell=not self._backend.is_owner)
        self._serve_at = began + _SERVE_TIMES * (time.monotonic() - began)
        return granted

    async def _follow_queue(self, waits: Callable[[str], bool | None]) -> None:
        """Park the leases that wait in somebody else's queue, and resume those that were let in."""
        for lease in await self._living():
            is_waiting, is_parked = waits(lease.id), lease.state is LeaseState.PARKED
            if is_waiting is None or is_waiting == is_parked or not (is_waiting or self._is_outside(lease)):
                continue
            with contextlib.suppress(LeaseGone):
                await self._pool.count(lease.id, waits=is_waiting)
                (self._outside.add if is_waiting else self._outside.discard)(lease.id)

    def _is_outside(self, lease: Lease) -> bool:
        """Whether a parked lease is so for that queue, and not since its holder lends its slice."""
        host = self._backend.host
        return lease.id in self._outside or (host is not None and host.has_kernel(lease.id))

    async def _bind(self, _: Facts) -> bool:
        """Make take effect what is held and does not yet, as far as this process is the one to do it."""
        held = await self._store.run(_held)
        if held is self._bound:
            return False
        known = {(lease.id, lease.held_at) for lease in self._bound}
        new = [lease for lease in held if (lease.id, lease.held_at) not in known and self._is_ours(lease)]
        for lease in new:
            with contextlib.suppress(PoolUnreachable, LeaseGone):  # it was ended
                await self._backend.bind(lease)
        self._bound = held
        return False

    def _is_ours(self, lease: Lease) -> bool:
        return self._backend.is_owner or lease.holder.process == Process.current()

    async def _unbind(self, _: Facts) -> bool:
        """Let nothing take effect that is not living any more."""
        await self._backend.unbind(self._living)
        return False

    async def _living(self) -> Sequence[Lease]:
        status = await self._store.run(LeaseStore.status, self._pool.url)
        return (*status.leases, *status.queue)


def _in_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
    """Run a coroutine to its end in an event loop, and a thread, of its own."""
    done: Future[None] = Future()

    def begin() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the end
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=begin, name="gpu-pool-reconciler", daemon=True).start()
    return done


def _held(store: LeaseStore) -> Sequence[Lease]:
    return store.measured_use.held()
