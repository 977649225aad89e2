"""What a pool should do, in memory and in plain Python: what every real one is compared with.

It shares with the pool the pure functions that say what fits, who may ask and
whose turn it is, and nothing of how that is kept, looked after and written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from gpu_pool import admission, placement, quotas
from gpu_pool.coursefiles import Courses
from gpu_pool.courses import Sharing
from gpu_pool.queueing import Holding, Situation, Usage, Waiter, decide, order
from gpu_pool.rules import Rules
from gpu_pool_client import (
    Device,
    DeviceStatus,
    EndReason,
    GpuPoolError,
    LeaseState,
    Slice,
    SliceRequest,
    TimedOut,
)

#: By how much a pool is later than whoever ends a kernel at the end of its longest lease.
LATER = 30.0


@dataclass(eq=False)
class Life:
    """A process of the test's, as the model knows it."""

    alive: bool = True


@dataclass(eq=False)
class Known:
    """A lease as it should be."""

    id: str
    key: str
    user: str
    course: str
    request: SliceRequest
    keeper: Life
    #: Of the wall clock, as are all times but ``ends_by`` and ``deadline``.
    asked_at: float
    since: float
    #: What it takes, or would take, of all devices together.
    milli: int
    memory_mib: int
    state: LeaseState = LeaseState.WAITING
    home: frozenset[str] = frozenset()
    reserved: tuple[str, ...] = ()
    parts: tuple[Slice, ...] = ()
    first_held_at: float | None = None
    held_at: float | None = None
    ends_by: float | None = None
    process: Life | None = None
    grace: float = 0.0
    ready_within: float | None = None
    deadline: tuple[float, EndReason] | None = None
    #: Thousandths, from when and until when it had them.
    stretches: list[tuple[int, float, float]] = field(default_factory=list)
    reason: EndReason | None = None
    ended_at: float = 0.0

    @property
    def number(self) -> int:
        return int(self.id.partition("-")[0])

    @property
    def held_seconds(self) -> float:
        return sum(until - since for _, since, until in self.stretches)

    @property
    def used(self) -> float:
        """Thousandths of a GPU times seconds."""
        return sum(milli * (until - since) for milli, since, until in self.stretches)

    def stop_holding(self, now: float) -> None:
        if self.held_at is not None:
            self.stretches.append((self.milli, self.held_at, max(now, self.held_at)))
        self.parts, self.held_at, self.ends_by = (), None, None


class Reference:
    """One pool as it should be. Its clocks are set from outside."""

    def __init__(
        self,
        devices: Sequence[Device],
        rules: Rules,
        settings: Sharing,
        attach_within: float,
        most_waiting: int,
    ) -> None:
        self.universe = list(devices)
        self.present = {device.uuid for device in devices}
        self.drained: set[str] = set()
        self.rules = rules
        self.courses = Courses()
        self.wall = self.uptime = 0.0
        self.leases: dict[str, Known] = {}
        #: Waiting leases in order of turn.
        self.line: list[Known] = []
        self._settings = settings
        self._attach_within = attach_within
        self._most_waiting = most_waiting

    # -- What there is -----------------------------------------------------

    @property
    def sharing(self) -> Sharing:
        return self.courses.sharing(self._settings)

    def all_in(self, *states: LeaseState) -> list[Known]:
        """Return the leases in these states, oldest first."""
        return sorted((k for k in self.leases.values() if k.state in states), key=lambda k: k.number)

    @property
    def held(self) -> list[Known]:
        return self.all_in(LeaseState.HELD)

    @property
    def living(self) -> list[Known]:
        return [known for known in self.leases.values() if known.state is not LeaseState.ENDED]

    def statuses(self) -> list[DeviceStatus]:
        """Return all devices that are present or hold something."""
        found = [
            DeviceStatus(each, 0, 0, 0, 0, self._total(each), drained=each.uuid in self.drained)
            for each in self.universe
        ]
        for known in self.held:
            found = placement.deduct(found, known.parts)
        return [each for each in found if each.device.uuid in self.present or each.leases]

    def _total(self, device: Device) -> int:
        return self.rules.device_milli if device.mig_profile is None else device.milli

    def granted_from(self) -> list[DeviceStatus]:
        return [each for each in self._present() if not each.drained]

    def _present(self) -> list[DeviceStatus]:
        return [each for each in self.statuses() if each.device.uuid in self.present]

    def _devices(self) -> list[Device]:
        return [each.device for each in self._present()]

    def accounts(self) -> Iterator[quotas.Account]:
        for each in self.living:
            yield quotas.Account(each.user, each.course, 1, each.milli, each.memory_mib)

    # -- Asking ------------------------------------------------------------

    def refusal(self, request: SliceRequest, user: str, course: str | None) -> type[GpuPoolError] | None:
        """Return the error that a request must meet now, or None."""
        try:
            self._check(request, user, course)
        except GpuPoolError as error:
            return type(error)
        return None

    def _check(self, request: SliceRequest, user: str, course: str | None) -> None:
        admission.check_rules(request, self.rules)
        name = self.sharing.course(course).name
        self.courses.check(course, request, user, (), datetime.now(timezone.utc))
        admission.check(request, self._devices(), self.rules)
        milli, memory_mib = self._size(request)
        self._check_quotas(quotas.Account(user, name, 1, milli, memory_mib))
        if self.line or placement.place(request, self.granted_from(), self.rules) is None:
            waiting = sum(each.user == user and not each.home for each in self.line)
            admission.check_waiting(request, waiting, self._most_waiting)

    def _check_quotas(self, asked: quotas.Account) -> None:
        for scope in quotas.scopes(self.sharing, asked.user, asked.course):
            quotas.check(scope, asked, self.accounts())

    def _size(self, request: SliceRequest) -> tuple[int, int]:
        part = next(placement.candidates(request, self._devices(), self.rules))
        return request.count * part.milli, request.count * part.memory_mib

    def asked(
        self, lease_id: str, key: str, request: SliceRequest, user: str, course: str | None, keeper: Life
    ) -> Known:
        """Take note of a request that was not refused."""
        milli, memory_mib = self._size(request)
        name = self.sharing.course(course).name
        known = Known(
            lease_id, key, user, name, request, keeper, self.wall, self.wall, milli, memory_mib
        )  # fmt: skip
        self.leases[lease_id] = known
        parts = None if self.line else placement.place(request, self.granted_from(), self.rules)
        if parts is None:
            self.line.append(known)
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
            self.line.remove(known)
        else:
            known.home = frozenset(part.device.uuid for part in known.parts)
        known.stop_holding(self.wall)
        known.state, known.reserved, known.deadline = LeaseState.PARKED, (), None

    def resume(self, known: Known) -> None:
        if known.state is LeaseState.PARKED:
            known.state, known.since = LeaseState.WAITING, self.wall
            self.line.append(known)

    def end(self, known: Known, reason: EndReason) -> None:
        """End a lease; the line is to be served afterwards."""
        assert known.state is not LeaseState.ENDED
        if known in self.line:
            self.line.remove(known)
        known.stop_holding(self.wall)
        known.state, known.reason, known.ended_at = LeaseState.ENDED, reason, self.wall

    # -- Resizing ----------------------------------------------------------

    def resize(self, known: Known, request: SliceRequest) -> type[GpuPoolError] | None:
        """Change a lease's size; return the error that this must meet instead."""
        try:
            self._resize(known, request)
        except GpuPoolError as error:
            return type(error)
        return None

    def _resize(self, known: Known, request: SliceRequest) -> None:
        admission.check_rules(request, self.rules)
        self.courses.check(known.course, request, known.user, (), datetime.now(timezone.utc))
        if request == known.request:
            return
        devices = self._devices()
        admission.check(request, devices, self.rules)
        new = next(placement.candidates(request, devices, self.rules))
        old = next(placement.candidates(known.request, devices, self.rules), None)
        is_less = (
            old is not None
            and request.count <= known.request.count
            and new.milli <= old.milli
            and new.memory_mib <= old.memory_mib
        )
        milli, memory_mib = self._size(request)
        if not is_less:
            more = (max(0, milli - known.milli), max(0, memory_mib - known.memory_mib))
            self._check_quotas(quotas.Account(known.user, known.course, 0, *more))
        if known.state is LeaseState.HELD:
            self._resize_held(known, request)
        else:
            self._resize_later(known, request, milli, memory_mib, keeps_turn=is_less)

    def _resize_held(self, known: Known, request: SliceRequest) -> None:
        parts = self._room_for(known, request)
        if parts is None:
            raise TimedOut("")
        held_at, ends_by = self.wall, known.ends_by
        known.stop_holding(self.wall)
        known.request, known.parts, known.held_at, known.ends_by = request, parts, held_at, ends_by
        self._measure(known)

    def _room_for(self, known: Known, request: SliceRequest) -> tuple[Slice, ...] | None:
        """Return what a held lease may have: of what is free and nobody waits for, and of its own."""
        own = {part.device.uuid: part for part in known.parts}
        rooms = []
        for status in self._present():
            part = own.get(status.device.uuid)
            rest = status if part is None else _without(status, part)
            if not status.drained and not self._is_waited_for(status.device):
                rooms.append(rest)
            elif part is not None:
                rooms.append(_nothing_but(part, rest))
        at_home = [each for each in rooms if each.device.uuid in own]
        return placement.place(request, at_home, self.rules) or placement.place(request, rooms, self.rules)

    def _is_waited_for(self, device: Device) -> bool:
        return any(
            any(placement.candidates(each.request, [device], self.rules))
            for each in self.line
            if not each.home or device.uuid in each.home
        )

    def _resize_later(
        self, known: Known, request: SliceRequest, milli: int, memory_mib: int, *, keeps_turn: bool
    ) -> None:
        known.request, known.milli, known.memory_mib, known.reserved = request, milli, memory_mib, ()
        if known.state is LeaseState.WAITING and not keeps_turn:
            known.since = self.wall
            self.line.remove(known)
            self.line.append(known)
        at_home = [each for each in self._devices() if each.uuid in known.home]
        if len(list(placement.candidates(request, at_home, self.rules))) < request.count:
            known.home = frozenset()

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

    # -- The line ----------------------------------------------------------

    def serve(self, usage: Usage) -> None:
        """Grant to everybody whose turn it is, and put the others in order; ``usage`` is that of now."""
        if not self.line:
            return
        now = self._situation(usage)
        decision = decide(now)
        holdings = list(now.holdings)
        by_number = {known.number: known for known in self.line}
        for waiter, parts in decision.grants:
            known = by_number.pop(waiter.number)
            self.line.remove(known)
            self._grant(known, parts)
            holdings.append(Holding(waiter.user, waiter.course, parts, since=self.wall))
        left = [waiter for waiter in now.line if waiter.number in by_number]
        after = order(replace(now, line=left, holdings=holdings))
        self.line = [by_number[waiter.number] for waiter in after]
        for known in self.line:
            known.reserved = decision.reservations.get(known.number, ())

    def _situation(self, usage: Usage) -> Situation:
        ahead = self.wall - self.uptime
        holdings = [
            Holding(
                each.user, each.course, each.parts, each.ends_by and each.ends_by + ahead, each.held_at or 0
            )
            for each in self.held
        ]
        line = [self._waiter(known) for known in self.line]
        policy = self.sharing.policy
        return Situation(line, holdings, self.granted_from(), self.rules, policy, usage, self.wall)

    def _waiter(self, known: Known) -> Waiter:
        return Waiter(
            known.number,
            known.request,
            known.home,
            known.user,
            known.course,
            known.since,
            self.sharing.priority(known.user, known.course),
            known.reserved,
        )

    def _grant(self, known: Known, parts: tuple[Slice, ...]) -> None:
        longest = self.sharing.courses.get(known.course, self.sharing.default).longest_lease
        known.ends_by = None if longest is None else self.uptime + max(0.0, longest - known.held_seconds)
        known.state, known.parts, known.held_at, known.reserved = LeaseState.HELD, parts, self.wall, ()
        known.first_held_at = self.wall if known.first_held_at is None else known.first_held_at
        self._measure(known)
        if known.process is None:
            known.deadline = self.uptime + self._attach_within, EndReason.NEVER_ATTACHED
        elif known.ready_within is not None:
            known.deadline = self.uptime + known.ready_within, EndReason.NOT_READY

    def _measure(self, known: Known) -> None:
        known.milli = sum(part.milli for part in known.parts)
        known.memory_mib = sum(part.memory_mib for part in known.parts)


def _without(status: DeviceStatus, part: Slice) -> DeviceStatus:
    return replace(
        status,
        held_milli=status.held_milli - part.milli,
        held_memory_mib=status.held_memory_mib - part.memory_mib,
        held_contexts=status.held_contexts - part.contexts,
        leases=status.leases - 1,
    )


def _nothing_but(part: Slice, status: DeviceStatus) -> DeviceStatus:
    return replace(
        status,
        held_milli=status.milli - part.milli,
        held_memory_mib=status.device.memory_mib - part.memory_mib,
        held_contexts=(status.device.contexts or 0) - part.contexts,
    )
