"""The order of turn: between courses, between their users, and by arrival."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TypeAlias

from gpu_pool.policy.placement import Sizes
from gpu_pool.policy.queue_state import Holding, Situation, Waiter

#: A slice that is held counts like one that was used for this part of the memory
#: (half-life / ln 2) before: for courses little, so that their averages are exact
#: though slices are coarse; for users as much as it can ever come to, so that whoever
#: holds nothing comes before whoever holds as much as the other had used.
_COURSE_AHEAD = 0.1
_USER_AHEAD = 1.0
#: Courses below this fraction of their part of the pool are equal.
_FAR_BELOW = 0.5


def faded_use(milli: float, began: float, ended: float, now: float, half_life: float) -> float:
    """Return the use of ``milli`` from ``began`` to ``ended`` as it counts ``now``, in milli-seconds.

    A sum of such amounts fades as a whole: what it is at one time is half of it
    one half-life later, so a running total needs only its value and its time.
    """
    memory = half_life / math.log(2)
    return milli * memory * (math.exp((ended - now) / memory) - math.exp((began - now) / memory))


def courses_in_turn(waiting: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """Return the courses among which the pool is shared, of those who wait: (course, whether batch work).

    Batch work has a part only where nothing else waits: others are to get what they get without it.
    """
    courses = set(waiting)
    return frozenset(course for course, batch in courses if not batch) or frozenset(
        course for course, _ in courses
    )


class FairShares:
    """What every course and user has had and has: held slices, and what is left of earlier use."""

    def __init__(self, situation: Situation) -> None:
        queue, holdings, statuses = situation.queue, situation.holdings, situation.statuses
        policy, usage, now = situation.policy, situation.usage, situation.now
        self._policy = policy
        self._course_memory = (1 + _COURSE_AHEAD) * policy.course_half_life / math.log(2)
        self._course_ahead = _COURSE_AHEAD * policy.course_half_life / math.log(2)
        self._user_ahead = _USER_AHEAD * policy.user_half_life / math.log(2)
        self._usage, self._now = usage, now
        #: What is held of each course and user, in the order of the holdings: so are the sums of floats.
        of_courses: defaultdict[str, list[Holding]] = defaultdict(list)
        of_users: defaultdict[tuple[str, str], list[Holding]] = defaultdict(list)
        held: defaultdict[str, int] = defaultdict(int)
        #: What courses have had and hold, and what users hold, as it counts beside what they used: of those
        #: that were asked for. Most decisions ask for a few.
        self._courses: dict[str, float] = {}
        self._users: dict[tuple[str, str], float] = {}
        self._capacity = sum(status.milli for status in statuses)
        waiting = situation.courses or courses_in_turn((waiter.course, waiter.batch) for waiter in queue)
        active = waiting | {holding.course for holding in holdings}
        self._weights = sum(policy.weight(course) for course in active) or 1.0
        self._milli = Sizes([status.device for status in statuses], situation.rules).milli
        for holding in holdings:
            course = holding.course
            held[course] += holding.milli
            of_courses[course].append(holding)
            of_users[course, holding.user].append(holding)
        self._of_courses, self._of_users, self._held = of_courses, of_users, held

    def charge(self, waiter: Waiter) -> None:
        """Count the waiter's request as held from now on."""
        course, key, milli = waiter.course, (waiter.course, waiter.user), self._milli(waiter.request)
        by_course, by_user = self._course_had(course), self._user_holds(key)
        self._held[course] += milli
        self._courses[course] = by_course + milli * self._course_ahead
        self._users[key] = by_user + milli * self._user_ahead

    def course_key(self, course: str) -> float:
        """Return what the course has had of its part of the pool: the least comes first.

        Courses that hold and have had less than half of their part are equal, at 0.
        """
        part = self._part(course)
        if part <= 0:
            return math.inf
        had = self._course_had(course) / (part * self._course_memory)
        held = self._held.get(course, 0) / part
        return had if max(had, held) > _FAR_BELOW else 0.0

    def _part(self, course: str) -> float:
        """Return the course's part of the pool by weight, in thousandths of a device."""
        return self._policy.weight(course) / self._weights * self._capacity

    def user_key(self, waiter: Waiter) -> tuple[float, float, int]:
        """Return when the waiter's turn is: when it came, put off by what its user has had.

        By as long as the same amount would last at the size that is now asked for. So
        those who have had nothing come in order of arrival, and nobody is passed by for ever.
        """
        key = waiter.course, waiter.user
        had = self._usage.users.get(key, 0.0) + self._user_holds(key)
        return had / self._milli(waiter.request) + waiter.since, waiter.since, waiter.number

    def goes_over(self, waiter: Waiter) -> bool:
        """Whether granting to the waiter takes its course over its part of the pool.

        That part is by weight among the courses that hold or wait. The only
        one of these takes nothing from others, and one that holds nothing is due something.
        """
        part, held = self._part(waiter.course), self._held.get(waiter.course, 0)
        return part < self._capacity and held > 0 and held + self._milli(waiter.request) > part

    def _course_had(self, course: str) -> float:
        """Return what a course has used, and what it holds as that counts beside it."""
        if course not in self._courses:
            used, held = self._usage.courses.get(course, 0.0), self._of_courses.get(course, ())
            half_life = self._policy.course_half_life
            self._courses[course] = _with_held(held, self._now, half_life, self._course_ahead, used)
        return self._courses[course]

    def _user_holds(self, key: tuple[str, str]) -> float:
        """Return what a user of a course holds, as it counts beside what was used."""
        if key not in self._users:
            half_life, held = self._policy.user_half_life, self._of_users.get(key, ())
            self._users[key] = _with_held(held, self._now, half_life, self._user_ahead, 0.0)
        return self._users[key]


def _with_held(holdings: Iterable[Holding], now: float, half_life: float, ahead: float, used: float) -> float:
    """Add to ``used`` what is held: its :func:`faded_use` until now, and ``ahead`` seconds more."""
    memory = half_life / math.log(2)
    for holding in holdings:
        milli, held = holding.milli, min(holding.since, now) - now
        used = used + milli * memory * (1.0 - math.exp(held / memory)) + milli * ahead
    return used


_ARRIVAL, _SINCE, _NUMBER = attrgetter("since", "number"), attrgetter("since"), attrgetter("number")


def turns(queue: Iterable[Waiter], shares: FairShares) -> Iterator[Waiter]:
    """Yield the waiters in order of turn.

    Whoever takes one charges it to the tally before asking for the next, which
    then comes from whoever has had less.
    """
    users: defaultdict[tuple[bool, int, str, str], list[Waiter]] = defaultdict(list)
    for waiter in queue:
        users[waiter.batch, waiter.priority, waiter.course, waiter.user].append(waiter)
    by_rank: defaultdict[tuple[bool, int], list[list[Waiter]]] = defaultdict(list)
    for waiters in users.values():
        # Twice by one number is faster than once by a pair.
        waiters.sort(key=_NUMBER, reverse=True)
        waiters.sort(key=_SINCE, reverse=True)
        by_rank[waiters[-1].rank].append(waiters)
    for rank in sorted(by_rank):
        yield from _fair_turns(by_rank[rank], shares)


_Users: TypeAlias = list[tuple[tuple[float, float, int], list[Waiter]]]


def _fair_turns(users: list[list[Waiter]], shares: FairShares) -> Iterator[Waiter]:
    """Yield waiters of one rank, given by user, each user's last arrival first."""
    courses: list[tuple[float, float, int, _Users]] = []
    for course, of_course in _by_course(users).items():
        entries = [(shares.user_key(waiters[-1]), waiters) for waiters in of_course]
        heapify(entries)
        # Courses that have had the same come by their first arrival.
        courses.append((shares.course_key(course), entries[0][1][-1].since, len(courses), entries))
    heapify(courses)
    while courses:
        _, _, arrival, entries = heappop(courses)
        _, waiters = heappop(entries)
        waiter = waiters.pop()
        yield waiter
        # Only this course and user can have changed meanwhile.
        if waiters:
            heappush(entries, (shares.user_key(waiters[-1]), waiters))
        if entries:
            heappush(courses, (shares.course_key(waiter.course), entries[0][1][-1].since, arrival, entries))


def _by_course(users: list[list[Waiter]]) -> dict[str, list[list[Waiter]]]:
    """Return the users of each course, courses by their first arrival."""
    courses: defaultdict[str, list[list[Waiter]]] = defaultdict(list)
    for waiters in sorted(users, key=lambda waiters: _ARRIVAL(waiters[-1])):
        courses[waiters[-1].course].append(waiters)
    return courses
