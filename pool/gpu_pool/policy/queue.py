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
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from gpu_pool.policy import placement
from gpu_pool.policy.fairness import FairShares, faded_use, first_course, turns
from gpu_pool.policy.queue_state import Decision, Holding, Policy, Situation, Usage, Waiter
from gpu_pool.policy.reservations import Reservations, smallest_by_device
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
#: before devices are emptied for it: emptying takes from those who have less.
_MORE_PATIENCE = 16
#: What several waiters ask for, the request as its number in one decision, and the uuids of where.
_Kind: TypeAlias = tuple[int, frozenset[str]]


def decide(now: Situation) -> Decision:
    """Say who is granted what now, and which devices are kept free for whom.

    To be asked again whenever something changed, and when somebody's
    ``drain_after`` is over.
    """
    decision = _Round(now)
    decision.grant()
    decision.reserve(now.holdings, now.policy, now.now)
    return Decision(tuple(decision.grants), decision.reservations.by_number)


def grant(now: Situation) -> Decision:
    """Say who is granted what now, as :func:`decide` does, and reserve nothing that is not reserved yet.

    Of the queue it needs those who have something reserved, and those who could be placed
    if nothing were reserved.
    """
    decision = _Round(now)
    decision.grant()
    return Decision(tuple(decision.grants), decision.reservations.by_number)


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
        self._situation = now
        self._waiting = {waiter.number: waiter for waiter in now.queue}
        self._statuses, self._rules = list(now.statuses), now.rules
        self.reservations = Reservations([status.device for status in now.statuses], now.rules)
        self.grants: list[tuple[Waiter, tuple[Slice, ...]]] = []
        #: Whether it fits, by shape. What does not will not as long as nothing becomes free.
        self._fits: dict[_Kind, bool] = {}
        #: Numbers of equal requests, and the same by identity: hashing a request takes long.
        self._numbers: dict[SliceRequest, int] = {}
        self._known: dict[int, int] = {}

    @functools.cached_property
    def _shares(self) -> FairShares:
        """Who has had how much. Nobody asks where nothing fits, as it often is for a long queue."""
        return FairShares(self._situation)

    def _turns(self, waiters: Sequence[Waiter]) -> Iterable[Waiter]:
        return turns(waiters, self._shares) if waiters else ()

    def _kind(self, waiter: Waiter) -> _Kind:
        """Return what is the same for waiters of the same shape, and for them alone."""
        request = waiter.request
        number = self._known.get(id(request))
        if number is None:
            number = self._known[id(request)] = self._numbers.setdefault(request, len(self._numbers))
        return number, waiter.devices

    def grant(self) -> None:
        """Grant to everybody who can be placed: those with devices of their own, then by turn."""
        # Nothing is kept free for batch work while anybody else waits.
        for waiter in self._turns([w for w in self._not_giving_way() if w.reserved]):
            if self.reservations.keep(waiter):
                self._try(waiter, self._statuses_of(waiter.reserved))
        while self._grant_by_turn():
            pass

    def _not_giving_way(self) -> list[Waiter]:
        """Return those who wait and are not batch work; all of them where there is nothing else."""
        waiting = list(self._waiting.values())
        return [waiter for waiter in waiting if not waiter.batch] or waiting

    def _grant_by_turn(self) -> bool:
        """Go through the queue once; return whether a reservation became needless on the way."""
        self._fits.clear()
        freed = False
        able = [
            waiter for waiter in self._waiting.values() if self._is_reserved(waiter) or self._may_fit(waiter)
        ]
        for waiter in self._turns(able):
            reserved = self._is_reserved(waiter)
            if reserved or self._may_fit(waiter):
                granted = self._try(waiter, self._usable(waiter))
                freed |= granted and reserved
                if not granted and not reserved:
                    self._fits[self._kind(waiter)] = False
                    if not self.reservations.by_number and not any(self._fits.values()):
                        break
        return freed

    def _is_reserved(self, waiter: Waiter) -> bool:
        return waiter.number in self.reservations.by_number

    def _may_fit(self, waiter: Waiter) -> bool:
        """Whether what it asks for fitted when it was last tried, for whoever has nothing reserved."""
        kind = self._kind(waiter)
        fits = self._fits.get(kind)
        if fits is None:
            parts = placement.place(waiter.request, self._usable(waiter), self._rules)
            fits = self._fits[kind] = parts is not None
        return fits

    def reserve(self, holdings: Sequence[Holding], policy: Policy, now: float) -> None:
        """Empty devices for those who have waited too long, as far as it is their course's turn."""
        unreserved = [waiter for waiter in self._not_giving_way() if not self._is_reserved(waiter)]
        late = [waiter for waiter in unreserved if now - waiter.since >= policy.drain_after]
        if self.reservations.full or not late:
            return
        held = [*holdings, *(Holding(waiter.user, waiter.course, parts) for waiter, parts in self.grants)]
        smallest = smallest_by_device(held)
        one_of = {self._kind(waiter): waiter for waiter in unreserved}
        hindered = {kind for kind, one in one_of.items() if self.reservations.is_hindered(one, smallest)}
        if not any(self._kind(waiter) in hindered for waiter in late):
            return
        for waiter in self._waiting.values():
            if self._is_reserved(waiter):
                self._shares.charge(waiter)
        while not self.reservations.full and any(
            now - waiter.since >= policy.drain_after and self._kind(waiter) in hindered
            for waiter in unreserved
        ):
            due = (
                waiter
                for waiter in turns(first_course(unreserved, self._shares), self._shares)
                if now - waiter.since >= self._patience(waiter, policy) and self._kind(waiter) in hindered
            )
            first = next(due, None)
            if first is None or not self.reservations.add(first, self._statuses, held):
                return
            self._shares.charge(first)
            unreserved.remove(first)

    def _patience(self, waiter: Waiter, policy: Policy) -> float:
        """Return how long the waiter waits before devices are emptied for it, in seconds."""
        return policy.drain_after * (_MORE_PATIENCE if self._shares.goes_over(waiter) else 1)

    def _try(self, waiter: Waiter, statuses: Sequence[DeviceStatus]) -> bool:
        parts = placement.place(waiter.request, statuses, self._rules)
        if parts is None:
            return False
        self._statuses = placement.deduct(self._statuses, parts)
        self._shares.charge(waiter)
        self.reservations.by_number.pop(waiter.number, None)
        del self._waiting[waiter.number]
        self.grants.append((waiter, parts))
        return True

    def _usable(self, waiter: Waiter) -> list[DeviceStatus]:
        return _usable(waiter, self._statuses, self.reservations)

    def _statuses_of(self, uuids: Sequence[str]) -> list[DeviceStatus]:
        return [status for status in self._statuses if status.device.uuid in uuids]


def _usable(
    waiter: Waiter, statuses: Sequence[DeviceStatus], reservations: Reservations
) -> list[DeviceStatus]:
    """Return the devices that the waiter may be placed on."""
    taken = reservations.of_others(waiter)
    home = waiter.devices
    return [
        status
        for status in statuses
        if status.device.uuid not in taken and (not home or status.device.uuid in home)
    ]
