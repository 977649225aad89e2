"""Recorded sessions played cell by cell: what each way of giving slices holds, and whom it makes wait.

Grants are made by the queue, and idle kernels asked back by the policy, that do so in a real pool.
Think times are kept: whoever gets a result later submits the next cell later. So every way runs the
same cells for as long, and ways differ in what is held meanwhile and in when cells begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Final

from gpu_pool.policy import placement, yielding
from gpu_pool.policy.queue import Holding, Policy, Situation, Waiter, decide
from gpu_pool.policy.queue_state import Decision, Rules
from gpu_pool.policy.yielding import HeldKernel
from gpu_pool.simulation.engine import Order, RunningUsage
from gpu_pool.simulation.recorded import RecordedSession
from gpu_pool_client import Device, DeviceStatus, Slice

#: What is kept on a device is moved to host memory and back at so many MiB a second (5 GB/s).
MOVED_PER_SECOND: Final = 5e9 / 2**20
#: Passes between two words of how far it has come.
_TELL_EVERY: Final = 100


@dataclass(frozen=True, slots=True)
class Way:
    """One way of giving slices to kernels. Times are in seconds."""

    name: str
    #: A kernel that is idle for so long gives its slice back, though nobody waits; None for never.
    idle_limit: float | None = None
    #: A kernel that is idle for so long is asked for its slice when somebody waits; None for never.
    yield_after: float | None = None
    #: What holds in its place for the sessions of these courses.
    of_course: Mapping[str, Way] = field(default_factory=dict)

    def of(self, session: RecordedSession) -> Way:
        """Return what holds for a session."""
        return self.of_course.get(session.course, self)

    @property
    def asks_back(self) -> bool:
        """Whether any kernel is asked for its slice when somebody waits."""
        return bool(self.waits)

    @property
    def waits(self) -> frozenset[float]:
        """After how long a wait idle kernels give way sooner, in seconds."""
        each = (way.yield_after for way in (self, *self.of_course.values()))
        return frozenset(after for after in each if after is not None)

    def begins_parked(self, session: RecordedSession) -> bool:
        """Whether a session that had begun before would have no slice by now, if somebody had waited."""
        limits = [limit for limit in (self.idle_limit, self.yield_after) if limit is not None]
        return bool(limits) and session.idle_before > min(limits)


#: Each kernel keeps its slice from its start to its end.
RESERVATION: Final = Way("reservation")
#: Slices are given to cells alone: the bound of what any way can reach.
PER_CELL: Final = Way("per cell", idle_limit=0.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What giving a slice back and taking one again costs. Times are in seconds."""

    #: From having a slice again to the cell's begin.
    resume: float = 5.0
    #: From being asked for a slice to having given it back.
    park: float = 0.0
    #: MiB on each device that are moved to host memory and back, at 5 GB/s, before the slice is free or used.
    state_mib: float = 0.0
    #: Whether a kernel returns to the devices that it had: it has used CUDA, and is not checkpointed.
    same_devices: bool = False

    @property
    def moving(self) -> float:
        """Seconds in which what is on a device is moved."""
        return self.state_mib / MOVED_PER_SECOND


@dataclass(frozen=True, slots=True)
class SliceWait:
    """One wait for a slice: a session's first, or one of a kernel that takes it again."""

    session: RecordedSession
    seconds: float
    is_first: bool


@dataclass(slots=True)
class ReplayResult:
    """What became of the sessions in one way."""

    devices: tuple[Device, ...]
    #: Seconds from each cell's submission to its begin, in the order of their begins.
    delays: list[float] = field(default_factory=list)
    waits: list[SliceWait] = field(default_factory=list)
    #: Kernels that were asked for their slices, and those that gave theirs back while they lived.
    asked_back: int = 0
    parked: int = 0
    #: Amounts in milli-seconds: held in all, and what of it and of cells was within the recorded time.
    held: float = 0.0
    held_in_time: float = 0.0
    used_in_time: float = 0.0


class _State(Enum):
    WAITING = "waiting"
    HELD = "held"
    PARKING = "parking"
    PARKED = "parked"
    ENDED = "ended"


class _Event(IntEnum):
    """What happens, in the order in which it does at one time."""

    ARRIVES = 0
    CELL_ENDS = 1
    SUBMITS = 2
    ENDS = 3
    IS_PARKED = 4
    IDLE_LIMIT = 5
    #: Only a reason to look: somebody may be asked back, or devices may have to be emptied.
    LOOK = 6


@dataclass(slots=True)
class _Kernel:
    number: int
    session: RecordedSession
    state: _State = _State.WAITING
    #: How many of its cells have ended.
    done: int = 0
    #: When the cell was submitted that waits; None where none does.
    submitted_at: float | None = None
    running: bool = False
    idle_since: float = 0.0
    parts: tuple[Slice, ...] = ()
    held_since: float = 0.0
    home: frozenset[str] = frozenset()
    #: Whether it has not had its slice yet.
    is_new: bool = True
    returned: bool = False
    overtaken: frozenset[int] = frozenset()
    parkings: list[float] = field(default_factory=list)
    asked_at: float = 0.0

    @property
    def milli(self) -> int:
        return sum(part.milli for part in self.parts)


def replay(
    sessions: Iterable[RecordedSession],
    devices: Sequence[Device],
    way: Way,
    costs: Costs | None = None,
    *,
    order: Order = decide,
    policy: Policy | None = None,
    rules: Rules | None = None,
    tell: Callable[[float], None] | None = None,
) -> ReplayResult:
    """Let all sessions come, run their cells and go, in simulated time.

    Parameters
    ----------
    sessions
        As they were recorded; time counts from 0.
    devices
        In the order of placement.
    way, costs
        How slices are given and taken back, and what that costs.
    order
        The rule that grants.
    policy, rules
        Those of the pool.
    tell
        Called now and then with the part, 0 to 1, of all cells that has ended.
    """
    playing = _Replay(sessions, devices, way, costs or Costs(), order, policy or Policy(), rules or Rules())
    for number, done in enumerate(playing.run()):
        if tell is not None and number % _TELL_EVERY == 0:
            tell(done)
    return playing.result


class _Replay:
    """Kernels and a pool in simulated time."""

    def __init__(
        self,
        sessions: Iterable[RecordedSession],
        devices: Sequence[Device],
        way: Way,
        costs: Costs,
        order: Order,
        policy: Policy,
        rules: Rules,
    ) -> None:
        self._way, self._costs, self._order, self._policy, self._rules = way, costs, order, policy, rules
        self._kernels = [_Kernel(number, session) for number, session in enumerate(sessions)]
        self._cells = max(1, sum(len(kernel.session.cells) for kernel in self._kernels))
        self._horizon = max((kernel.session.ends_at for kernel in self._kernels), default=0.0)
        self._queue: dict[int, Waiter] = {}
        self._held: dict[int, Holding] = {}
        self._statuses = [DeviceStatus(device, 0, 0, 0, 0, rules.device_milli) for device in devices]
        self._usage = RunningUsage(policy)
        self._events: list[tuple[float, int, int, int]] = []
        self._tick = count()
        #: Whether anything has changed since it was last decided.
        self._changed = False
        self.result = ReplayResult(tuple(devices))
        for kernel in self._kernels:
            self._at(kernel.session.at, _Event.ARRIVES, kernel)

    def run(self) -> Iterable[float]:
        """Go from moment to moment until all have ended; yield the part of all cells that has begun."""
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                _, event, _, number = heappop(self._events)
                self._happen(_Event(event), self._kernels[number], now)
            if self._changed and self._queue:
                self._serve(now)
                yield len(self.result.delays) / self._cells
            self._changed = False

    def _at(self, at: float, event: _Event, kernel: _Kernel) -> None:
        heappush(self._events, (at, event, next(self._tick), kernel.number))

    def _happen(self, event: _Event, kernel: _Kernel, now: float) -> None:
        if event is _Event.ARRIVES:
            self._arrive(kernel, now)
        elif event is _Event.SUBMITS:
            self._submit(kernel, now)
        elif event is _Event.CELL_ENDS:
            self._end_cell(kernel, now)
        elif event is _Event.ENDS:
            self._end(kernel, now)
        elif event is _Event.IS_PARKED:
            self._parked(kernel, now)
        elif event is _Event.IDLE_LIMIT:
            self._reach_idle_limit(kernel, now)
        else:
            self._changed = True

    def _arrive(self, kernel: _Kernel, now: float) -> None:
        if self._way.of(kernel.session).begins_parked(kernel.session):
            kernel.state, kernel.is_new = _State.PARKED, False
        else:
            self._wait(kernel, now, now)
        session = kernel.session
        if session.cells:
            self._at(session.cells[0].at, _Event.SUBMITS, kernel)
        elif kernel.state is _State.PARKED:
            self._at(session.ends_at, _Event.ENDS, kernel)

    def _wait(self, kernel: _Kernel, now: float, since: float) -> None:
        kernel.state, kernel.asked_at = _State.WAITING, now
        session = kernel.session
        self._queue[kernel.number] = Waiter(
            kernel.number,
            session.request,
            kernel.home,
            session.user,
            session.course,
            since,
            is_parked=bool(kernel.home),
        )
        for due in (since + self._policy.drain_after, *(now + seconds for seconds in self._way.waits)):
            self._at(max(now, due), _Event.LOOK, kernel)
        self._changed = True

    def _submit(self, kernel: _Kernel, now: float) -> None:
        kernel.submitted_at = now
        if kernel.state is _State.HELD:
            self._begin_cell(kernel, now)
        elif kernel.state is _State.PARKED:
            self._return(kernel, now)

    def _return(self, kernel: _Kernel, now: float) -> None:
        newcomers = (
            (number, waiter.since) for number, waiter in self._queue.items() if self._kernels[number].is_new
        )
        since, kernel.overtaken = yielding.place_of_return(now, newcomers, kernel.overtaken)
        self._wait(kernel, now, since)

    def _begin_cell(self, kernel: _Kernel, at: float) -> None:
        submitted, cell = kernel.submitted_at, kernel.session.cells[kernel.done]
        self.result.delays.append(at - (at if submitted is None else submitted))
        kernel.submitted_at, kernel.running = None, True
        self.result.used_in_time += kernel.milli * self._in_time(at, at + cell.seconds)
        self._at(at + cell.seconds, _Event.CELL_ENDS, kernel)

    def _in_time(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self._horizon) - min(begin, self._horizon))

    def _end_cell(self, kernel: _Kernel, now: float) -> None:
        cells, ended = kernel.session.cells, kernel.session.cells[kernel.done].ended_at
        kernel.done += 1
        kernel.running = kernel.returned = False
        if kernel.done < len(cells):
            self._at(now + max(0.0, cells[kernel.done].at - ended), _Event.SUBMITS, kernel)
        else:
            self._at(now + max(0.0, kernel.session.ends_at - ended), _Event.ENDS, kernel)
        self._idle(kernel, now)

    def _idle(self, kernel: _Kernel, now: float) -> None:
        kernel.idle_since = now
        limit = self._way.of(kernel.session).idle_limit
        if limit is not None:
            self._at(now + limit, _Event.IDLE_LIMIT, kernel)
        held = self._as_held(kernel)
        # For those who have waited for long, and for anybody.
        for due in {yielding.yields_at(held), yielding.yields_at(held, now)}:
            if due is not None:
                self._at(due, _Event.LOOK, kernel)

    def _reach_idle_limit(self, kernel: _Kernel, now: float) -> None:
        is_idle = kernel.state is _State.HELD and not kernel.running
        limit = self._way.of(kernel.session).idle_limit or 0.0
        if is_idle and now - kernel.idle_since >= limit - 1e-6:
            self._park(kernel, now)

    def _park(self, kernel: _Kernel, now: float) -> None:
        kernel.state = _State.PARKING
        self.result.parked += 1
        kernel.parkings.append(now)
        self._at(now + self._costs.park + self._costs.moving, _Event.IS_PARKED, kernel)

    def _parked(self, kernel: _Kernel, now: float) -> None:
        if kernel.state is not _State.PARKING:
            return
        if self._costs.same_devices:
            kernel.home = frozenset(part.device.uuid for part in kernel.parts)
        self._give_back(kernel, now)
        kernel.state = _State.PARKED
        if kernel.submitted_at is not None:
            self._return(kernel, now)

    def _end(self, kernel: _Kernel, now: float) -> None:
        self._queue.pop(kernel.number, None)
        if kernel.parts:
            self._give_back(kernel, now)
        kernel.state = _State.ENDED

    def _give_back(self, kernel: _Kernel, now: float) -> None:
        self._usage.add(self._held.pop(kernel.number), now)
        self._statuses = placement.give_back(self._statuses, kernel.parts)
        self.result.held += kernel.milli * (now - kernel.held_since)
        self.result.held_in_time += kernel.milli * self._in_time(kernel.held_since, now)
        kernel.parts = ()
        self._changed = True

    def _serve(self, now: float) -> None:
        situation = self._situation(now)
        decision = self._order(situation)
        for waiter, parts in decision.grants:
            self._grant(self._kernels[waiter.number], parts, now)
        for number, waiter in self._queue.items():
            reserved = decision.reservations.get(number, ())
            if waiter.reserved != reserved:
                self._queue[number] = replace(waiter, reserved=reserved)
        if self._queue and self._way.asks_back:
            self._ask_back(self._situation(now), decision)

    def _situation(self, now: float) -> Situation:
        return Situation(
            tuple(self._queue.values()),
            tuple(self._held.values()),
            tuple(self._statuses),
            self._rules,
            self._policy,
            self._usage.at(now),
            now,
        )

    def _grant(self, kernel: _Kernel, parts: tuple[Slice, ...], now: float) -> None:
        session, is_first = kernel.session, kernel.is_new
        self.result.waits.append(SliceWait(session, now - kernel.asked_at, is_first))
        del self._queue[kernel.number]
        self._held[kernel.number] = Holding(session.user, session.course, parts, None, now)
        self._statuses = placement.deduct(self._statuses, parts)
        kernel.state, kernel.parts, kernel.held_since = _State.HELD, parts, now
        kernel.returned, kernel.is_new = not is_first, False
        if kernel.submitted_at is not None:
            self._begin_cell(kernel, now if is_first else now + self._costs.resume + self._costs.moving)
        else:
            self._idle(kernel, now)
        if is_first and not session.cells:
            self._at(now + session.ends_at - session.at, _Event.ENDS, kernel)

    def _ask_back(self, now: Situation, decision: Decision) -> None:
        held = [self._as_held(self._kernels[number]) for number in self._held]
        yielded_to = {
            number: self._kernels[number].asked_at
            for number in self._queue
            if yielding.is_yielded_to(self._yield_after(self._kernels[number]), None)
        }
        found = yielding.ask_back(now, decision.reservations, held, yielded_to)
        for numbers in found.values():
            for number in numbers:
                self.result.asked_back += 1
                self._park(self._kernels[number], now.now)

    def _yield_after(self, kernel: _Kernel) -> float | None:
        return None if kernel.session.is_job else self._way.of(kernel.session).yield_after

    def _as_held(self, kernel: _Kernel) -> HeldKernel:
        return HeldKernel(
            kernel.number,
            kernel.parts,
            None if kernel.running else kernel.idle_since,
            working=kernel.running,
            yield_after=self._yield_after(kernel),
            returned=kernel.returned,
            parkings=tuple(kernel.parkings[-yielding.MOST_PARKINGS :]),
            asked=kernel.state is _State.PARKING,
        )
