"""What a pool should do, in memory and in plain Python: what every real one is compared with.

It shares with the pool the pure functions that say what fits, who may ask and
whose turn it is, and nothing of how that is kept, looked after and written down.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_pool.policy import placement
from gpu_pool.policy.queue import Holding, Situation, Usage, Waiter, decide, in_order_of_turn
from gpu_pool.policy.queue_state import HoldingTime
from gpu_pool_client import EndReason, LeaseState, Slice, SliceRequest
from model.known import Known, Life
from model.resizing import Resizing

#: By how much a pool is later than whoever ends a kernel at the end of its longest lease.
LATER = 30.0


class Reference(Resizing):
    """One pool as it should be. Its clocks are set from outside."""

    # -- Asking ------------------------------------------------------------

    def asked(
        self,
        lease_id: str,
        key: str,
        request: SliceRequest,
        user: str,
        course: str | None,
        keeper: Life,
        *,
        batch: bool = False,
    ) -> Known:
        """Take note of a request that was not refused."""
        request = self.counted_as(request)
        milli, memory_mib = self._size(request)
        wanted = self.sharing.course(course)
        known = Known(
            lease_id, key, user, wanted.name, request, keeper, self.wall, self.wall, milli, memory_mib,
            batch or wanted.batch,
        )  # fmt: skip
        self.leases[lease_id] = known
        parts = None if self.queue else placement.place(request, self.granted_from(), self.rules)
        if parts is None:
            self.queue.append(known)
        else:
            self._grant(known, parts)
        return known

    # -- Changing ----------------------------------------------------------

    def attach(self, known: Known, process: Life, ready_within: float | None, grace: float) -> None:
        known.process, known.grace = process, grace
        known.ready_within = known.deadline = None
        if ready_within is not None and known.state is LeaseState.HELD:
            known.deadline = self.uptime + ready_within, EndReason.NOT_READY
        else:
            known.ready_within = ready_within

    def renew(self, known: Known, ttl: float | None) -> None:
        until = None if ttl is None else (self.uptime + ttl, EndReason.EXPIRED)
        if known.deadline is not None and known.deadline[1] is EndReason.PROCESS_GONE:
            return  # the grace of a process that was seen dead
        is_unattached = known.state is LeaseState.HELD and known.process is None
        if is_unattached and (until is None or known.deadline is None or until[0] >= known.deadline[0]):
            return
        known.ready_within, known.deadline = None, until

    def park(self, known: Known) -> None:
        if known.state is LeaseState.PARKED:
            return
        if known.state is LeaseState.WAITING:
            self.queue.remove(known)
        else:
            known.home = frozenset(part.device.uuid for part in known.parts)
        known.stop_holding(self.uptime)
        known.state, known.reserved = LeaseState.PARKED, ()

    def resume(self, known: Known) -> None:
        if known.state is LeaseState.PARKED:
            known.state, known.since = LeaseState.WAITING, self.wall
            self.queue.append(known)

    def end(self, known: Known, reason: EndReason) -> None:
        """End a lease; the queue is to be served afterwards."""
        assert known.state is not LeaseState.ENDED
        if known in self.queue:
            self.queue.remove(known)
        known.stop_holding(self.uptime)
        known.state, known.reason, known.ended_at = LeaseState.ENDED, reason, self.wall

    # -- Time and death ----------------------------------------------------

    def look(self) -> bool:
        """End what is over; return whether anything was found."""
        overdue, gone = [], []
        for known in self.living:
            if known.deadline is not None and known.deadline[0] <= self.uptime:
                overdue.append((known, known.deadline[1]))
            elif known.ends_by is not None and known.ends_by + LATER <= self.uptime:
                overdue.append((known, EndReason.TOO_LONG))
            elif not (known.process or known.keeper).alive:
                gone.append(known)
        for known, reason in overdue:
            self.end(known, reason)
        for known in gone:
            if known.grace and known.process is not None and known.keeper.alive:
                known.process, known.deadline = None, (self.uptime + known.grace, EndReason.PROCESS_GONE)
            else:
                self.end(known, EndReason.PROCESS_GONE)
        return bool(overdue or gone)

    # -- The queue ----------------------------------------------------------

    def serve(self, usage: Usage) -> None:
        """Grant to everybody whose turn it is, and put the others in order; ``usage`` is that of now."""
        if not self.queue:
            return
        now = self._situation(usage)
        decision = decide(now)
        holdings = list(now.holdings)
        by_number = {known.number: known for known in self.queue}
        for waiter, parts in decision.grants:
            known = by_number.pop(waiter.number)
            self.queue.remove(known)
            self._grant(known, parts)
            holdings.append(Holding(waiter.user, waiter.course, parts, since=self.wall))
        left = [waiter for waiter in now.queue if waiter.number in by_number]
        after = in_order_of_turn(replace(now, queue=left, holdings=holdings))
        self.queue = [by_number[waiter.number] for waiter in after]
        for known in self.queue:
            known.reserved = decision.reservations.get(known.number, ())

    def _situation(self, usage: Usage) -> Situation:
        ahead = self.wall - self.uptime
        holdings = [
            Holding(
                each.user,
                each.course,
                each.parts,
                each.ends_by and each.ends_by + ahead,
                self.wall - (self.uptime - each.held_from),
            )
            for each in self.held
        ]
        line = [self._waiter(known) for known in self.queue]
        policy = self.sharing.policy
        ended = [known for known in self.all_in(LeaseState.ENDED) if known.first_held_at is not None]
        history = [HoldingTime(each.course, each.milli, each.held_seconds) for each in reversed(ended)]
        statuses = self.granted_from()
        return Situation(
            line, holdings, statuses, self.rules, policy, usage, self.wall, history=history[:200]
        )

    def _waiter(self, known: Known) -> Waiter:
        course = self.sharing.courses.get(known.course, self.sharing.default)
        return Waiter(
            known.number,
            known.request,
            known.home,
            known.user,
            known.course,
            known.since,
            self.sharing.priority(known.user, known.course),
            known.reserved,
            known.batch or course.batch,
            bool(known.home),
            course.longest_lease,
        )

    def _grant(self, known: Known, parts: tuple[Slice, ...]) -> None:
        longest = self.sharing.courses.get(known.course, self.sharing.default).longest_lease
        known.ends_by = None if longest is None else self.uptime + max(0.0, longest - known.held_seconds)
        known.state, known.parts, known.held_at, known.reserved = LeaseState.HELD, parts, self.wall, ()
        known.held_from = self.uptime
        known.first_held_at = self.wall if known.first_held_at is None else known.first_held_at
        known.measure()
        if known.process is None:
            known.deadline = self.uptime + self._attach_within, EndReason.NEVER_ATTACHED
        elif known.ready_within is not None:
            known.deadline = self.uptime + known.ready_within, EndReason.NOT_READY
