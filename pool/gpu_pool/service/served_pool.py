"""A pool that is served to many callers, who may wait for its changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from gpu_pool.audit.callers import Caller
from gpu_pool.pool.for_caller import PoolForCaller
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.decisions import CallLimits, ServiceGuard
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges, ServiceStopping
from gpu_pool_client import KernelPod, Lease, LeaseState, Pool, TimedOut
from gpu_pool_client._operations import operation_of
from gpu_pool_client._remote import bodies


class ServedPool:
    """A pool that is served to many callers. Used in one event loop."""

    def __init__(
        self,
        pool: GpuPool,
        changes: LeaseChanges,
        heartbeats: Heartbeats,
        log: logging.Logger,
        limits: CallLimits = CallLimits(),  # noqa: B008 - frozen
        *,
        other_courses: bool = False,
    ) -> None:
        self.pool = pool
        self.changes = changes
        self.heartbeats = heartbeats
        self.health = Health(pool, changes, log)
        #: None where decisions are not written down.
        self.audit = pool.core.audit
        self.guard = ServiceGuard(changes, log, limits)
        #: Whether a server that was started for one course may ask in the name of others.
        self.other_courses = other_courses

    def for_caller(self, caller: Caller) -> PoolForCaller:
        """Return the pool as this caller sees it, and may use it."""
        return self.pool.for_caller(caller, self.guard, other_courses=self.other_courses)

    # -- Waiting for a change ------------------------------------------------

    async def held_within(
        self, pool: PoolForCaller, lease_id: str, seconds: float, *, last: bool
    ) -> Lease | None:
        """Return the lease once it is held. If it waits still: None, or raise ``TimedOut`` if ``last``.

        Raises ``ServiceStopping`` where it could have been held until then.
        """
        await pool.check(operation_of(Pool.wait), {"lease_id": lease_id})
        # Thousands may wait, and the store has other things to do than to tell them so.
        if self.changes.knows_to_wait(lease_id) or await self._waits(lease_id):
            with self.guard.costs.waiting(pool.caller):
                found = await self.changes.wait(lease_id, _waits_no_more, seconds)
            if not last and (not found or await self._waits(lease_id)):
                return None
        try:
            return await pool.wait(lease_id, 0)
        except TimedOut:
            if seconds > 0 and self.changes.stopped:
                raise ServiceStopping("The pool's service is stopping.", "Ask again in a moment.") from None
            raise

    async def _waits(self, lease_id: str) -> bool:
        return not _waits_no_more(await self.pool.get_lease(lease_id))

    async def changed_within(
        self, pool: PoolForCaller, lease_id: str, seconds: float, seen: str
    ) -> Lease | None:
        """Return the lease once its version is not the one seen; None if it still is then."""
        await pool.check(operation_of(Pool.watch), {"lease_id": lease_id})
        lease = known = await pool.get_lease(lease_id)
        with self.guard.costs.waiting(pool.caller):
            if bodies.version(known) == seen and await self.changes.wait(
                lease_id, lambda now: now is None or _differs(now, known), seconds
            ):
                lease = await pool.get_lease(lease_id)
        return None if bodies.version(lease) == seen else lease

    async def pod_within(self, pool: PoolForCaller, lease_id: str, seconds: float, seen: str) -> KernelPod:
        """Return the lease's pod once its version is not the one seen, or after so many seconds."""
        await pool.check(operation_of(Pool.pod), {"lease_id": lease_id})
        with self.guard.costs.waiting(pool.caller):
            return await pool.pod(lease_id, seen, seconds)

    async def positions(self, pool: PoolForCaller) -> Mapping[str, int]:
        """See ``Pool.positions``: as of the last look, where the caller has changed nothing since."""
        await pool.check(operation_of(Pool.positions), {})
        user = pool.caller.user
        places = self.changes.positions(user)
        if places is None:
            async with self.guard.costs.asking(pool.caller):
                queue = (await self.pool.status()).queue
            places = {each.id: each.position or 0 for each in queue if each.holder.user == user}
        return places


def _waits_no_more(lease: Lease | None) -> bool:
    return lease is None or not (lease.state is LeaseState.WAITING or lease.is_queued)


def _differs(now: Lease, known: Lease) -> bool:
    """Whether anything differs that :func:`bodies.version` is made of."""
    return replace(now, key=known.key, terms=known.terms) != known
