"""The contract of a pool as seen by one caller: what they may, what it costs and what they see, by the table.

Everybody sees and changes their own leases only. Administrators see all, may
end anybody's, and drain devices.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from gpu_pool.caller import Caller
from gpu_pool.pool.pool import Pool as ThePool
from gpu_pool.service.callers import course_asked_for, verify_process
from gpu_pool.service.decisions import CallLimits, Costs, DecisionLog
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats, is_remote_process
from gpu_pool.service.lease_changes import LeaseChanges, ServiceStopping
from gpu_pool_client import (
    BadRequest,
    EndedLease,
    EndReason,
    Holder,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    OverQuota,
    Pool,
    PoolStatus,
    Process,
    SliceRequest,
    TimedOut,
)
from gpu_pool_client._operations import ADMINISTRATORS, Operation, Principal, Sight, operation_of
from gpu_pool_client._pool import OPERATIONS
from gpu_pool_client._remote import bodies

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_KEY: Final = 128
_KEY: Final = re.compile(rf"[!-~]{{1,{_LONGEST_KEY}}}")
#: The reasons for which holders end their own leases. All others are the pool's, or administrators'.
_HOLDERS_REASONS: Final = frozenset(
    (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.NOT_READY, EndReason.TOO_LONG, EndReason.IDLE)
)
#: The methods of a pool that depend on who asks, beyond what their arguments say.
_BY_CALLER: Final = frozenset(
    row.name for row in OPERATIONS if "caller" in inspect.signature(getattr(ThePool, row.name)).parameters
)


class ServedPool:
    """A pool that is served to many callers. Used in one event loop."""

    def __init__(
        self,
        pool: ThePool,
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
        self.audit = pool.audit
        self.decisions = DecisionLog(changes, log, limits.decisions)
        self.costs = Costs(limits)
        self.owners = Owners(pool)
        #: Whether a server that was started for one course may ask in the name of others.
        self.other_courses = other_courses

    def for_caller(self, caller: Caller) -> PoolForCaller:
        """Return the pool as this caller sees it, and may use it."""
        return PoolForCaller(self, caller)


class PoolForCaller(Pool):
    """A pool in one caller's hands.

    What holds for an operation is in its row; the methods here are those of which the caller decides more
    than that: in whose name is asked, whose process it is, and how an administrator's deeds are recorded.
    """

    def __init__(self, served: ServedPool, caller: Caller) -> None:
        self.url = served.pool.url
        self._served = served
        self._caller = caller
        self._costs = served.costs

    async def _perform(
        self,
        verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        row = operation_of(verb)
        found: T = await self._do(row, row.bind(*args, **kwargs))
        return found

    async def _do(self, row: Operation, arguments: Mapping[str, Any], **more: Any) -> Any:
        """Do what the caller may, and return what they see of it; ``more`` is for the pool alone."""
        await self._check(row, arguments)
        asked = {**arguments, **more}
        if row.decision:
            with self._deciding(row, arguments):
                return self._seen(row, await self._ask(row, asked))
        async with self._costs.of(row.cost, self._caller):
            return self._seen(row, await self._ask(row, asked))

    def _deciding(self, row: Operation, arguments: Mapping[str, Any]) -> AbstractContextManager[list[str]]:
        """Count and log a change; see ``DecisionLog.making``."""
        told = {name: _told(name, each) for name, each in arguments.items()}
        return self._served.decisions.making(self._caller, row.decision.format_map(told))

    async def _ask(self, row: Operation, arguments: Mapping[str, Any]) -> Any:
        """Ask the pool, in the caller's name: the one place where a pool is told who asks."""
        method = getattr(self._served.pool, row.name)
        return await method(**arguments, **({"caller": self._caller} if row.name in _BY_CALLER else {}))

    async def _check(self, row: Operation, arguments: Mapping[str, Any]) -> None:
        """Refuse what the row does not allow. That a process asks for its own lease, the pool checks."""
        caller = self._caller
        may_ask = Principal.SERVICE in row.may if caller.is_service else row.may != ADMINISTRATORS
        if not (caller.is_admin or may_ask):
            raise NotAllowed(*row.refusal)
        if row.is_of_lease:
            await self._served.owners.check(caller, arguments["lease_id"])

    @property
    def _principal(self) -> Principal:
        if self._caller.is_admin:
            return Principal.ADMINISTRATOR
        return Principal.SERVICE if self._caller.is_service else Principal.USER

    def _seen(self, row: Operation, found: Any) -> Any:
        """Return what of an answer the caller sees."""
        if isinstance(found, Lease):
            return self._caller.shown(found)
        if isinstance(found, PoolStatus):
            sight = row.sees.get(self._principal, Sight.EVERYTHING)
            leases, queue = (self._visible(sight, each) for each in (found.leases, found.queue))
            store_bytes = found.store_bytes if sight is Sight.EVERYTHING else None
            return replace(found, leases=leases, queue=queue, store_bytes=store_bytes)
        return found

    def _visible(self, sight: Sight, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        if sight is Sight.NO_LEASES:
            return ()
        user = self._caller.user
        return tuple(
            self._caller.shown(each)
            for each in leases
            if sight is Sight.EVERYTHING or each.holder.user == user
        )

    # -- Asking --------------------------------------------------------------

    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Ask for a slice in the caller's own name, whatever ``holder`` says of user and process."""
        if not _KEY.fullmatch(key):
            raise BadRequest(
                "The key of a request must be 1 to 128 printable ASCII characters without spaces."
            )
        row, own_key = operation_of(Pool.request), self._own_key(key)
        await self._check(row, {})
        with self._deciding(row, {"request": request}) as outcome:
            asked_at = await self._count_request(own_key)
            arguments = {"request": request, "holder": self._own(holder), "key": own_key}
            lease: Lease = await self._ask(row, arguments)
            outcome.append(f"lease {lease.id} is {lease.state.value}")
            if self._costs.requests is not None and lease.requested_at < asked_at:
                self._costs.requests.take_back(self._caller.user)
        self._served.owners.remember(lease)
        return replace(lease, key=key)

    async def _count_request(self, key: str) -> float:
        """Count a request, each of which adds to the history, and return when; a repeated one is none.

        Raises ``OverQuota`` for one too many.
        """
        requests = self._costs.requests
        if requests is not None and not self._caller.is_admin:
            try:
                requests.count(self._caller.user)
            except OverQuota:
                if await self._served.pool.find(key) is None:
                    raise
                return 0.0
        return time.time()

    def _own(self, holder: Holder, *, anybody: bool = False) -> Holder:
        """Return who asks, as the service knows them."""
        caller = self._caller
        course = course_asked_for(caller, holder.course, others=self._served.other_courses)
        user = "" if anybody else caller.user
        return Holder(user, course, holder.kernel, caller.process, holder.batch)

    def _own_key(self, key: str) -> str:
        """Return the key in the store: nobody's requests may be found by another's keys."""
        own = f"{self._caller.mark}:{key}"
        if len(own) <= _LONGEST_KEY:
            return own
        return f"{self._caller.mark}:{hashlib.sha256(key.encode()).hexdigest()}"

    async def find(self, key: str) -> Lease | None:
        """See ``Pool.find``. The keys are the caller's own."""
        return await super().find(self._own_key(key))

    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """See ``Pool.forecast``. Without a user: for administrators, and all that services of the Hub may."""
        caller, anybody = self._caller, not holder.user
        if caller.is_service and not anybody:
            raise NotAllowed("A service of the JupyterHub cannot hold slices.", "Ask with anybody=1.")
        if anybody and not (caller.is_admin or caller.is_service):
            raise NotAllowed(
                "Only an administrator can ask for a forecast without a user.", "Ask for yourself."
            )
        return await super().forecast(request, replace(self._own(holder, anybody=anybody), kernel=None))

    async def offers(self, holder: Holder) -> tuple[SliceRequest, ...] | None:
        """See ``Pool.offers``."""
        return await super().offers(self._own(holder))

    # -- Waiting for a change ------------------------------------------------

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        while True:
            seconds = bodies.LONGEST_POLL if timeout is None else timeout
            lease = await self.held_within(lease_id, seconds, last=timeout is not None)
            if lease is not None:
                return lease

    async def held_within(self, lease_id: str, seconds: float, *, last: bool) -> Lease | None:
        """Return the lease once it is held. If it waits still: None, or raise ``TimedOut`` if ``last``.

        Raises ``ServiceStopping`` where it could have been held until then.
        """
        row, changes = operation_of(Pool.wait), self._served.changes
        await self._check(row, {"lease_id": lease_id})
        # Thousands may wait, and the store has other things to do than to tell them so.
        if changes.knows_to_wait(lease_id) or await self._waits(lease_id):
            with self._costs.waiting(self._caller):
                found = await changes.wait(lease_id, _waits_no_more, seconds)
            if not last and (not found or await self._waits(lease_id)):
                return None
        try:
            lease: Lease = self._seen(row, await self._ask(row, {"lease_id": lease_id, "timeout": 0}))
        except TimedOut:
            if seconds > 0 and changes.stopped:
                raise ServiceStopping("The pool's service is stopping.", "Ask again in a moment.") from None
            raise
        else:
            return lease

    async def _waits(self, lease_id: str) -> bool:
        return (await self._served.pool.get_lease(lease_id)).state is LeaseState.WAITING

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        seen, state = "", LeaseState.WAITING
        while state is not LeaseState.ENDED:
            lease = await self.changed_within(lease_id, bodies.LONGEST_POLL, seen)
            if lease is not None:
                seen, state = bodies.version(lease), lease.state
                yield lease

    async def changed_within(self, lease_id: str, seconds: float, seen: str) -> Lease | None:
        """Return the lease once its version is not the one seen; None if it still is then."""
        lease = known = await self.get_lease(lease_id)
        with self._costs.waiting(self._caller):
            if bodies.version(known) == seen and await self._served.changes.wait(
                lease_id, lambda now: now is None or _differs(now, known), seconds
            ):
                lease = await self.get_lease(lease_id)
        return None if bodies.version(lease) == seen else lease

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """See ``Pool.pod``."""
        return await self.pod_within(lease_id, bodies.POD_POLL, seen)

    async def pod_within(self, lease_id: str, seconds: float, seen: str) -> KernelPod:
        """Return the lease's pod once its version is not the one seen, or after so many seconds."""
        row, arguments = operation_of(Pool.pod), {"lease_id": lease_id, "seen": seen}
        await self._check(row, arguments)
        with self._costs.waiting(self._caller):
            found: KernelPod = await self._ask(row, {**arguments, "seconds": seconds})
        return found

    # -- Reading -------------------------------------------------------------

    async def positions(self) -> Mapping[str, int]:
        """See ``Pool.positions``."""
        await self._check(operation_of(Pool.positions), {})
        places = self._served.changes.positions(self._caller.user)
        if places is None:
            async with self._costs.asking(self._caller):
                queue = (await self._served.pool.status()).queue
            user = self._caller.user
            places = {each.id: each.position or 0 for each in queue if each.holder.user == user}
        return places

    async def history(self, since: float = 0.0) -> list[EndedLease]:
        """See ``Pool.history``."""
        row = operation_of(Pool.history)
        sees_all = row.sees.get(self._principal, Sight.EVERYTHING) is Sight.EVERYTHING
        user = None if sees_all else self._caller.user
        found: list[EndedLease] = await self._do(row, {"since": since}, user=user)
        return found

    # -- Changing ------------------------------------------------------------

    async def attach(
        self, lease_id: str, process: Process, *, ready_within: float | None = None, grace: float = 0.0
    ) -> Lease:
        """Tie a lease of the caller's to a process of theirs."""
        await self._check(operation_of(Pool.attach), {"lease_id": lease_id})
        verified = await asyncio.to_thread(verify_process, self._caller, process)
        return await super().attach(lease_id, verified, ready_within=ready_within, grace=grace)

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End a lease of the caller's. Nothing happens to what is not theirs, or is not there.

        What an administrator ends of somebody else's is revoked, for whatever reason a holder would give.
        """
        if reason not in _HOLDERS_REASONS and not self._caller.is_admin:
            raise NotAllowed(
                f"Only an administrator can end a lease as {reason.value}.", "Leave the reason out."
            )
        try:
            by = await self._taken_as(lease_id)
        except LeaseGone:
            return
        is_revoked = reason in _HOLDERS_REASONS and by is EndReason.REVOKED
        await super().release(lease_id, by if is_revoked else reason)

    async def withdraw(
        self,
        lease_id: str,
        message: str = "",
        reason: EndReason = EndReason.RELEASED,  # noqa: ARG002 - who takes it decides
    ) -> Lease:
        """See ``Pool.withdraw``."""
        return await super().withdraw(lease_id, message, await self._taken_as(lease_id))

    async def ask_back(
        self,
        lease_id: str,
        message: str = "",
        reason: EndReason = EndReason.RELEASED,  # noqa: ARG002 - who takes it decides
    ) -> Lease:
        """See ``Pool.ask_back``."""
        return await super().ask_back(lease_id, message, await self._taken_as(lease_id))

    async def _taken_as(self, lease_id: str) -> EndReason:
        """Return how it is recorded that the caller takes a lease's slices back. Raises ``LeaseGone``."""
        owners = self._served.owners
        await owners.check(self._caller, lease_id)
        own = await owners.owns(self._caller, lease_id)
        return EndReason.RELEASED if own else EndReason.REVOKED

    async def close(self) -> None:
        """Do nothing: the pool is others', too."""


def _told(name: str, value: object) -> str:
    """Return how an argument stands in the log of decisions; of a flag that is off, ``un``."""
    if isinstance(value, Process):
        # Of what is on another machine there is no pid, but a number in its place.
        return "a process" if is_remote_process(value) else str(value.pid)
    if isinstance(value, bool):
        return "" if value else "un"
    if isinstance(value, EndReason):
        return value.value
    return f"{value[:200]!a}" if isinstance(value, str) and name != "lease_id" else str(value)


def _waits_no_more(lease: Lease | None) -> bool:
    return lease is None or lease.state is not LeaseState.WAITING


def _differs(now: Lease, known: Lease) -> bool:
    """Whether anything differs that :func:`bodies.version` is made of."""
    return replace(now, key=known.key, terms=known.terms) != known


#: Leases whose holder is remembered before all are forgotten, and read again when they are asked about.
_MOST_KNOWN: Final = 65_536


class Owners:
    """Knows the user of each lease, who never changes."""

    def __init__(self, pool: Pool) -> None:
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
