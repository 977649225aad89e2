"""Reservations: devices that are kept free for requests that have waited, as far as that is worth it. Pure.

A plan says where a request could start, when, and what keeping that free would leave idle until then,
by the ends of leases: those that were said are believed, others are as likely as this pool's history says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.policy import placement
from gpu_pool.policy.holding_times import HoldingTimes
from gpu_pool.policy.placement import Sizes, more
from gpu_pool.policy.queue_state import Holding, Situation, Waiter
from gpu_pool_client import WHOLE, DeviceStatus, Slice, SliceRequest
from gpu_pool_client._free import fits

#: A lease likely ends when this part of those like it that lasted as long have ended.
_LIKELY: Final = 0.5
#: What is let in ends before the start as likely as this. Less sure, it moves the start away too often.
_SURE: Final = 0.95
#: What a request may keep idle beyond its own worth: this part of the pool for as long as it has waited.
_SHARE: Final = 0.2
#: The same where the start follows from lengths that were said: who is shorter is then let in for sure.
_SHARE_IF_SAID: Final = 1.0
#: Waiting longer than this, in seconds, does not add to that: whose devices did not become free by then may
#: wait for leases of which nobody knows when they end, and what was kept idle for it so far was idle in vain.
_LONGEST_WAIT: Final = 8 * 3600.0
#: What one device leaves idle counts so many times more where smaller ones wait for as much as a device, and
#: the less so the longer the request has waited, so that nobody starves. One device becomes free by chance
#: as well, sooner or later; several together do not.
_CROWDED: Final = 3.0
#: What is kept already may cost so much more: ends move to and fro by little.
_SLACK: Final = 1.25
#: How long a request is supposed to be held of which nothing is known, in seconds.
_UNKNOWN: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where and when a request could start, and what keeping that free would cost."""

    #: uuids, in the order of placement.
    devices: tuple[str, ...]
    #: When it will likely fit there; infinite where nobody can tell.
    start: float
    #: What likely stands idle there until then, in milli-seconds.
    idle: float
    #: Whether the start follows from lengths that were said.
    is_said: bool


class Plans:
    """Plans for reservations at one moment, each worked out from what is held."""

    def __init__(self, now: Situation, statuses: Sequence[DeviceStatus], holdings: Sequence[Holding]) -> None:
        self._now, self._rules = now.now, now.rules
        self._statuses = {status.device.uuid: status for status in statuses}
        self._capacity = sum(status.milli for status in statuses)
        self._held_milli = sum(status.held_milli for status in statuses)
        self._times = HoldingTimes(now.history, holdings, now.now)
        held: defaultdict[str, list[tuple[Holding, Slice]]] = defaultdict(list)
        for holding in holdings:
            for part in holding.parts:
                held[part.device.uuid].append((holding, part))
        self._held = held
        self._ends: dict[str, list[tuple[float, Slice]]] = {}
        self._milli = Sizes([status.device for status in statuses], now.rules).milli

    def is_hindered(self, waiter: Waiter) -> bool:
        """Whether leases stand in its way whose next end need not make room for it.

        Those are smaller ones, and where all on a device have one size, those of another.
        """
        able = self._able(waiter)
        if placement.most_together(able) < waiter.request.count:
            return False
        return waiter.request.count > 1 or any(map(self._is_hindered_on, able))

    def plan(self, waiter: Waiter, among: Collection[str] = ()) -> Plan | None:
        """Return where the waiter could start soonest, on any devices or among some; None for nowhere."""
        able = self._able(waiter, among)
        count = waiter.request.count
        if placement.most_together(able) < count:
            return None
        if count == 1:
            # One that a lease as large holds becomes free as a whole anyway, and is taken if sooner.
            able = list(filter(self._is_hindered_on, able)) or able
        ready = {part.device.uuid: self._readiness(part) for part in able}
        together = [
            sorted(parts, key=lambda part: ready[part.device.uuid])[:count]
            for parts in placement.by_node(able)
            if len(parts) >= count
        ]
        soonest = min(together, key=lambda parts: ready[parts[-1].device.uuid])
        chosen = {part.device.uuid for part in soonest}
        start = max(ready[uuid][0] for uuid in chosen)
        return Plan(
            tuple(uuid for uuid in self._statuses if uuid in chosen),
            start,
            sum(self._idle(uuid, start) for uuid in chosen),
            all(holding.is_said for uuid in chosen for holding, _ in self._held.get(uuid, ())),
        )

    def is_worth_it(
        self,
        plan: Plan,
        waiters: Sequence[Waiter],
        others: Iterable[Waiter],
        asked: Iterable[tuple[SliceRequest, int]],
        *,
        is_kept: bool = False,
    ) -> bool:
        """Whether what the plan keeps idle is worth it for those who would start there one after the other.

        That is at most what they ask for times how long that is likely held, and a share of the pool
        for as long as the first of them has waited (for less than a device, as much less of it); somewhat
        more where it is kept since earlier. What several devices leave idle counts as far as the pool is
        used, or would be if those had theirs who ``asked`` for other sizes (each, and how many): the rest
        would idle anyway. What one leaves idle counts more where smaller ones of the ``others`` wait for it,
        at first.
        """
        worth = sum(self._worth(waiter) for waiter in waiters)
        waited = min(_LONGEST_WAIT, self._now - min(waiter.since for waiter in waiters))
        share = self._part(waiters[0]) * (_SHARE_IF_SAID if plan.is_said else _SHARE)
        bound = (_SLACK if is_kept else 1.0) * (worth + share * self._capacity * waited)
        if len(plan.devices) > 1:
            return plan.idle * self._use(asked) <= bound
        if plan.idle > bound:
            return False
        crowded = _CROWDED * (1.0 - waited / _LONGEST_WAIT)
        return plan.idle * (1.0 + crowded * self._wanted(waiters[0], others)) <= bound

    def _use(self, asked: Iterable[tuple[SliceRequest, int]]) -> float:
        """Return the part of the pool that is held, or would be if so many had what they ask for."""
        wanted = sum(self._milli(request) * count for request, count in asked)
        return min(1.0, (self._held_milli + wanted) / self._capacity)

    def _part(self, waiter: Waiter) -> float:
        """Return the part of a device that it asks for: 1 for one or more."""
        return min(1.0, self._milli(waiter.request) / WHOLE)

    def _wanted(self, waiter: Waiter, others: Iterable[Waiter]) -> float:
        """Return the part of a device that those wait for who ask for less than the waiter: at most its own.

        Batch work does not count beside what is not: it can wait.
        """
        milli = self._milli(waiter.request)
        wanted = 0
        for each in others:
            if each.request.count == 1 and (waiter.batch or not each.batch):
                size = self._milli(each.request)
                wanted += size if size < milli else 0
            if wanted >= milli:
                break
        return min(wanted, milli) / WHOLE

    def has_begun(self, waiter: Waiter, plan: Plan) -> bool:
        """Whether one lease of the waiter's size, or a larger one, holds the plan's devices."""
        uuids, milli = set(plan.devices), self._milli(waiter.request)
        held = (holding for holding, _ in self._held.get(plan.devices[0], ()))
        return any({p.device.uuid for p in each.parts} == uuids and each.milli >= milli for each in held)

    def ends_before(self, waiter: Waiter, start: float) -> bool:
        """Whether the waiter, granted now, has given its slice back at the start: known, or almost sure."""
        milli = self._milli(waiter.request)
        # Fifty slices of 2% must be as sure together as one of a whole GPU.
        sure = 1.0 - (1.0 - _SURE) * min(1.0, milli / (waiter.request.count * WHOLE))
        return self._length(waiter, milli, sure) <= start - self._now

    def _able(self, waiter: Waiter, among: Collection[str] = ()) -> list[Slice]:
        """Return its slice on every device, or every one of some, that could ever hold it."""
        statuses, home = self._statuses, waiter.devices
        some = [uuid for uuid in statuses if uuid in among] if among else statuses
        devices = (statuses[uuid].device for uuid in some if not home or uuid in home)
        return list(placement.candidates(waiter.request, devices, self._rules))

    def _is_hindered_on(self, part: Slice) -> bool:
        """Whether leases on the slice's device stand in its way whose next end need not make room for it."""
        return any(_is_in_the_way(other, part) for _, other in self._held.get(part.device.uuid, ()))

    def _worth(self, waiter: Waiter) -> float:
        milli = self._milli(waiter.request)
        length = self._length(waiter, milli, _LIKELY)
        return milli * (length if math.isfinite(length) else _UNKNOWN)

    def _length(self, waiter: Waiter, milli: int, part: float) -> float:
        """Return how long it is held, as said, or as ``part`` of those like it were at most."""
        if waiter.longest is not None and waiter.is_said:
            return waiter.longest
        length = self._times.rest(waiter.course, milli, 0.0, part)
        return length if waiter.longest is None else min(length, waiter.longest)

    def _end(self, holding: Holding) -> float:
        """Return when a lease likely ends; infinite where it has outlasted all that are known."""
        if holding.ends_by is not None and holding.is_said:
            return max(holding.ends_by, self._now)
        age = self._now - holding.since
        is_known = self._times.knows(holding.course, holding.milli)
        # Where nothing is known, what has lasted so long is taken to last as long again.
        # Of many small ones on a device the last to end counts.
        likely = 1.0 - (1.0 - _LIKELY) * min(1.0, holding.parts[0].milli / WHOLE)
        rest = self._times.rest(holding.course, holding.milli, age, likely) if is_known else age
        end = self._now + rest
        return end if holding.ends_by is None else min(end, max(holding.ends_by, self._now))

    def _ends_on(self, uuid: str) -> list[tuple[float, Slice]]:
        """Return the likely ends of the leases on a device, in order of time."""
        if uuid not in self._ends:
            ends = [(self._end(holding), part) for holding, part in self._held.get(uuid, ())]
            self._ends[uuid] = sorted(ends, key=lambda end: end[0])
        return self._ends[uuid]

    def _readiness(self, part: Slice) -> tuple[float, int, int]:
        """Return when the slice will likely fit, how much is held until then, and the index.

        Of equals the last device is taken: placement fills the first ones first.
        """
        status = self._statuses[part.device.uuid]
        at = self._now if fits(part, status) else _fits_at(part, status, self._ends_on(part.device.uuid))
        return at, status.held_milli, -part.device.index

    def _idle(self, uuid: str, start: float) -> float:
        """Return what stands idle on a device until the start if nothing is let in, in milli-seconds."""
        if not math.isfinite(start):
            return math.inf
        status, ends = self._statuses[uuid], self._ends_on(uuid)
        now_free = status.unheld_milli * (start - self._now)
        return now_free + sum(part.milli * max(0.0, start - end) for end, part in ends)


def _is_in_the_way(other: Slice, part: Slice) -> bool:
    size, wanted = (other.milli, other.memory_mib), (part.milli, part.memory_mib)
    return size[0] < part.milli or (part.device.one_size and size != wanted)


def _fits_at(part: Slice, status: DeviceStatus, ends: Iterable[tuple[float, Slice]]) -> float:
    """Return the end after which the slice fits; ``ends`` are in order of time."""
    for at, ended in ends:
        status = more(status, ended)
        if fits(part, status):
            return at
    return math.inf
