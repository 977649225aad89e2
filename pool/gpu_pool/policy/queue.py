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
from collections.abc import Hashable, Iterable, Sequence
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
    "order",
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


def order(now: Situation) -> list[Waiter]:
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
        self._now = now
        self._waiting = {waiter.number: waiter for waiter in now.queue}
        self._statuses, self._rules = list(now.statuses), now.rules
        self.grants: list[tuple[Waiter, tuple[Slice, ...]]] = []
        #: What is reserved, and by number for whom.
        self._plan: Plan | None = None
        self._reserved: dict[int, Waiter] = {}
        #: Whether it fits, by shape. What does not will not as long as nothing becomes free.
        self._fits: dict[_Kind, bool] = {}
        #: One of each shape that fits.
        self._fits_one: dict[_Kind, Waiter] = {}
        #: Whether it has given its slice back before the reservation begins, by shape.
        self._is_short: dict[_Kind, bool] = {}
        #: Numbers of equal requests, and the same by identity: hashing a request takes long.
        self._numbers: dict[SliceRequest, int] = {}
        self._known: dict[int, int] = {}

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

    def _kind(self, waiter: Waiter) -> _Kind:
        """Return what is the same for waiters of the same shape, and for them alone."""
        request = waiter.request
        number = self._known.get(id(request))
        if number is None:
            number = self._known[id(request)] = self._numbers.setdefault(request, len(self._numbers))
        # A length matters only while something is kept free.
        return (number, waiter.devices, *self._lasting(waiter)) if self._plan else (number, waiter.devices)

    @staticmethod
    def _lasting(waiter: Waiter) -> tuple[str, float | None, bool]:
        return waiter.course, waiter.longest, waiter.is_said

    def grant(self) -> None:
        """Grant to everybody who can be placed: those with devices of their own, then by turn."""
        # Nothing is kept free for batch work while anybody else waits.
        self._keep([waiter for waiter in self._not_giving_way() if waiter.reserved])
        for waiter in list(self._turns([*self._reserved.values()])):
            if self._plan is None or not self._try(waiter, self._statuses_of(self._plan.devices)):
                break
        while self._grant_by_turn():
            pass

    def _keep(self, reserved: Sequence[Waiter]) -> None:
        """Take over an earlier reservation, if its devices are still there and it is still worth it."""
        first = next(iter(self._turns(reserved)), None)
        if first is None or len(set(first.reserved)) != first.request.count:
            return
        kind = self._kind(first)
        same = [w for w in reserved if w.reserved == first.reserved and self._kind(w) == kind]
        plan = self._plans.plan(first, first.reserved)
        if plan is not None and self._plans.is_worth_it(plan, same, is_kept=True):
            self._set(plan, same)

    def _set(self, plan: Plan, waiters: Iterable[Waiter]) -> None:
        self._plan, self._reserved = plan, {waiter.number: waiter for waiter in waiters}
        self._is_short.clear()

    def _all_like(self, first: Waiter) -> list[Waiter]:
        """Return all that wait for such a size; of those who need one device each, that one alone."""
        if first.request.count == 1:
            return [first]  # the next of them may find room on any other device
        number, waiting = self._kind(first)[:2], self._waiting.values()
        return [w for w in waiting if w.batch == first.batch and self._kind(w)[:2] == number]

    def _not_giving_way(self) -> list[Waiter]:
        """Return those who wait and are not batch work; all of them where there is nothing else."""
        waiting = list(self._waiting.values())
        return [waiter for waiter in waiting if not waiter.batch] or waiting

    def _grant_by_turn(self) -> bool:
        """Go through the queue once; return whether a reservation became needless on the way."""
        self._fits.clear()
        self._fits_one.clear()
        was_reserved = self._plan is not None
        able = [waiter for waiter in self._waiting.values() if self._may_fit(waiter)]
        for waiter in self._turns(able):
            if self._may_fit(waiter) and self._try(waiter, self._usable(waiter)):
                self._forget_what_fitted()
                if not self._fits_one:
                    break
        return was_reserved and self._plan is None

    def _fits_key(self, waiter: Waiter) -> _Kind:
        return (waiter.number,) if waiter.number in self._reserved else self._kind(waiter)

    def _may_fit(self, waiter: Waiter) -> bool:
        """Whether what it asks for fitted when it was last tried."""
        key = self._fits_key(waiter)
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
        late = [waiter for waiter in self._not_giving_way() if now - waiter.since >= policy.drain_after]
        if not late:
            return
        plans = Plans(self._now, self._statuses, [*self._now.holdings, *map(self._as_held, self.grants)])
        late = self._first_of_each(late)
        hindered = {self._kind(one): one for one in late}
        hindered = {kind: one for kind, one in hindered.items() if plans.is_hindered(one)}
        for waiter in self._turns([waiter for waiter in late if self._kind(waiter) in hindered]):
            kind = self._kind(waiter)
            if kind in hindered and now - waiter.since >= self._patience(waiter, policy):
                del hindered[kind]
                plan, same = plans.plan(waiter), self._all_like(waiter)
                if plan is not None and plans.is_worth_it(plan, same):
                    self._set(plan, same)
                    return

    def _first_of_each(self, waiters: Iterable[Waiter]) -> list[Waiter]:
        """Return who came first of those of one user who ask for the same: the others come after."""
        first: dict[Hashable, Waiter] = {}
        for waiter in waiters:
            key = (self._kind(waiter), waiter.rank, waiter.course, waiter.user)
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

    def _try(self, waiter: Waiter, statuses: Sequence[DeviceStatus]) -> bool:
        parts = placement.place(waiter.request, statuses, self._rules)
        if parts is None:
            return False
        self._statuses = placement.deduct(self._statuses, parts)
        if "_shares" in self.__dict__:
            self._shares.charge(waiter)
        self._reserved.pop(waiter.number, None)
        if not self._reserved:
            self._plan = None
        del self._waiting[waiter.number]
        self.grants.append((waiter, parts))
        return True

    def _usable(self, waiter: Waiter) -> list[DeviceStatus]:
        """Return the devices that the waiter may be placed on, those that are kept free for others last."""
        home = waiter.devices
        statuses = [s for s in self._statuses if s.device.uuid in home] if home else self._statuses
        if self._plan is None or waiter.number in self._reserved:
            return statuses
        kept = self._plan.devices
        others = [status for status in statuses if status.device.uuid not in kept]
        if self._ends_before_start(waiter, self._plan.start):
            others += [status for status in statuses if status.device.uuid in kept]
        return others

    def _ends_before_start(self, waiter: Waiter, start: float) -> bool:
        kind = self._kind(waiter)
        if kind not in self._is_short:
            self._is_short[kind] = self._plans.ends_before(waiter, start)
        return self._is_short[kind]

    def _statuses_of(self, uuids: Sequence[str]) -> list[DeviceStatus]:
        return [status for status in self._statuses if status.device.uuid in uuids]
