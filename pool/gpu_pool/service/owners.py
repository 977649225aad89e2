"""Whose lease is whose: remembered, which saves reading each lease before everything asked about it."""

from __future__ import annotations

from typing import Final

from gpu_pool.service.callers import Caller
from gpu_pool_client import Lease, LeaseGone, Pool

#: Leases whose holder is remembered before all are forgotten, and read again when they are asked about.
_MOST_KNOWN: Final = 65_536


class Owners:
    """Knows the user of each lease, who never changes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._users: dict[str, str] = {}

    async def check(self, caller: Caller, lease_id: str) -> None:
        """Refuse another's lease in the words for one that never was, whose id nobody should guess."""
        if not caller.is_admin and not await self.owns(caller, lease_id):
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")

    async def owns(self, caller: Caller, lease_id: str) -> bool:
        """Whether a lease is the caller's own. Raises ``LeaseGone`` for one that never was."""
        if lease_id not in self._users:
            self.remember(await self._pool.get_lease(lease_id))
        return self._users[lease_id] == caller.user

    def remember(self, lease: Lease) -> None:
        """Know a lease from now on."""
        if len(self._users) >= _MOST_KNOWN:
            self._users.clear()
        self._users[lease.id] = lease.holder.user
