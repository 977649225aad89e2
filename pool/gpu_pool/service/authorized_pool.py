"""What each caller may do: the contract of a pool, asked in somebody's name.

Everybody sees and changes their own leases only. Administrators see all, may
end anybody's, and drain devices.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from gpu_pool.caller import Caller
from gpu_pool.policy.revocation import Effect
from gpu_pool.service.callers import course_asked_for, verify_process
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges, ServiceStopping
from gpu_pool.service.rate_limits import ConcurrencyLimit, RatePerMinute
from gpu_pool.service.served_pool import ServedPool
from gpu_pool_client import (
    Activity,
    BadRequest,
    DeviceStatus,
    EndedLease,
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
    SliceRequest,
    TimedOut,
    parse_request,
)
from gpu_pool_client._log import escaped, quoted
from gpu_pool_client._remote import bodies

_LONGEST_KEY: Final = 128
_KEY: Final = re.compile(rf"[!-~]{{1,{_LONGEST_KEY}}}")
#: The reasons for which holders end their own leases. All others are the pool's, or administrators'.
_HOLDERS_REASONS: Final = frozenset(
    (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.NOT_READY, EndReason.TOO_LONG, EndReason.IDLE)
)


class AuthorizedPool:
    """The pool, for callers. Every method says in whose name it is asked."""

    def __init__(
        self,
        pool: ServedPool,
        changes: LeaseChanges,
        heartbeats: Heartbeats,
        log: logging.Logger,
        most_polls: int,
        pace: RatePerMinute | None = None,
        questions: RatePerMinute | None = None,
        requests: RatePerMinute | None = None,
        *,
        other_courses: bool = False,
    ) -> None:
        self.heartbeats = heartbeats
        self.health = Health(pool, changes, log)
        self.audit = pool.audit
        self.decisions = DecisionLog(changes, log, pace)
        self._pool = pool
        self._changes = changes
        self._other_courses = other_courses
        self._owners = Owners(pool)
        self._polls = ConcurrencyLimit(
            most_polls,
            "You already wait for {most} leases at once, which is the limit.",
            "Stop waiting for one of them first.",
        )
        #: Held while a user's history is read, which takes as long as dozens of decisions.
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._questions, self._requests = questions, requests
        #: Held while a question of a user's is answered.
        self._answering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- Asking ------------------------------------------------------------

    async def request(self, caller: Caller, wanted: bodies.RequestBody) -> Lease:
        """Ask for a slice in the caller's own name, whatever they say of themselves."""
        if not _KEY.fullmatch(wanted.key):
            raise BadRequest(
                "The key of a request must be 1 to 128 printable ASCII characters without spaces."
            )
        request, key = parse_request(wanted.request), _own_key(caller, wanted.key)
        with self.decisions.making(caller, f"request {request}") as outcome:
            asked_at = await self._count_request(caller, key)
            course = course_asked_for(caller, wanted.course, others=self._other_courses)
            holder = Holder(caller.user, course, wanted.kernel, caller.process, wanted.batch)
            lease = await self._pool.request(
                request,
                holder,
                key,
                caller=caller,
            )
            outcome.append(f"lease {lease.id} is {lease.state.value}")
            if self._requests is not None and lease.requested_at < asked_at:
                self._requests.take_back(caller.user)
        self._owners.remember(lease)
        return replace(lease, key=wanted.key)

    async def _count_request(self, caller: Caller, key: str) -> float:
        """Count a request, each of which adds to the history, and return when; a repeated one is none.

        Raises ``OverQuota`` for one too many.
        """
        if self._requests is not None and not caller.is_admin:
            try:
                self._requests.count(caller.user)
            except OverQuota:
                if await self._pool.find(key) is None:
                    raise
                return 0.0
        return time.time()

    async def wait(self, caller: Caller, lease_id: str, seconds: float, last: bool) -> Lease | None:
        """Return the lease once it is held. If it waits still: None, or raise ``TimedOut`` if ``last``.

        Raises ``ServiceStopping`` where it could have been held until then.
        """
        await self._owners.check(caller, lease_id)
        # Thousands may wait, and the store has other things to do than to tell them so.
        if self._changes.knows_to_wait(lease_id) or await self._waits(lease_id):
            with self._polls.one(caller.user):
                found = await self._changes.wait(lease_id, _waits_no_more, seconds)
            if not last and (not found or await self._waits(lease_id)):
                return None
        try:
            return caller.shown(await self._pool.wait(lease_id, 0))
        except TimedOut:
            if seconds > 0 and self._changes.stopped:
                raise ServiceStopping("The pool's service is stopping.", "Ask again in a moment.") from None
            raise

    async def _waits(self, lease_id: str) -> bool:
        return (await self._pool.get_lease(lease_id)).state is LeaseState.WAITING

    async def watch(self, caller: Caller, lease_id: str, seconds: float, seen: str) -> Lease | None:
        """Return the lease once its version is not the one seen; None if it still is then."""
        lease = known = await self.lease(caller, lease_id)
        with self._polls.one(caller.user):
            if bodies.version(known) == seen and await self._changes.wait(
                lease_id, lambda now: now is None or _differs(now, known), seconds
            ):
                lease = await self.lease(caller, lease_id)
        return None if bodies.version(lease) == seen else lease

    # -- Reading -----------------------------------------------------------

    @asynccontextmanager
    async def _asking(self, caller: Caller) -> AsyncIterator[None]:
        """Answer a question that costs as much as a decision within this: one of a user's at a time.

        Administrators, and services of the Hub, which ask for all of its users, may ask as they like.
        Raises ``OverQuota``.
        """
        if caller.is_admin or caller.is_service:
            yield
            return
        if self._questions is not None:
            self._questions.count(caller.user)
        async with self._answering.setdefault(caller.user, asyncio.Lock()):
            yield

    async def lease(self, caller: Caller, lease_id: str) -> Lease:
        """Return a lease of the caller's."""
        await self._owners.check(caller, lease_id)
        return caller.shown(await self._pool.get_lease(lease_id))

    async def explain(self, caller: Caller, lease_id: str) -> Outlook:
        """Say why a lease of the caller's waits."""
        await self._owners.check(caller, lease_id)
        async with self._asking(caller):
            return await self._pool.explain(lease_id)

    async def forecast(
        self, caller: Caller, text: str, named: str | None, *, anybody: bool, batch: bool = False
    ) -> Outlook | None:
        """Say what a request of the caller's would meet; to administrators also that of ``anybody``.

        To services of the Hub's only that.
        """
        if caller.is_service and not anybody:
            raise NotAllowed("A service of the JupyterHub cannot hold slices.", "Ask with anybody=1.")
        if anybody and not (caller.is_admin or caller.is_service):
            raise NotAllowed(
                "Only an administrator can ask for a forecast without a user.", "Ask for yourself."
            )
        request = parse_request(text)
        course = course_asked_for(caller, named, others=self._other_courses)
        holder = Holder("" if anybody else caller.user, course, None, caller.process, batch)
        async with self._asking(caller):
            return await self._pool.forecast(request, holder, caller=caller)

    async def offers(self, caller: Caller, named: str | None) -> tuple[SliceRequest, ...] | None:
        """Return what the caller's course offers now; see ``Pool.offers``."""
        holder = Holder(caller.user, course_asked_for(caller, named, others=self._other_courses))
        async with self._asking(caller):
            return await self._pool.offers(holder, caller=caller)

    async def activity(self, caller: Caller, lease_id: str) -> Activity:
        """Return what a lease of the caller's does with its devices."""
        await self._owners.check(caller, lease_id)
        async with self._asking(caller):
            return await self._pool.activity(lease_id)

    async def status(self, caller: Caller) -> PoolStatus:
        """Return the devices, and of leases and queue the caller's own, at their true places."""
        async with self._asking(caller):
            found = await self._pool.status()
        if not caller.is_admin:
            found = replace(found, store_bytes=None)
        if caller.is_service:
            return replace(found, leases=(), queue=())

        def own(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
            return tuple(
                caller.shown(each) for each in leases if caller.is_admin or each.holder.user == caller.user
            )

        return replace(found, leases=own(found.leases), queue=own(found.queue))

    async def positions(self, caller: Caller) -> Mapping[str, int]:
        """Return the positions in the queue of the caller's own leases; see ``Pool.positions``."""
        places = self._changes.positions(caller.user)
        if places is None:
            async with self._asking(caller):
                queue = (await self._pool.status()).queue
            places = {each.id: each.position or 0 for each in queue if each.holder.user == caller.user}
        return places

    async def history(self, caller: Caller, since: float) -> list[EndedLease]:
        """Return the caller's own leases that have ended since then. Each user is answered once at a time."""
        async with self._reading.setdefault(caller.user, asyncio.Lock()):
            return await self._pool.history(since, user=None if caller.is_admin else caller.user)

    # -- Changing ----------------------------------------------------------

    async def attach(self, caller: Caller, lease_id: str, wanted: bodies.AttachBody) -> Lease:
        """Tie a lease of the caller's to a process of theirs."""
        await self._owners.check(caller, lease_id)
        process = await asyncio.to_thread(verify_process, caller, wanted.process)
        # Of what is on another machine there is no pid, but a number in its place.
        which = str(process.pid) if caller.peer else "a process"
        with self.decisions.making(caller, f"attach {which} to {lease_id}"):
            lease = await self._pool.attach(
                lease_id, process, ready_within=wanted.ready_within, grace=wanted.grace
            )
        return caller.shown(lease)

    async def renew(self, caller: Caller, lease_id: str, ttl: float | None) -> Lease:
        """Lift or set the deadline of a lease of the caller's."""
        await self._owners.check(caller, lease_id)
        with self.decisions.making(caller, f"renew {lease_id}"):
            return caller.shown(await self._pool.renew(lease_id, ttl))

    async def resize(self, caller: Caller, lease_id: str, text: str, *, ahead: bool) -> Lease:
        """Change what a lease of the caller's asks for."""
        await self._owners.check(caller, lease_id)
        request = parse_request(text)
        with self.decisions.making(caller, f"resize {lease_id} to {request}"):
            lease = await self._pool.resize(lease_id, request, ahead=ahead, caller=caller)
        return caller.shown(lease)

    async def park(self, caller: Caller, lease_id: str) -> Lease:
        """Give the slices of a lease of the caller's to others for a while."""
        await self._owners.check(caller, lease_id)
        with self.decisions.making(caller, f"park {lease_id}"):
            return caller.shown(await self._pool.park(lease_id, caller=caller))

    async def resume(self, caller: Caller, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease of the caller's."""
        await self._owners.check(caller, lease_id)
        with self.decisions.making(caller, f"resume {lease_id}"):
            return caller.shown(await self._pool.resume(lease_id))

    async def release(self, caller: Caller, lease_id: str, reason: EndReason) -> None:
        """End a lease of the caller's. Nothing happens to what is not theirs, or is not there.

        What an administrator ends of somebody else's is revoked, for whatever reason a holder would give.
        """
        if reason not in _HOLDERS_REASONS and not caller.is_admin:
            raise NotAllowed(
                f"Only an administrator can end a lease as {reason.value}.", "Leave the reason out."
            )
        try:
            await self._owners.check(caller, lease_id)
            if reason in _HOLDERS_REASONS and not await self._owners.owns(caller, lease_id):
                reason = EndReason.REVOKED
        except LeaseGone:
            return
        with self.decisions.making(caller, f"release {lease_id} as {reason.value}"):
            await self._pool.release(lease_id, reason)

    # -- Kernels in pods ---------------------------------------------------

    async def launch(self, caller: Caller, lease_id: str, wanted: bodies.LaunchBody) -> KernelPod:
        """Start a kernel of the caller's in a pod, beside the server that asks."""
        await self._owners.check(caller, lease_id)
        command = KernelCommand(wanted.argv, wanted.connection, wanted.environment, wanted.folder)
        with self.decisions.making(caller, f"launch a kernel on {lease_id}"):
            return await self._pool.launch(lease_id, command, caller=caller)

    async def pod(self, caller: Caller, lease_id: str, seconds: float, seen: str) -> KernelPod:
        """Return how the pod of a lease of the caller's is, once its version is not the one seen."""
        await self._owners.check(caller, lease_id)
        with self._polls.one(caller.user):
            return await self._pool.pod(lease_id, seen, seconds)

    async def end_pod(self, caller: Caller, lease_id: str) -> None:
        """End the pod of a lease of the caller's."""
        await self._owners.check(caller, lease_id)
        with self.decisions.making(caller, f"end the kernel on {lease_id}"):
            await self._pool.end_pod(lease_id)

    # -- Taking slices back -------------------------------------------------

    async def effect_of_taking(self, caller: Caller, lease_id: str) -> Effect:
        """Say what becomes of the kernel of a lease of the caller's if its slices are taken back now."""
        await self._owners.check(caller, lease_id)
        async with self._asking(caller):
            return await self._pool.effect_of_taking(lease_id)

    async def withdraw(self, caller: Caller, lease_id: str, message: str = "") -> None:
        """Take the slices of a lease of the caller's from its kernel, which lives on."""
        reason = await self._taken_as(caller, lease_id)
        with self.decisions.making(caller, f"withdraw {lease_id}: {message[:200]!a}"):
            await self._pool.withdraw(lease_id, message, reason)

    async def ask_back(self, caller: Caller, lease_id: str, message: str = "") -> None:
        """Let the slices of a lease of the caller's go as soon as its kernel is idle."""
        reason = await self._taken_as(caller, lease_id)
        with self.decisions.making(caller, f"ask back {lease_id}: {message[:200]!a}"):
            await self._pool.ask_back(lease_id, message, reason)

    async def _taken_as(self, caller: Caller, lease_id: str) -> EndReason:
        """Return how it is recorded that the caller takes a lease's slices back."""
        await self._owners.check(caller, lease_id)
        own = await self._owners.owns(caller, lease_id)
        return EndReason.RELEASED if own else EndReason.REVOKED

    # -- For administrators ------------------------------------------------

    async def revoke(self, caller: Caller, lease_id: str, message: str) -> None:
        """End anybody's lease, and say why. For administrators."""
        if not caller.is_admin:
            raise NotAllowed("Only an administrator can revoke a lease.", "Ask the administrator.")
        with self.decisions.making(caller, f"revoke {lease_id}: {message[:200]!a}"):
            await self._pool.revoke(lease_id, message)

    async def drain(self, caller: Caller, device: str, drained: bool) -> DeviceStatus:
        """Grant nothing more on a device, or grant again. For administrators."""
        if not caller.is_admin:
            raise NotAllowed("Only an administrator can drain a GPU.", "Ask the administrator.")
        with self.decisions.making(caller, f"{'drain' if drained else 'undrain'} {device[:64]!a}"):
            return await self._pool.drain(device, drained=drained)


def _own_key(caller: Caller, key: str) -> str:
    """Return the key in the store: nobody's requests may be found by another's keys."""
    own = f"{caller.mark}:{key}"
    if len(own) <= _LONGEST_KEY:
        return own
    return f"{caller.mark}:{hashlib.sha256(key.encode()).hexdigest()}"


def _waits_no_more(lease: Lease | None) -> bool:
    return lease is None or lease.state is not LeaseState.WAITING


def _differs(now: Lease, known: Lease) -> bool:
    """Whether anything differs that :func:`bodies.version` is made of."""
    return replace(now, key=known.key, terms=known.terms) != known


class DecisionLog:
    """Goes with everything that changes the pool. Administrators may decide as often as they like."""

    def __init__(self, changes: LeaseChanges, log: logging.Logger, pace: RatePerMinute | None) -> None:
        self._changes = changes
        self._log = log
        self._pace = pace

    @contextmanager
    def making(self, caller: Caller, what: str) -> Iterator[list[str]]:
        """Log what is decided, or why not, and wake those who wait.

        What is put into the list that this yields is logged as the outcome. Raises ``OverQuota``.
        """
        if self._pace is not None and not caller.is_admin:
            self._pace.count(caller.user)
        outcome: list[str] = []
        try:
            yield outcome
        except Exception as error:
            outcome.append(type(error).__name__)
            raise
        finally:
            self._log.info("%s: %s: %s", _who(caller), escaped(what), *outcome or ("done",))
            self._changes.decided(caller.user)


def _who(caller: Caller) -> str:
    where = caller.process.pid if caller.peer else f"hub:{quoted(caller.server) if caller.server else ''}"
    return f"{quoted(caller.user)}[{where}]"


#: Leases whose holder is remembered before all are forgotten, and read again when they are asked about.
_MOST_KNOWN: Final = 65_536


class Owners:
    """Knows the user of each lease, who never changes."""

    def __init__(self, pool: ServedPool) -> None:
        self._pool = pool
        self._users: dict[str, str] = {}

    async def check(self, caller: Caller, lease_id: str) -> None:
        """Refuse another's lease with the message for one that never was, whose id nobody should guess."""
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
