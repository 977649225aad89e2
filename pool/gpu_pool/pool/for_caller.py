"""The contract of a pool as seen by one caller: what they may and what they see, by the table of operations.

Everybody sees and changes their own leases only; instructors also see those of the courses that they teach.
Administrators see all, may end anybody's, and drain devices.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from gpu_pool.audit.callers import Caller
from gpu_pool_client import (
    BadRequest,
    EndedLease,
    EndReason,
    Holder,
    KernelPod,
    Lease,
    LeaseGone,
    NotAllowed,
    Outlook,
    Pool,
    PoolStatus,
    Process,
    SliceRequest,
)
from gpu_pool_client._operations import Operation, Principal, Sight, operation_of

if TYPE_CHECKING:
    from gpu_pool.courses.admission import CourseAdmission

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_KEY: Final = 128
_KEY: Final = re.compile(rf"[!-~]{{1,{_LONGEST_KEY}}}")
#: Seconds for which news of a pod are waited for, unless it is said.
_POD_POLL: Final = 25.0
#: The reasons for which holders end their own leases. All others are the pool's, or administrators'.
_HOLDERS_REASONS: Final = frozenset(
    (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.NOT_READY, EndReason.TOO_LONG, EndReason.IDLE)
)
#: What each kind of caller may be.
_USER: Final = frozenset((Principal.USER, Principal.OWNER, Principal.PROCESS, Principal.INSTRUCTOR))
_ADMINISTRATOR: Final = _USER | {Principal.ADMINISTRATOR}
_SERVICE: Final = frozenset((Principal.SERVICE,))
_NODE_AGENT: Final = frozenset((Principal.NODE_AGENT,))


@dataclass(slots=True)
class OperationCall:
    """One operation that a caller asks for."""

    caller: Caller
    row: Operation
    arguments: Mapping[str, Any]
    #: What the pool has answered; None before it has.
    answer: Any = None


class Guard:
    """What goes around each operation of a caller's, such as its cost and the log of it. Here: nothing."""

    def around(self, call: OperationCall, pool: Pool) -> AbstractAsyncContextManager[object]:
        """Do within this what a caller asks of a pool, and may. Raises ``OverQuota`` where it is too much."""
        del call, pool
        return nullcontext()

    async def verified(self, caller: Caller, claim: Process) -> Process:
        """Return the process that a caller claims. Raises ``NotAllowed`` where it is not theirs."""
        del caller
        return claim

    async def check_owner(self, caller: Caller, lease_id: str, pool: Pool) -> None:
        """Refuse another's lease with the message for one that never was, whose id nobody should guess."""
        if not caller.is_admin and not await self.owns(caller, lease_id, pool):
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")

    async def owns(self, caller: Caller, lease_id: str, pool: Pool) -> bool:
        """Whether a lease is the caller's own. Raises ``LeaseGone`` for one that never was."""
        return (await pool.get_lease(lease_id)).holder.user == caller.user


class PoolForCaller(Pool):
    """A pool in one caller's hands.

    What holds for an operation is in its row; the methods here are those of which the caller decides more
    than that: in whose name is asked, whose process it is, and how an administrator's deeds are recorded.
    """

    def __init__(
        self,
        pool: Pool,
        caller: Caller,
        guard: Guard | None = None,
        courses: CourseAdmission | None = None,
        *,
        other_courses: bool = False,
    ) -> None:
        """Take the pool as it works in the caller's name, and the course files that say what they teach."""
        self.url = pool.url
        self.caller = caller
        self._pool, self._guard, self._other_courses = pool, guard or Guard(), other_courses
        self._courses = courses

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
        await self.check(row, arguments)
        call = OperationCall(self.caller, row, arguments)
        async with self._guard.around(call, self._pool):
            call.answer = await getattr(self._pool, row.name)(**arguments, **more)
        return await self._seen(row, call.answer)

    async def check(self, row: Operation, arguments: Mapping[str, Any]) -> None:
        """Refuse what the row does not allow. That a process asks for its own lease, the pool checks."""
        self._check_principal(row)
        if row.is_of_lease and not (
            Principal.INSTRUCTOR in row.may and await self._teaches_its_course(arguments["lease_id"])
        ):
            await self._guard.check_owner(self.caller, arguments["lease_id"], self._pool)

    def _check_principal(self, row: Operation) -> None:
        """Refuse what is for others than the caller, whatever lease is meant."""
        if not row.may & _principals(self.caller):
            raise NotAllowed(*row.refusal)

    async def _taught(self) -> frozenset[str]:
        """Return the courses that the caller teaches."""
        if self._courses is None or self.caller.is_service:
            return frozenset()
        return await self._courses.taught(self.caller.user)

    async def _teaches_its_course(self, lease_id: str) -> bool:
        taught = await self._taught()
        return bool(taught) and (await self._pool.get_lease(lease_id)).holder.course in taught

    def _sight(self, row: Operation, taught: frozenset[str] = frozenset()) -> Sight:
        """Return what of an answer the row shows the caller, who teaches these courses."""
        if self.caller.is_admin:
            principal = Principal.ADMINISTRATOR
        elif self.caller.is_service:
            principal = Principal.SERVICE
        else:
            principal = (
                Principal.INSTRUCTOR if taught and Principal.INSTRUCTOR in row.sees else Principal.USER
            )
        return row.sees.get(principal, Sight.EVERYTHING)

    async def _seen(self, row: Operation, found: Any) -> Any:
        """Return what of an answer the caller sees."""
        if isinstance(found, Lease):
            return self.caller.shown(found)
        if isinstance(found, PoolStatus):
            taught = await self._taught()
            sight = self._sight(row, taught)
            leases, queue = (self._visible(sight, taught, each) for each in (found.leases, found.queue))
            found = replace(found, leases=leases, queue=queue)
            return found if sight is Sight.EVERYTHING else replace(found, store_bytes=None, prepared=())
        return found

    def _visible(self, sight: Sight, taught: frozenset[str], leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        if sight is Sight.NO_LEASES:
            return ()
        user, courses = self.caller.user, taught if sight is Sight.COURSES else ()
        return tuple(
            self.caller.shown(each)
            for each in leases
            if sight is Sight.EVERYTHING or each.holder.user == user or each.holder.course in courses
        )

    # -- In the caller's own name ----------------------------------------------

    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Ask for a slice in the caller's own name, whatever ``holder`` says of user and process."""
        if not _KEY.fullmatch(key):
            raise BadRequest(
                "The key of a request must be 1 to 128 printable ASCII characters without spaces."
            )
        row = operation_of(Pool.request)
        arguments = {"request": request, "holder": holder, "key": self._own_key(key)}
        await self.check(row, arguments)
        call = OperationCall(self.caller, row, arguments)
        # That they ask for another course's slices, too, is counted and logged.
        async with self._guard.around(call, self._pool):
            call.answer = await self._pool.request(request, self._own(holder), self._own_key(key))
        lease: Lease = await self._seen(row, call.answer)
        return replace(lease, key=key)

    def _own(self, holder: Holder, *, anybody: bool = False) -> Holder:
        """Return who asks, as it is known of them. Raises ``NotAllowed`` for another course than theirs."""
        caller = self.caller
        course, own = holder.course, caller.course
        if own is not None and course and course != own and not self._other_courses:
            raise NotAllowed(
                f"This server was started for the course {own[:100]!a}, but asks for a slice of "
                f"{course[:100]!a}.",
                "Start a server for that course, or leave GPU_POOL_COURSE as it was when the server started.",
            )
        user = "" if anybody else caller.user
        return replace(holder, user=user, course=course or own, process=caller.process)

    def _own_key(self, key: str) -> str:
        """Return the key in the store: nobody's requests may be found by another's keys."""
        own = f"{self.caller.mark}:{key}"
        if len(own) <= _LONGEST_KEY:
            return own
        return f"{self.caller.mark}:{hashlib.sha256(key.encode()).hexdigest()}"

    async def find(self, key: str) -> Lease | None:
        """See ``Pool.find``. The keys are the caller's own."""
        return await super().find(self._own_key(key))

    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """See ``Pool.forecast``. Without a user: for administrators, and all that services of the Hub may."""
        caller, anybody = self.caller, not holder.user
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

    # -- Reading -----------------------------------------------------------------

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        found: Lease = await self._do(operation_of(Pool.wait), {"lease_id": lease_id, "timeout": timeout})
        return found

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        await self.check(operation_of(Pool.watch), {"lease_id": lease_id})
        async for lease in self._pool.watch(lease_id):
            yield self.caller.shown(lease)

    async def pod(self, lease_id: str, seen: str = "", seconds: float = _POD_POLL) -> KernelPod:
        """See ``Pool.pod``; ``seconds`` is for how long to wait for news."""
        arguments = {"lease_id": lease_id, "seen": seen}
        found: KernelPod = await self._do(operation_of(Pool.pod), arguments, seconds=seconds)
        return found

    async def positions(self) -> Mapping[str, int]:
        """See ``Pool.positions``."""
        await self.check(operation_of(Pool.positions), {})
        queue = (await self.status()).queue
        return {each.id: each.position or 0 for each in queue if each.holder.user == self.caller.user}

    async def history(self, since: float = 0.0) -> list[EndedLease]:
        """See ``Pool.history``."""
        row = operation_of(Pool.history)
        user = None if self._sight(row) is Sight.EVERYTHING else self.caller.user
        found: list[EndedLease] = await self._do(row, {"since": since}, user=user)
        return found

    # -- Changing ------------------------------------------------------------------

    async def attach(
        self, lease_id: str, process: Process, *, ready_within: float | None = None, grace: float = 0.0
    ) -> Lease:
        """Tie a lease of the caller's to a process of theirs."""
        await self.check(operation_of(Pool.attach), {"lease_id": lease_id})
        verified = await self._guard.verified(self.caller, process)
        return await super().attach(lease_id, verified, ready_within=ready_within, grace=grace)

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End a lease of the caller's. Nothing happens to what is not theirs, or is not there.

        That is no error, also for instructors who may read the lease: whoever gives back would try it
        again and again. What an administrator ends of somebody else's is revoked, for whatever reason a
        holder would give.
        """
        self._check_principal(operation_of(Pool.release))
        if reason not in _HOLDERS_REASONS and not self.caller.is_admin:
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
        await self._guard.check_owner(self.caller, lease_id, self._pool)
        own = await self._guard.owns(self.caller, lease_id, self._pool)
        return EndReason.RELEASED if own else EndReason.REVOKED

    async def close(self) -> None:
        """Do nothing: the pool is others', too."""


def _principals(caller: Caller) -> frozenset[Principal]:
    """Return all that a caller may be to a pool and its leases; whose a lease is, is asked besides."""
    if caller.node:
        return _NODE_AGENT
    if caller.is_admin:
        return _ADMINISTRATOR
    return _SERVICE if caller.is_service else _USER
