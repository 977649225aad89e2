"""The queue's rule without what makes it fast: everybody is tried, and all is added up anew each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gpu_pool.policy import placement
from gpu_pool.policy.queue import Decision, Holding, Situation, Waiter
from gpu_pool.policy.reservations import Plan, Plans
from gpu_pool_client import DeviceStatus, Slice, SliceRequest


def decide_slowly(now: Situation) -> Decision:
    """Decide as ``queue.decide`` does."""
    decision = _Slow(now)
    decision.grant()
    decision.reserve()
    return Decision(tuple(decision.grants), decision.reservations)


def order_slowly(now: Situation) -> list[Waiter]:
    """Return the order of turn as ``queue.order`` does."""
    slow, ordered = _Slow(now), []
    for waiter in slow.turns(list(now.queue)):
        slow.charged.append(waiter)
        ordered.append(waiter)
    return ordered


class _Slow:
    def __init__(self, now: Situation) -> None:
        self.now, self.waiting, self.statuses = now, list(now.queue), list(now.statuses)
        self.grants: list[tuple[Waiter, tuple[Slice, ...]]] = []
        self.charged: list[Waiter] = []
        self.plan: Plan | None = None
        self.reserved: list[Waiter] = []
        self.plans = Plans(now, now.statuses, now.holdings)

    @property
    def reservations(self) -> dict[int, tuple[str, ...]]:
        return {} if self.plan is None else {w.number: self.plan.devices for w in self.reserved}

    # Whose turn it is.

    def milli(self, waiter: Waiter) -> int:
        devices = (status.device for status in self.now.statuses)
        part = next(placement.candidates(waiter.request, devices, self.now.rules), None)
        return part.milli * waiter.request.count if part else 1

    def had(
        self, used: float, half_life: float, ahead: float, course: str, users: Sequence[str] = ()
    ) -> float:
        """Add to what was used what is held: as it has been so far, and for a part of the memory more."""
        memory = half_life / math.log(2)
        for each in self.now.holdings:
            if each.course == course and (not users or each.user in users):
                held = min(each.since, self.now.now) - self.now.now
                used = used + each.milli * memory * (1.0 - math.exp(held / memory))
                used = used + each.milli * (ahead * half_life / math.log(2))
        for waiter in self.charged:
            if waiter.course == course and (not users or waiter.user in users):
                used = used + self.milli(waiter) * (ahead * half_life / math.log(2))
        return used

    def held(self, course: str) -> int:
        return sum(each.milli for each in self.now.holdings if each.course == course) + sum(
            self.milli(waiter) for waiter in self.charged if waiter.course == course
        )

    def part(self, course: str) -> float:
        others = [each for each in self.now.queue if not each.batch] or self.now.queue
        active = {each.course for each in (*others, *self.now.holdings)}
        weights = sum(self.now.policy.weight(each) for each in active) or 1.0
        return self.now.policy.weight(course) / weights * sum(status.milli for status in self.now.statuses)

    def course_key(self, course: str) -> float:
        half_life, part = self.now.policy.course_half_life, self.part(course)
        if part <= 0:
            return math.inf
        had = self.had(self.now.usage.courses.get(course, 0.0), half_life, 0.1, course)
        had /= part * (1.1 * half_life / math.log(2))
        return had if max(had, self.held(course) / part) > 0.5 else 0.0

    def user_key(self, waiter: Waiter) -> tuple[float, float, int]:
        key = waiter.course, waiter.user
        had = self.now.usage.users.get(key, 0.0) + self.had(
            0.0, self.now.policy.user_half_life, 1.0, waiter.course, [waiter.user]
        )
        return had / self.milli(waiter) + waiter.since, waiter.since, waiter.number

    def turns(self, waiters: list[Waiter]) -> Iterator[Waiter]:
        for rank in sorted({waiter.rank for waiter in waiters}):
            line = sorted((w for w in waiters if w.rank == rank), key=lambda w: (w.since, w.number))
            courses = list(dict.fromkeys(waiter.course for waiter in line))
            while line:
                nexts = {}
                for course in {waiter.course for waiter in line}:
                    firsts = {w.user: w for w in reversed(line) if w.course == course}
                    nexts[course] = min(firsts.values(), key=self.user_key)
                course = min(nexts, key=lambda c: (self.course_key(c), nexts[c].since, courses.index(c)))
                line.remove(nexts[course])
                yield nexts[course]

    # Who is granted what.

    def first_of(self, waiters: list[Waiter]) -> list[Waiter]:
        """Leave out batch work while anybody else waits."""
        is_any = any(not waiter.batch for waiter in self.waiting)
        return [waiter for waiter in waiters if not (is_any and waiter.batch)]

    def grant(self) -> None:
        earlier = self.first_of([waiter for waiter in self.waiting if waiter.reserved])
        first = next(self.turns(earlier), None)
        if first is not None and len(set(first.reserved)) == first.request.count:
            what = first.reserved, first.request, first.devices
            same = [waiter for waiter in earlier if (waiter.reserved, waiter.request, waiter.devices) == what]
            plan = self.plans.plan(first, first.reserved)
            fitting = [waiter for waiter in self.waiting if self.fits(waiter)]
            if plan is not None and self.plans.is_worth_it(
                plan, same, fitting, self.beside(first), is_kept=True
            ):
                self.plan, self.reserved = plan, same
        for waiter in self.turns(list(self.reserved)):
            kept = self.plan.devices if self.plan else ()
            if not self.try_on(waiter, [s for s in self.statuses if s.device.uuid in kept]):
                break
        while self.go_through():
            pass

    def go_through(self) -> bool:
        """Go through the queue until nothing fits that did; return whether a reservation became needless."""
        was_reserved = self.plan is not None
        fitting = [waiter for waiter in self.waiting if self.fits(waiter)]
        for waiter in self.turns(list(fitting)):
            if self.try_on(waiter, self.usable(waiter)):
                fitting = [each for each in [*fitting, waiter] if self.fits(each)]
                if not fitting:
                    break
        return was_reserved and self.plan is None

    def usable(self, waiter: Waiter) -> list[DeviceStatus]:
        mine = [s for s in self.statuses if not waiter.devices or s.device.uuid in waiter.devices]
        if self.plan is None or waiter in self.reserved:
            return mine
        kept = [s for s in mine if s.device.uuid in self.plan.devices]
        others = [s for s in mine if s not in kept]
        return others + kept if self.plans.ends_before(waiter, self.plan.start) else others

    def fits(self, waiter: Waiter) -> bool:
        return placement.place(waiter.request, self.usable(waiter), self.now.rules) is not None

    def try_on(self, waiter: Waiter, statuses: list[DeviceStatus]) -> bool:
        parts = placement.place(waiter.request, statuses, self.now.rules)
        if parts is None:
            return False
        self.statuses = placement.deduct(self.statuses, parts)
        self.waiting.remove(waiter)
        self.charged.append(waiter)
        self.grants.append((waiter, parts))
        self.reserved = [each for each in self.reserved if each is not waiter]
        self.plan = self.plan if self.reserved else None
        return True

    def reserve(self) -> None:
        now, after = self.now.now, self.now.policy.drain_after
        if self.plan is not None:
            first = self.reserved[0]
            if not self.plans.has_begun(first, self.plan):
                self.reserved = self.like(first)
            return
        held = [
            Holding(w.user, w.course, p, None if w.longest is None else now + w.longest, now, w.is_said)
            for w, p in self.grants
        ]
        plans = Plans(self.now, self.statuses, [*self.now.holdings, *held])
        tried = []
        late = [waiter for waiter in self.first_of(self.waiting) if now - waiter.since >= after]
        for waiter in self.turns([waiter for waiter in late if plans.is_hindered(waiter)]):
            what, part = (waiter.request, waiter.devices), self.part(waiter.course)
            mine = self.held(waiter.course)
            is_over = part < sum(s.milli for s in self.now.statuses) and 0 < mine > part - self.milli(waiter)
            if what not in tried and now - waiter.since >= after * (16 if is_over else 1):
                tried.append(what)
                plan = plans.plan(waiter)
                if plan is not None and plans.is_worth_it(
                    plan, self.like(waiter), self.waiting, self.beside(waiter)
                ):
                    self.plan, self.reserved = plan, self.like(waiter)
                    return

    def beside(self, first: Waiter) -> list[tuple[SliceRequest, int]]:
        mine = first.request, first.devices
        return [(w.request, 1) for w in self.waiting if (w.request, w.devices) != mine]

    def like(self, first: Waiter) -> list[Waiter]:
        what = first.request, first.devices, first.batch
        alike = [w for w in self.waiting if (w.request, w.devices, w.batch) == what]
        return [first] if first.request.count == 1 else alike
