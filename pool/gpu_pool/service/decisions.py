"""What callers' changes and questions cost them, and the log of what is decided."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from gpu_pool.audit.callers import Caller
from gpu_pool.pool.for_caller import Guard, OperationCall
from gpu_pool.service.callers import verify_process
from gpu_pool.service.heartbeats import is_remote_process
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool_client import EndReason, Lease, OverQuota, Pool, Process
from gpu_pool_client._log import escaped, quoted
from gpu_pool_client._operations import Cost


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How much each user may ask of the service. None for as much as they like."""

    #: Leases and pods that one user may wait for at once.
    most_waits: int = 100
    decisions: RatePerMinute | None = None
    questions: RatePerMinute | None = None
    requests: RatePerMinute | None = None
    #: What the agent of one node may say.
    reports: RatePerMinute | None = None


class CallerCosts:
    """Counts what users ask. Administrators, and services of the Hub, may ask as they like."""

    def __init__(self, limits: CallLimits) -> None:
        self.requests = limits.requests
        self._questions, self._reports = limits.questions, limits.reports
        self._waits = ConcurrencyLimit(
            limits.most_waits,
            "You already wait for {most} leases at once, which is the limit.",
            "Stop waiting for one of them first.",
        )
        #: Held while a question of a user's is answered.
        self._answering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Held while a user's history is read, which takes as long as dozens of decisions.
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, cost: Cost, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Do within this what decides nothing, and costs so much. Raises ``OverQuota``."""
        if cost is Cost.REPORT and self._reports is not None:
            self._reports.count(caller.user)
        if cost is Cost.QUESTION:
            return self.asking(caller)
        return self._one_at_a_time(caller) if cost is Cost.ONE_AT_A_TIME else nullcontext()

    @asynccontextmanager
    async def asking(self, caller: Caller) -> AsyncIterator[None]:
        """Answer a question that costs as much as a decision within this: one of a user's at a time.

        Services of the Hub ask for all of its users. Raises ``OverQuota``.
        """
        if caller.is_admin or caller.is_service:
            yield
            return
        if self._questions is not None:
            self._questions.count(caller.user)
        async with self._answering.setdefault(caller.user, asyncio.Lock()):
            yield

    @asynccontextmanager
    async def _one_at_a_time(self, caller: Caller) -> AsyncIterator[None]:
        async with self._reading.setdefault(caller.user, asyncio.Lock()):
            yield

    @contextmanager
    def waiting(self, caller: Caller) -> Iterator[None]:
        """Wait for a change within this. Raises ``OverQuota`` where a user waits for too many."""
        with self._waits.one(caller.user):
            yield


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


#: Leases whose holder is remembered before all are forgotten, and read again when they are asked about.
_MOST_KNOWN: Final = 65_536


class ServiceGuard(Guard):
    """What a service does around the calls of many: it counts and limits them, and logs what is decided."""

    def __init__(self, changes: LeaseChanges, log: logging.Logger, limits: CallLimits) -> None:
        self.decisions = DecisionLog(changes, log, limits.decisions)
        self.costs = CallerCosts(limits)
        #: The user of each lease, who never changes.
        self._users: dict[str, str] = {}

    @asynccontextmanager
    async def around(self, call: OperationCall, pool: Pool) -> AsyncIterator[None]:
        """See ``Guard.around``."""
        if not call.row.decision:
            async with self.costs.of(call.row.cost, call.caller):
                yield
            return
        told = {name: _told(name, each) for name, each in call.arguments.items()}
        with self.decisions.making(call.caller, call.row.decision.format_map(told)) as outcome:
            if call.row.cost is not Cost.REQUEST:
                yield
                return
            asked_at = await self._count_request(call, pool)
            yield
            lease: Lease = call.answer
            outcome.append(f"lease {lease.id} is {lease.state.value}")
            self._remember(lease)
            if self.costs.requests is not None and lease.requested_at < asked_at:
                self.costs.requests.take_back(call.caller.user)

    async def _count_request(self, call: OperationCall, pool: Pool) -> float:
        """Count a request, each of which adds to the history, and return when; a repeated one is none.

        Raises ``OverQuota`` for one too many.
        """
        requests = self.costs.requests
        if requests is not None and not call.caller.is_admin:
            try:
                requests.count(call.caller.user)
            except OverQuota:
                if await pool.find(call.arguments["key"]) is None:
                    raise
                return 0.0
        return time.time()

    async def verified(self, caller: Caller, claim: Process) -> Process:
        """See ``Guard.verified``: by what the system says of it."""
        return await asyncio.to_thread(verify_process, caller, claim)

    async def owns(self, caller: Caller, lease_id: str, pool: Pool) -> bool:
        """See ``Guard.owns``."""
        if lease_id not in self._users:
            self._remember(await pool.get_lease(lease_id))
        return self._users[lease_id] == caller.user

    def _remember(self, lease: Lease) -> None:
        if len(self._users) >= _MOST_KNOWN:
            self._users.clear()
        self._users[lease.id] = lease.holder.user


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


def _who(caller: Caller) -> str:
    where = caller.process.pid if caller.peer else f"hub:{quoted(caller.server) if caller.server else ''}"
    return f"{quoted(caller.user)}[{where}]"


#: Users who are remembered before those are forgotten who have been quiet.
_MOST_COUNTED: Final = 1000
#: Whoever waits is told to ask again after this part of the longest time, or later.
_SPREAD: Final = 0.6


def spread(seconds: float) -> float:
    """Return these seconds or fewer: a class that joins the queue together is not to come back together."""
    return seconds * random.uniform(_SPREAD, 1.0)  # noqa: S311 - nothing hangs on it


class RatePerMinute:
    """Lets each user do something so many times a minute, all at once if they like.

    Every ``{most}`` in the message is that number.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        message: str = "You have sent the pool {most} change requests within a minute, which is the limit.",
    ) -> None:
        self._most = per_minute
        self._clock = clock
        self._message = message
        #: How many times are left to a user, and as of when.
        self._left: dict[str, tuple[float, float]] = {}

    def count(self, user: str) -> None:
        """Count one time. Raises ``OverQuota`` for one too many."""
        self.check(user)
        if user not in self._left and len(self._left) >= _MOST_COUNTED:
            self._forget()
        self._left[user] = self._left_to(user) - 1, self._clock()

    def check(self, user: str) -> None:
        """Raise ``OverQuota`` where one more would be too many, and say how soon it would not."""
        left = self._left_to(user)
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / self._most)
            wait = "1 second" if seconds == 1 else f"{seconds} seconds"
            raise OverQuota(self._message.format(most=self._most), f"Try again in {wait}, and send fewer.")

    def take_back(self, user: str) -> None:
        """Count one time less, which turned out to be none."""
        if user in self._left:
            self._left[user] = min(float(self._most), self._left_to(user) + 1), self._clock()

    def _left_to(self, user: str) -> float:
        now = self._clock()
        left, at = self._left.get(user, (self._most, now))
        return min(float(self._most), left + (now - at) * self._most / 60)

    def _forget(self) -> None:
        self._left = {user: known for user, known in self._left.items() if self._left_to(user) < self._most}


class ConcurrencyLimit:
    """Lets each user have so many of something at once. Every ``{most}`` in the message is that number."""

    def __init__(self, most: int, message: str, remedy: str) -> None:
        self._most = most
        self._message = message
        self._remedy = remedy
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, user: str) -> Iterator[None]:
        """Count one for as long as it lasts. Raises ``OverQuota`` for one too many."""
        if self._open[user] >= self._most:
            raise OverQuota(self._message.format(most=self._most), self._remedy)
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            self._open += Counter()  # forgets those who have none
