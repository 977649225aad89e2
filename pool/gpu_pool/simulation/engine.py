"""Arrivals in, waits out: a run of the queue in simulated time, in our order or in one to compare it with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from gpu_pool.policy import placement
from gpu_pool.policy.holding_times import MOST_ALIKE
from gpu_pool.policy.queue import Decision, Holding, Policy, Situation, Usage, Waiter, decide, faded_use
from gpu_pool.policy.queue_state import HoldingTime, Rules
from gpu_pool_client import Device, DeviceStatus, Slice, SliceRequest

#: A rule that grants: called as ``decide`` is.
Order = Callable[[Situation], Decision]
#: Decisions between two words of how far it has come.
_TELL_EVERY: Final = 50
#: What is known of how long leases last: what was said with each, what this pool's past shows, nothing.
Lengths: TypeAlias = Literal["known", "learned", "none"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Somebody asks for a slice, and keeps it for a while. Times are in seconds."""

    at: float
    user: str
    course: str
    request: SliceRequest
    #: How long it is held once granted.
    stay: float
    #: How long it may be held; None where nothing limits it.
    longest: float | None = None
    #: Whether it is batch work.
    batch: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalOutcome:
    """What became of one arrival."""

    arrival: Arrival
    held_at: float
    #: Thousandths of a device that it held, of all its devices together.
    milli: int
    #: Its number in the queue, in the order of arrival.
    number: int

    @property
    def wait(self) -> float:
        """Seconds from asking to holding."""
        return self.held_at - self.arrival.at


@dataclass(frozen=True, slots=True)
class SimulatedMoment:
    """The pool between two events, as the queue is told of it, and what it then decides."""

    situation: Situation
    decision: Decision


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulated run."""

    devices: tuple[Device, ...]
    #: In the order of their grants.
    outcomes: tuple[ArrivalOutcome, ...]


def simulate(
    arrivals: Iterable[Arrival],
    devices: Sequence[Device],
    order: Order,
    policy: Policy | None = None,
    rules: Rules | None = None,
    tell: Callable[[float], None] | None = None,
    lengths: Lengths = "learned",
) -> SimulatedRun:
    """Let everybody arrive, wait, hold and leave, in simulated time, until all have left.

    ``tell`` is called now and then with the part, 0 to 1, of them that has been served. ``lengths`` is
    what the order is told of how long leases last: all, what those that have ended showed, or nothing.
    """
    simulation = Simulation(arrivals, devices, order, policy or Policy(), rules or Rules(), lengths)
    for number, _ in enumerate(simulation.moments()):
        if tell is not None and number % _TELL_EVERY == 0:
            tell(simulation.served)
    return SimulatedRun(tuple(devices), tuple(simulation.outcomes))


class Simulation:
    """A pool in simulated time."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        devices: Sequence[Device],
        order: Order,
        policy: Policy,
        rules: Rules,
        lengths: Lengths = "learned",
    ) -> None:
        self._lengths = lengths
        self._order, self._policy, self._rules = order, policy, rules
        self._coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        self._all = len(self._coming)
        self._arrivals: dict[int, Arrival] = {}
        self._queue: dict[int, Waiter] = {}
        #: Numbers of those for whom the last decision kept devices free.
        self._reserved: frozenset[int] = frozenset()
        self._held: dict[int, Holding] = {}
        self._statuses = {d.uuid: DeviceStatus(d, 0, 0, 0, 0, rules.device_milli) for d in devices}
        self._usage = RunningUsage(policy)
        #: Times at which a lease ends (with its number), or devices may have to be emptied (with none).
        self._events: list[tuple[float, int]] = []
        self.outcomes: list[ArrivalOutcome] = []
        self._history: dict[tuple[str, int], deque[HoldingTime]] = {}

    @property
    def served(self) -> float:
        """The part of all who come that has been granted what they asked for."""
        return len(self.outcomes) / max(1, self._all)

    def moments(self) -> Iterator[SimulatedMoment]:
        """Go from event to event; yield what was decided at each before it takes effect."""
        while self._coming or self._events:
            now = self._next_event()
            while self._events and self._events[0][0] <= now:
                self._end(heappop(self._events)[1], now)
            while self._coming and self._coming[0].at <= now:
                self._arrive(self._coming.popleft())
            if self._queue:
                yield self._decide(now)

    def _next_event(self) -> float:
        times = [self._coming[0].at] if self._coming else []
        return min(times + [at for at, _ in self._events[:1]])

    def _arrive(self, arrival: Arrival) -> None:
        number, length = len(self._arrivals), arrival.request.length
        if length is not None:  # what is said is its end
            arrival = replace(arrival, stay=min(arrival.stay, length))
        self._arrivals[number] = arrival
        self._queue[number] = Waiter(
            number,
            arrival.request,
            user=arrival.user,
            course=arrival.course,
            since=arrival.at,
            batch=arrival.batch,
            longest=arrival.stay if self._lengths == "known" else arrival.request.at_most(arrival.longest),
            is_said=self._lengths == "known" or length is not None,
        )
        heappush(self._events, (arrival.at + self._policy.drain_after, -1))

    def _end(self, number: int, now: float) -> None:
        holding = self._held.pop(number, None)
        if holding is None:
            return
        self._usage.add(holding, now)
        kind = holding.course, holding.milli
        alike = self._history.setdefault(kind, deque(maxlen=MOST_ALIKE))
        alike.appendleft(HoldingTime(*kind, now - holding.since))
        self._change(placement.give_back, holding.parts)

    def _change(self, how: Callable[..., list[DeviceStatus]], parts: Sequence[Slice]) -> None:
        """Take slices of their devices, or give them back, and leave all others as they are."""
        for status in how([self._statuses[part.device.uuid] for part in parts], parts):
            self._statuses[status.device.uuid] = status

    def _decide(self, now: float) -> SimulatedMoment:
        situation = Situation(
            tuple(self._queue.values()),
            tuple(self._held.values()),
            tuple(self._statuses.values()),
            self._rules,
            self._policy,
            self._usage.at(now),
            now,
            history=() if self._lengths == "none" else tuple(chain.from_iterable(self._history.values())),
        )
        decision = self._order(situation)
        self._apply(decision, now)
        return SimulatedMoment(situation, decision)

    def _apply(self, decision: Decision, now: float) -> None:
        for waiter, parts in decision.grants:
            arrival = self._arrivals[waiter.number]
            ends_by = None if waiter.longest is None else now + waiter.longest
            holding = Holding(waiter.user, waiter.course, parts, ends_by, now, waiter.is_said)
            self._change(placement.deduct, parts)
            self._held[waiter.number] = holding
            del self._queue[waiter.number]
            heappush(self._events, (now + arrival.stay, waiter.number))
            self.outcomes.append(ArrivalOutcome(arrival, now, holding.milli, waiter.number))
        reserved = decision.reservations
        for number in (self._reserved | reserved.keys()) & self._queue.keys():
            waiter = self._queue[number]
            if waiter.reserved != reserved.get(number, ()):
                self._queue[number] = replace(waiter, reserved=reserved.get(number, ()))
        self._reserved = frozenset(reserved)


K = TypeVar("K", bound=Hashable)


class _Totals(Generic[K]):
    """Sums that all halve once per half-life."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        #: (total, when it was that), by key.
        self._totals: dict[K, tuple[float, float]] = {}

    def add(self, key: K, milli: int, began: float, now: float) -> None:
        """Add what was held from ``began`` until now."""
        self._totals[key] = self.of(key, now) + faded_use(milli, began, now, now, self._half_life), now

    def of(self, key: K, now: float) -> float:
        """Return what the total has faded to."""
        total, at = self._totals.get(key, (0.0, now))
        return _fade(total, at, self._half_life, now)

    def at(self, now: float) -> _Faded[K]:
        """Return all totals as they are now, whatever is added later."""
        return _Faded(self._totals, self._half_life, now)


class _Faded(Mapping[K, float]):
    """Totals at one time. Each is worked out when it is asked for: most decisions ask for a few."""

    def __init__(self, totals: Mapping[K, tuple[float, float]], half_life: float, now: float) -> None:
        self._totals, self._half_life, self._now = dict(totals), half_life, now

    def __getitem__(self, key: K) -> float:
        return _fade(*self._totals[key], self._half_life, self._now)

    def __iter__(self) -> Iterator[K]:
        return iter(self._totals)

    def __len__(self) -> int:
        return len(self._totals)


def _fade(total: float, at: float, half_life: float, now: float) -> float:
    return float(total * 0.5 ** ((now - at) / half_life))


class RunningUsage:
    """Adds up leases as they end; says at any time what they count as."""

    def __init__(self, policy: Policy) -> None:
        self._courses: _Totals[str] = _Totals(policy.course_half_life)
        self._users: _Totals[tuple[str, str]] = _Totals(policy.user_half_life)

    def add(self, ended: Holding, now: float) -> None:
        """Count a lease that ends now."""
        self._courses.add(ended.course, ended.milli, ended.since, now)
        self._users.add((ended.course, ended.user), ended.milli, ended.since, now)

    def at(self, now: float) -> Usage:
        """Return what all ended leases count as now."""
        return Usage(self._courses.at(now), self._users.at(now))


def strict(now: Situation) -> Decision:
    """First come, first served: nobody passes anybody."""
    return _in_order(now.queue, now, stop=True)


def backfill(now: Situation) -> Decision:
    """First come, first served, passing over whoever cannot be placed now."""
    return _in_order(now.queue, now)


def smallest_first(now: Situation) -> Decision:
    """Those who ask for least first, then first come, first served."""

    def size(waiter: Waiter) -> int:
        return waiter.request.count * (waiter.request.milli or waiter.request.memory_mib or 0)

    return _in_order(sorted(now.queue, key=size), now)


def _in_order(queue: Iterable[Waiter], now: Situation, *, stop: bool = False) -> Decision:
    """Grant in this order; a waiter who cannot be placed is passed over, or stops all behind it."""
    free, grants, refused = list(now.statuses), [], set()
    for waiter in queue:
        parts = None if waiter.request in refused else placement.place(waiter.request, free, now.rules)
        if parts is not None:
            free = placement.deduct(free, parts)
            grants.append((waiter, parts))
        elif stop:
            break
        else:
            refused.add(waiter.request)
    return Decision(tuple(grants), {})


#: By name, ours first.
ORDERS: Final[Mapping[str, Order]] = {
    "fair": decide,
    "strict order": strict,
    "smallest first": smallest_first,
    "backfill": backfill,
}
