"""Whose turn it is: pure functions, without I/O, clock or randomness.

``decide`` says who is granted what now, and which devices are kept free for
whom; ``order`` says in which order turns come. For long queues ``grant`` says
the first half of a decision alone. All follow the same rules: batch work last, higher
priorities first, then courses by weight, then the users of a course by what they hold and
have used lately, then first come, first served. Whoever cannot be placed is
passed over, and gets devices emptied for it once it has waited long enough.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

from gpu_pool.policy import placement
from gpu_pool.policy.fairness import FairShares, faded_use, turns
from gpu_pool.policy.queue_state import Decision, Holding, Policy, Situation, Usage, Waiter
from gpu_pool.policy.reservations import Plan, Plans
from gpu_pool_client import DeviceStatus, Slice, SliceRequest

__all__ = [
    "Decision",
    "Holding",
    "Policy",
    "Situation",
    "Usage",
    "Waiter",
    "decide",
    "faded_use",
    "grant",
    "in_order_of_turn",
]

#: A course that would get more than its part of the pool waits this many times as long
#: before devices are kept free for it: that takes from those who have less.
_MORE_PATIENCE = 16
#: What several waiters ask for: the request as its number in one decision, the uuids of where, and what
#: says how long it lasts.
_Kind: TypeAlias = tuple[Hashable, ...]


def decide(now: Situation) -> Decision:
    """Say who is granted what now, and which devices are kept free for whom.

    To be asked again whenever something changed, and when somebody's
    ``drain_after`` is over.
    """
    decision = _Round(now)
    decision.grant()
    decision.reserve()
    return Decision(tuple(decision.grants), decision.reservations)


def grant(now: Situation) -> Decision:
    """Say who is granted what now, as :func:`decide` does, and reserve nothing that is not reserved yet.

    Of the queue it needs those who have something reserved, and those who could be placed
    if nothing were reserved.
    """
    decision = _Round(now)
    decision.grant()
    return Decision(tuple(decision.grants), decision.reservations)


def in_order_of_turn(now: Situation) -> list[Waiter]:
    """Return the queue in order of turn: as if there were a slice for each when its turn comes."""
    shares = FairShares(now)
    ordered = []
    for waiter in turns(now.queue, shares):
        shares.charge(waiter)
        ordered.append(waiter)
    return ordered


class _Round:
    """One decision in the making."""

    def __init__(self, now: Situation) -> None:
        self._now, self._rules = now, now.rules
        #: Numbers of equal requests, by identity: hashing a request takes long.
        self._numbers: dict[int, int] = {}
        #: All of the queue by shape, in its order.
        self._by_shape = self._shapes()
        #: The devices that have room, in order of placement, and those that got fuller in this decision.
        self._room = placement.with_room(now.statuses)
        self._changed: dict[str, DeviceStatus] = {}
        self.grants: list[tuple[Waiter, tuple[Slice, ...]]] = []
        self._granted: set[int] = set()
        #: What is reserved, and by number for whom.
        self._plan: Plan | None = None
        self._reserved: dict[int, Waiter] = {}
        #: Whether it fits, by kind. What does not will not as long as nothing becomes free.
        self._fits: dict[_Kind, bool] = {}
        #: One of each kind that fits.
        self._fits_one: dict[_Kind, Waiter] = {}
        #: Whether it has given its slice back before the reservation begins, by kind.
        self._is_short: dict[_Kind, bool] = {}

    def _shapes(self) -> dict[_Kind, list[Waiter]]:
        """Group the queue, in one pass without calls: it may be long."""
        shapes: defaultdict[_Kind, list[Waiter]] = defaultdict(list)
        known, equal = self._numbers, dict[SliceRequest, int]()
        for waiter in self._now.queue:
            request = waiter.request
            number = known.get(id(request))
            if number is None:
                number = known[id(request)] = equal.setdefault(request, len(equal))
            shapes[number, waiter.devices].append(waiter)
        return shapes

    def _shape(self, waiter: Waiter) -> _Kind:
        return self._numbers[id(waiter.request)], waiter.devices

    @property
    def reservations(self) -> dict[int, tuple[str, ...]]:
        """The devices that are kept free for each of those who have some."""
        return {} if self._plan is None else dict.fromkeys(self._reserved, self._plan.devices)

    @functools.cached_property
    def _shares(self) -> FairShares:
        """Who has had how much. Nobody asks where nothing fits, or one alone may have what does."""
        shares = FairShares(self._now)
        for waiter, _ in self.grants:
            shares.charge(waiter)
        return shares

    @functools.cached_property
    def _plans(self) -> Plans:
        """What reservations are decided by, as the pool was at first. Nobody asks where none is due."""
        return Plans(self._now, self._now.statuses, self._now.holdings)

    def _turns(self, waiters: Sequence[Waiter]) -> Iterable[Waiter]:
        return turns(waiters, self._shares) if len(waiters) > 1 else waiters

    def grant(self) -> None:
        """Grant to everybody who can be placed: those with devices of their own, then by turn."""
        # Nothing is kept free for batch work while anybody else waits.
        reserved = [waiter for waiter in self._now.queue if waiter.reserved]
        self._keep(reserved if self._is_all_batch() else [w for w in reserved if not w.batch])
        for waiter in list(self._turns([*self._reserved.values()])):
            if self._plan is None or not self._try(waiter, self._room_of(self._plan.devices)):
                break
        while self._grant_by_turn():
            pass

    def _keep(self, reserved: Sequence[Waiter]) -> None:
        """Take over an earlier reservation, if its devices are still there and it is still worth it."""
        first = next(iter(self._turns(reserved)), None)
        if first is None or len(set(first.reserved)) != first.request.count:
            return
        shape = self._shape(first)
        same = [w for w in reserved if w.reserved == first.reserved and self._shape(w) == shape]
        plan = self._plans.plan(first, first.reserved)
        # Nothing is kept free yet in this decision: whoever fits could have it.
        others = self._able() if first.request.count == 1 else ()
        asked = self._asked_beside(first)
        if plan is not None and self._plans.is_worth_it(plan, same, others, asked, is_kept=True):
            self._set(plan, same)

    def _set(self, plan: Plan, waiters: Iterable[Waiter]) -> None:
        self._plan, self._reserved = plan, {waiter.number: waiter for waiter in waiters}
        self._is_short.clear()

    def _all_like(self, first: Waiter) -> list[Waiter]:
        """Return all that wait for such a size; of those who need one device each, that one alone."""
        if first.request.count == 1:
            return [first]  # the next of them may find room on any other device
        alike = self._by_shape[self._shape(first)]
        return [w for w in alike if w.batch == first.batch and w.number not in self._granted]

    def _asked_beside(self, waiter: Waiter) -> list[tuple[SliceRequest, int]]:
        """Return what is waited for that is not what the waiter asks for, and by how many."""
        granted, mine = Counter(self._shape(each) for each, _ in self.grants), self._shape(waiter)
        return [
            (waiters[0].request, len(waiters) - granted[shape])
            for shape, waiters in self._by_shape.items()
            if shape != mine
        ]

    def _is_all_batch(self) -> bool:
        """Whether nobody waits but batch work."""
        return all(waiter.batch for waiter in self._now.queue if waiter.number not in self._granted)

    def _grant_by_turn(self) -> bool:
        """Go through the queue once; return whether a reservation became needless on the way."""
        self._fits.clear()
        self._fits_one.clear()
        was_reserved = self._plan is not None
        for waiter in self._turns(self._able()):
            if self._may_fit(waiter) and self._try(waiter, self._usable(waiter)):
                self._forget_what_fitted()
                if not self._fits_one:
                    break
        return was_reserved and self._plan is None

    def _able(self) -> list[Waiter]:
        """Return those who wait for what fits now."""
        able: list[Waiter] = []
        for waiters in self._by_shape.values():
            # Most shapes fit nowhere: then none of those who ask for one is looked at.
            if placement.place(waiters[0].request, self._at_home(waiters[0]), self._rules) is not None:
                for alike in self._of_each_kind(self._left_of(waiters)):
                    able += alike if self._may_fit(alike[0]) else ()
        return able

    def _left_of(self, waiters: list[Waiter]) -> list[Waiter]:
        """Return those of the waiters who have been granted nothing in this decision."""
        granted = self._granted
        return [w for w in waiters if w.number not in granted] if granted else waiters

    def _of_each_kind(self, waiters: list[Waiter]) -> Iterable[list[Waiter]]:
        """Group waiters of one shape by kind, again without calls."""
        if self._plan is None:
            return filter(None, [waiters])
        kinds: defaultdict[Hashable, list[Waiter]] = defaultdict(list)
        reserved = self._reserved
        for waiter in waiters:
            number = waiter.number
            lasting = waiter.course, waiter.longest, waiter.is_said
            kinds[number if number in reserved else lasting].append(waiter)
        return kinds.values()

    def _kind(self, waiter: Waiter) -> _Kind:
        """Return what is the same for waiters of whom all fit, or none, and for them alone."""
        if self._plan is None:  # a length matters only while something is kept free
            return self._shape(waiter)
        if waiter.number in self._reserved:
            return (waiter.number,)
        return (*self._shape(waiter), *self._lasting(waiter))

    def _may_fit(self, waiter: Waiter) -> bool:
        """Whether what it asks for fitted when it was last tried."""
        key = self._kind(waiter)
        fits = self._fits.get(key)
        if fits is None:
            fits = self._fits[key] = self._fits_now(waiter)
            if fits:
                self._fits_one[key] = waiter
        return fits

    def _fits_now(self, waiter: Waiter) -> bool:
        return placement.place(waiter.request, self._usable(waiter), self._rules) is not None

    def _forget_what_fitted(self) -> None:
        """After a grant, look again at one of each shape that fitted: few are, of a long queue."""
        for key, waiter in list(self._fits_one.items()):
            if not self._fits_now(waiter):
                self._fits[key] = False
                del self._fits_one[key]

    def reserve(self) -> None:
        """Keep devices free for the first of those who have waited too long for whom that is worth it.

        Whoever else waits for such a size joins, until the first of them has begun.
        """
        if self._plan is not None:
            first = next(iter(self._reserved.values()))
            if not self._plans.has_begun(first, self._plan):
                self._set(self._plan, self._all_like(first))
            return
        policy, now = self._now.policy, self._now.now
        late = self._late()
        if not late:
            return
        plans = Plans(self._now, self._left(), [*self._now.holdings, *map(self._as_held, self.grants)])
        hindered = {shape: waiters for shape, waiters in late.items() if plans.is_hindered(waiters[0])}
        for waiter in self._turns(self._first_of_each(chain.from_iterable(hindered.values()))):
            shape = self._shape(waiter)
            if shape in hindered and now - waiter.since >= self._patience(waiter, policy):
                del hindered[shape]
                plan, same = plans.plan(waiter), self._all_like(waiter)
                left = (w for w in self._now.queue if w.number not in self._granted)
                if plan is not None and plans.is_worth_it(plan, same, left, self._asked_beside(waiter)):
                    self._set(plan, same)
                    return

    def _late(self) -> dict[_Kind, list[Waiter]]:
        """Return by shape those who have waited so long that devices may be kept free for them."""
        now, after, batch_too = self._now.now, self._now.policy.drain_after, self._is_all_batch()
        late = {
            shape: [
                w
                for w in waiters
                if now - w.since >= after and (batch_too or not w.batch) and w.number not in self._granted
            ]
            for shape, waiters in self._by_shape.items()
        }
        return {shape: waiters for shape, waiters in late.items() if waiters}

    def _left(self) -> list[DeviceStatus]:
        """Return all devices as they are once all has been granted."""
        changed = self._changed
        return [changed.get(status.device.uuid, status) for status in self._now.statuses]

    def _first_of_each(self, waiters: Iterable[Waiter]) -> list[Waiter]:
        """Return who came first of those of one user who ask for the same: the others come after."""
        first: dict[Hashable, Waiter] = {}
        for waiter in waiters:
            key = (self._shape(waiter), waiter.rank, waiter.course, waiter.user)
            known = first.setdefault(key, waiter)
            if (waiter.since, waiter.number) < (known.since, known.number):
                first[key] = waiter
        return list(first.values())

    def _as_held(self, grant: tuple[Waiter, tuple[Slice, ...]]) -> Holding:
        waiter, parts = grant
        ends_by = None if waiter.longest is None else self._now.now + waiter.longest
        return Holding(waiter.user, waiter.course, parts, ends_by, self._now.now, waiter.is_said)

    def _patience(self, waiter: Waiter, policy: Policy) -> float:
        """Return how long the waiter waits before devices are kept free for it, in seconds."""
        return policy.drain_after * (_MORE_PATIENCE if self._shares.goes_over(waiter) else 1)

    def _try(self, waiter: Waiter, statuses: Iterable[DeviceStatus]) -> bool:
        parts = placement.place(waiter.request, statuses, self._rules)
        if parts is None:
            return False
        self._take(parts)
        if "_shares" in self.__dict__:
            self._shares.charge(waiter)
        self._reserved.pop(waiter.number, None)
        if not self._reserved and self._plan is not None:
            self._plan = None
            self._fits.clear()  # what was kept free is there for all
        self._granted.add(waiter.number)
        self.grants.append((waiter, parts))
        return True

    def _take(self, parts: Sequence[Slice]) -> None:
        taken = [self._room[part.device.uuid] for part in parts]
        for status in placement.deduct(taken, parts):
            # One that is full now stays among them: it is passed over as quickly.
            self._room[status.device.uuid] = self._changed[status.device.uuid] = status

    def _at_home(self, waiter: Waiter) -> Collection[DeviceStatus]:
        """Return the devices with room that the waiter may have, whoever they are kept free for."""
        return self._room_of(waiter.devices) if waiter.devices else self._room.values()

    def _room_of(self, uuids: Collection[str]) -> list[DeviceStatus]:
        return [status for uuid, status in self._room.items() if uuid in uuids]

    def _usable(self, waiter: Waiter) -> Collection[DeviceStatus]:
        """Return the devices that the waiter may be placed on, those that are kept free for others last."""
        statuses = self._at_home(waiter)
        if self._plan is None or waiter.number in self._reserved:
            return statuses
        kept = self._plan.devices
        others = [status for status in statuses if status.device.uuid not in kept]
        if len(others) < len(statuses) and self._ends_before_start(waiter, self._plan.start):
            others += [status for status in statuses if status.device.uuid in kept]
        return others

    def _ends_before_start(self, waiter: Waiter, start: float) -> bool:
        kind = (*self._shape(waiter), *self._lasting(waiter))
        if kind not in self._is_short:
            self._is_short[kind] = self._plans.ends_before(waiter, start)
        return self._is_short[kind]

    @staticmethod
    def _lasting(waiter: Waiter) -> tuple[str, float | None, bool]:
        return waiter.course, waiter.longest, waiter.is_said
