"""What each caller may do: the contract of a pool, asked in somebody's name.

Everybody sees and changes their own leases only. Administrators see all, may
end anybody's, and drain devices.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from gpu_pool.embedded import EmbeddedPool
from gpu_pool.service.callers import Caller, course_asked_for
from gpu_pool.service.changes import Changes
from gpu_pool.service.claims import identify
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.pace import Pace
from gpu_pool_client import (
    Activity,
    BadRequest,
    DeviceStatus,
    EndReason,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    OverQuota,
    PoolStatus,
    parse_request,
)
from gpu_pool_client.remote import wire

_LONGEST_KEY: Final = 128
_KEY: Final = re.compile(rf"[!-~]{{1,{_LONGEST_KEY}}}")
#: The reasons for which holders end their own leases. All others are the pool's, or administrators'.
_HOLDERS_REASONS: Final = frozenset(
    (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.NOT_READY, EndReason.TOO_LONG, EndReason.IDLE)
)
#: Leases whose holder is remembered, which saves reading them.
_MOST_KNOWN: Final = 10_000


class Desk:
    """The pool, for callers. Every method says in whose name it is asked."""

    def __init__(
        self,
        pool: EmbeddedPool,
        changes: Changes,
        heartbeats: Heartbeats,
        log: logging.Logger,
        most_polls: int,
        pace: Pace | None = None,
        *,
        other_courses: bool = False,
    ) -> None:
        self.heartbeats = heartbeats
        self.health = Health(pool, changes, log)
        self.audit = pool.audit
        self._pool = pool
        self._changes = changes
        self._log = log
        self._most_polls = most_polls
        self._pace = pace
        self._other_courses = other_courses
        self._polls: Counter[str] = Counter()
        self._holders: dict[str, str] = {}

    # -- Asking ------------------------------------------------------------

    async def request(self, caller: Caller, wanted: wire.Wanted) -> Lease:
        """Ask for a slice in the caller's own name, whatever they say of themselves."""
        if not _KEY.fullmatch(wanted.key):
            raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
        request = parse_request(wanted.request)
        with self.decision(caller, f"request {request}") as told:
            course = course_asked_for(caller, wanted.course, others=self._other_courses)
            holder = Holder(caller.user, course, wanted.kernel, caller.process)
            lease = await self._pool.request(
                request,
                holder,
                _own_key(caller, wanted.key),
                groups=caller.groups,
                server=caller.server,
            )
            told.append(f"lease {lease.id} is {lease.state.value}")
        self._remember(lease)
        return replace(lease, key=wanted.key)

    async def wait(self, caller: Caller, lease_id: str, seconds: float, last: bool) -> Lease | None:
        """Return the lease once it is held. If it waits still: None, or raise ``TimedOut`` if ``last``."""
        lease = await self.lease(caller, lease_id)
        if lease.state is LeaseState.WAITING:
            with self._polling(caller):
                await self._changes.wait(lease_id, _waits_no_more, seconds)
            lease = await self.lease(caller, lease_id)
        if lease.state is LeaseState.WAITING and not last:
            return None
        return _shown(caller, await self._pool.wait(lease_id, 0))

    async def watch(self, caller: Caller, lease_id: str, seconds: float, seen: str) -> Lease | None:
        """Return the lease once its version is not the one seen; None if it still is then."""
        lease = await self.lease(caller, lease_id)
        with self._polling(caller):
            if wire.version(lease) == seen:
                known = lease
                await self._changes.wait(lease_id, lambda now: now is None or _differs(now, known), seconds)
                lease = await self.lease(caller, lease_id)
        return None if wire.version(lease) == seen else lease

    # -- Reading -----------------------------------------------------------

    async def lease(self, caller: Caller, lease_id: str) -> Lease:
        """Return a lease of the caller's."""
        await self._check_own(caller, lease_id)
        return _shown(caller, await self._pool.lease(lease_id))

    async def explain(self, caller: Caller, lease_id: str) -> Outlook:
        """Say why a lease of the caller's waits."""
        await self._check_own(caller, lease_id)
        return await self._pool.explain(lease_id)

    async def forecast(
        self, caller: Caller, text: str, named: str | None, *, anybody: bool
    ) -> Outlook | None:
        """Say what a request of the caller's would meet; to administrators also that of ``anybody``."""
        if anybody and not caller.is_admin:
            raise NotAllowed("Only an administrator can ask in nobody's name.", "Ask for yourself.")
        request = parse_request(text)
        course = course_asked_for(caller, named, others=self._other_courses)
        holder = Holder("" if anybody else caller.user, course, process=caller.process)
        return await self._pool.forecast(request, holder, groups=caller.groups, server=caller.server)

    async def activity(self, caller: Caller, lease_id: str) -> Activity:
        """Return what a lease of the caller's does with its devices."""
        await self._check_own(caller, lease_id)
        return await self._pool.activity(lease_id)

    async def status(self, caller: Caller) -> PoolStatus:
        """Return the devices, and of leases and line the caller's own, at their true places."""
        found = await self._pool.status()

        def own(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
            return tuple(
                _shown(caller, each) for each in leases if caller.is_admin or each.holder.user == caller.user
            )

        return replace(found, leases=own(found.leases), line=own(found.line))

    async def history(self, caller: Caller, since: float) -> list[Mapping[str, Any]]:
        """Return the caller's own leases that have ended since then."""
        return await self._pool.history(since, user=None if caller.is_admin else caller.user)

    # -- Changing ----------------------------------------------------------

    async def attach(self, caller: Caller, lease_id: str, wanted: wire.Attachment) -> Lease:
        """Tie a lease of the caller's to a process of theirs."""
        await self._check_own(caller, lease_id)
        process = await asyncio.to_thread(identify, caller, wanted.process)
        with self.decision(caller, f"attach {process.pid} to {lease_id}"):
            lease = await self._pool.attach(
                lease_id, process, ready_within=wanted.ready_within, grace=wanted.grace
            )
        return _shown(caller, lease)

    async def renew(self, caller: Caller, lease_id: str, ttl: float | None) -> Lease:
        """Lift or set the deadline of a lease of the caller's."""
        await self._check_own(caller, lease_id)
        with self.decision(caller, f"renew {lease_id}"):
            return _shown(caller, await self._pool.renew(lease_id, ttl))

    async def resize(self, caller: Caller, lease_id: str, text: str) -> Lease:
        """Change what a lease of the caller's asks for."""
        await self._check_own(caller, lease_id)
        request = parse_request(text)
        with self.decision(caller, f"resize {lease_id} to {request}"):
            return _shown(
                caller,
                await self._pool.resize(lease_id, request, caller=caller.process, groups=caller.groups),
            )

    async def park(self, caller: Caller, lease_id: str) -> Lease:
        """Give the slices of a lease of the caller's to others for a while."""
        await self._check_own(caller, lease_id)
        with self.decision(caller, f"park {lease_id}"):
            return _shown(caller, await self._pool.park(lease_id, caller=caller.process))

    async def resume(self, caller: Caller, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease of the caller's."""
        await self._check_own(caller, lease_id)
        with self.decision(caller, f"resume {lease_id}"):
            return _shown(caller, await self._pool.resume(lease_id))

    async def release(self, caller: Caller, lease_id: str, reason: EndReason) -> None:
        """End a lease of the caller's. Nothing happens to what is not theirs, or is not there."""
        if reason not in _HOLDERS_REASONS and not caller.is_admin:
            raise NotAllowed(
                f"Only an administrator can end a lease as {reason.value}.", "Leave the reason out."
            )
        try:
            await self._check_own(caller, lease_id)
        except LeaseGone:
            return
        with self.decision(caller, f"release {lease_id} as {reason.value}"):
            await self._pool.release(lease_id, reason)

    # -- Kernels in pods ---------------------------------------------------

    async def launch(self, caller: Caller, lease_id: str, wanted: wire.Launch) -> KernelPod:
        """Start a kernel of the caller's in a pod, beside the server that asks."""
        await self._check_own(caller, lease_id)
        command = KernelCommand(wanted.argv, wanted.connection, wanted.environment, wanted.folder)
        with self.decision(caller, f"launch a kernel on {lease_id}"):
            return await self._pool.launch(lease_id, command, server=caller.server)

    async def pod(self, caller: Caller, lease_id: str, seconds: float, seen: str) -> KernelPod:
        """Return how the pod of a lease of the caller's is, once its version is not the one seen."""
        await self._check_own(caller, lease_id)
        with self._polling(caller):
            return await self._pool.pod(lease_id, seen, seconds)

    async def end_pod(self, caller: Caller, lease_id: str) -> None:
        """End the pod of a lease of the caller's."""
        await self._check_own(caller, lease_id)
        with self.decision(caller, f"end the kernel on {lease_id}"):
            await self._pool.end_pod(lease_id)

    # -- For administrators ------------------------------------------------

    async def revoke(self, caller: Caller, lease_id: str, words: str) -> None:
        """End anybody's lease, and say why. For administrators."""
        if not caller.is_admin:
            raise NotAllowed("Only an administrator can revoke a lease.", "Ask the administrator.")
        with self.decision(caller, f"revoke {lease_id}: {words[:200]!a}"):
            await self._pool.revoke(lease_id, words)

    async def drain(self, caller: Caller, device: str, drained: bool) -> DeviceStatus:
        """Grant nothing more on a device, or grant again. For administrators."""
        if not caller.is_admin:
            raise NotAllowed("Only an administrator can drain a GPU.", "Ask the administrator.")
        with self.decision(caller, f"{'drain' if drained else 'undrain'} {device[:64]!a}"):
            return await self._pool.drain(device, drained=drained)

    # -- Rules -------------------------------------------------------------

    async def _check_own(self, caller: Caller, lease_id: str) -> None:
        """Refuse another's lease in the words for one that never was, whose id nobody should guess."""
        if caller.is_admin:
            return
        if lease_id not in self._holders:
            self._remember(await self._pool.lease(lease_id))
        if self._holders[lease_id] != caller.user:
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")

    def _remember(self, lease: Lease) -> None:
        if len(self._holders) >= _MOST_KNOWN:
            self._holders.clear()
        self._holders[lease.id] = lease.holder.user

    @contextmanager
    def _polling(self, caller: Caller) -> Iterator[None]:
        if self._polls[caller.user] >= self._most_polls:
            raise OverQuota(
                f"You wait for {self._most_polls} leases at once already.", "End some of what waits."
            )
        self._polls[caller.user] += 1
        try:
            yield
        finally:
            self._polls[caller.user] -= 1
            self._polls += Counter()  # forgets those who wait no more

    @contextmanager
    def decision(self, caller: Caller, what: str) -> Iterator[list[str]]:
        """Log what is decided, or why not, and let those look who wait for news."""
        if self._pace is not None and not caller.is_admin:
            self._pace.count(caller.user)
        told: list[str] = []
        try:
            yield told
        except Exception as error:
            told.append(type(error).__name__)
            raise
        finally:
            words = what if what.isprintable() else ascii(what)
            self._log.info("%s: %s: %s", _who(caller), words, *told or ("done",))
            self._changes.decided()


def _who(caller: Caller) -> str:
    user = caller.user if caller.user.isprintable() else ascii(caller.user)
    return f"{user}[{caller.process.pid}]" if caller.peer else f"{user}[hub:{caller.server or ''}]"


def _own_key(caller: Caller, key: str) -> str:
    """Return the key in the ledger: nobody's requests may be found by another's keys."""
    own = f"{caller.mark}:{key}"
    if len(own) <= _LONGEST_KEY:
        return own
    return f"{caller.mark}:{hashlib.sha256(key.encode()).hexdigest()}"


def _shown(caller: Caller, lease: Lease) -> Lease:
    """Return the lease with the key that its holder gave it."""
    return caller.shown(lease)


def _waits_no_more(lease: Lease | None) -> bool:
    return lease is None or lease.state is not LeaseState.WAITING


def _differs(now: Lease, known: Lease) -> bool:
    """Whether anything differs that :func:`wire.version` is made of."""
    return replace(now, key=known.key, terms=known.terms) != known
