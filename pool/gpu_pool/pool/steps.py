"""The steps by which a pool is kept in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from gpu_pool.pool.backend import Backend, ExternalQueue, Taken
from gpu_pool.pool.reconciler import Facts, Step
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.store import leases, reclaim
from gpu_pool.store.context import StoreContext
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import Lease, LeaseGone, LeaseState, PoolUnreachable, Process

#: How old, in seconds, what is known of the devices may be where nobody asks for any.
SELDOM: Final = 10.0
#: Seconds without a sign of the process that keeps the pool in order after which another one does it.
_STANDS_STILL: Final = 2.5
#: The queue is served, although nothing has ended, whenever so many times as long has passed as that takes.
_SERVE_TIMES: Final = 20.0


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


class PoolSteps:
    """What is done to one pool in each pass of its :class:`Reconciler`, in this order."""

    def __init__(self, pool: OrderedPool) -> None:
        self._pool, self._store, self._backend = pool, pool.store, pool.backend
        #: When the queue is served next although nothing has happened (``time.monotonic()``).
        self._serve_at = 0.0
        #: What was held at the last pass, all of which is bound.
        self._bound: Sequence[Lease] = ()

    def all(self) -> tuple[Step, ...]:
        """Return the steps by their names."""
        return (
            Step("observe", self._observe),
            Step("end what is gone", self._end_gone),
            Step("end what expired", self._end_expired),
            Step("serve the queue", self._serve_queue),
            Step("bind", self._bind),
            Step("unbind leftovers", self._unbind),
        )

    async def _observe(self, facts: Facts) -> bool:
        """See devices, processes and what the backend knows of leases. One bad node hides no dead process."""
        try:
            if self._backend.is_owner:
                await self._pool.refresh(SELDOM)
        finally:
            await self._store.run(self._read_facts, facts)
        if facts.leads:
            facts.seen = await self._backend.observe(self._living)
        return False

    def _read_facts(self, store: StoreContext, facts: Facts) -> None:
        registry = self._pool.registry
        if registry.awaited:
            with contextlib.suppress(OtherDevices):
                registry.register_awaited(store)
        facts.leads = self._backend.is_owner or reclaim.leads(store, _STANDS_STILL)
        facts.findings = reclaim.find_over(store)
        # Whoever owns the devices follows also what others than leases do.
        is_settled = facts.findings.nothing_lives and not registry.awaited
        facts.may_rest = is_settled and not self._backend.is_owner

    async def _end_gone(self, facts: Facts) -> bool:
        """End what was kept alive by processes that are gone, and what has lost its devices."""
        if not facts.leads:
            return False
        changed = bool(facts.findings.dead) and await self._store.run(reclaim.end_gone, facts.findings)
        for lease_id, taken in facts.seen.taken.items():
            changed = await self._pool.end_taken(lease_id, taken) or changed
        return changed

    async def _end_expired(self, facts: Facts) -> bool:
        if not (facts.leads and facts.findings.overdue):
            return False
        return await self._store.run(reclaim.end_overdue, facts.findings)

    async def _serve_queue(self, facts: Facts) -> bool:
        """Grant to whoever's turn has come: since something has ended, and now and then as time decides."""
        if facts.leads and self._backend.queue is not None:
            await self._follow(self._backend.queue, facts.seen.admitted)
        began = time.monotonic()
        if not (
            facts.leads and facts.findings.somebody_waits and (facts.findings or began >= self._serve_at)
        ):
            return False
        granted = await self._store.run(reclaim.serve_queue, tell=not self._backend.is_owner)
        self._serve_at = began + _SERVE_TIMES * (time.monotonic() - began)
        return granted

    async def _follow(self, queue: ExternalQueue, admitted: Collection[str]) -> None:
        """Count nothing for what waits in somebody else's queue, and hold again what was let in there."""
        for lease in await self._living():
            with contextlib.suppress(LeaseGone):
                if lease.state is LeaseState.HELD and queue.place(lease.id) is not None:
                    await self._store.run(leases.lend, lease.id, queued=True)
                elif lease.is_queued and lease.id in admitted:
                    await self._store.run(leases.queue_again, lease.id)

    async def _bind(self, _: Facts) -> bool:
        """Make take effect what is held and does not yet, as far as this process is the one to do it."""
        held = await self._store.run(_held)
        if held is self._bound:
            return False
        known = {(lease.id, lease.held_at) for lease in self._bound}
        new, me = [lease for lease in held if (lease.id, lease.held_at) not in known], Process.current()
        for lease in new:
            if not (self._backend.is_owner or lease.holder.process == me):
                continue
            with contextlib.suppress(PoolUnreachable, LeaseGone):  # it was ended
                await self._backend.bind(lease)
        self._bound = held
        return False

    async def _unbind(self, _: Facts) -> bool:
        """Let nothing take effect that is not living any more."""
        await self._backend.unbind(self._living)
        return False

    async def _living(self) -> Sequence[Lease]:
        status = await self._store.run(leases.status, self._pool.url)
        return (*status.leases, *status.queue)


def _held(store: StoreContext) -> Sequence[Lease]:
    return store.measured_use.held()
