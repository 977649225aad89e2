"""The order of turn: between courses, between their users, and by arrival."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Holding, Situation, Waiter
from gpu_pool_client import SliceRequest

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


class FairShares:
    """What every course and user has had and has: held slices, and what is left of earlier use."""

    def __init__(self, situation: Situation) -> None:
        queue, holdings, statuses = situation.queue, situation.holdings, situation.statuses
        rules, policy, usage, now = situation.rules, situation.policy, situation.usage, situation.now
        self._devices = [status.device for status in statuses]
        self._rules, self._policy = rules, policy
        self._course_memory = (1 + _COURSE_AHEAD) * policy.course_half_life / math.log(2)
        self._course_ahead = _COURSE_AHEAD * policy.course_half_life / math.log(2)
        self._user_ahead = _USER_AHEAD * policy.user_half_life / math.log(2)
        self._courses, self._used = dict(usage.courses), usage.users
        #: What users hold, as it counts beside what they used.
        self._users: dict[tuple[str, str], float] = {}
        self._held: dict[str, int] = {}
        self._capacity = sum(status.milli for status in statuses)
        active = (
            situation.courses | {waiter.course for waiter in queue} | {holding.course for holding in holdings}
        )
        self._weights = sum(policy.weight(course) for course in active) or 1.0
        #: By identity: the same few objects are asked for over and over, and hashing one takes long.
        self._sizes: dict[int, tuple[SliceRequest, int]] = {}
        self._add_held(holdings, now)

    def charge(self, waiter: Waiter) -> None:
        """Count the waiter's request as held from now on."""
        self._add(waiter.course, waiter.user, self._milli(waiter.request), 0.0, 0.0)

    def course_key(self, course: str) -> float:
        """Return what the course has had of its part of the pool: the least comes first.

        Courses that hold and have had less than half of their part are equal, at 0.
        """
        part = self._part(course)
        if part <= 0:
            return math.inf
        had = self._courses.get(course, 0.0) / (part * self._course_memory)
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
        had = self._used.get(key, 0.0) + self._users.get(key, 0.0)
        return had / self._milli(waiter.request) + waiter.since, waiter.since, waiter.number

    def goes_over(self, waiter: Waiter) -> bool:
        """Whether granting to the waiter takes its course over its part of the pool.

        That part is by weight among the courses that hold or wait. The only
        one of these takes nothing from others, and one that holds nothing is due something.
        """
        part, held = self._part(waiter.course), self._held.get(waiter.course, 0)
        return part < self._capacity and held > 0 and held + self._milli(waiter.request) > part

    def _add_held(self, holdings: Sequence[Holding], now: float) -> None:
        """Count what is held now, each by its :func:`faded_use` until now, in one go."""
        by_course = self._policy.course_half_life / math.log(2)
        by_user = self._policy.user_half_life / math.log(2)
        for holding in holdings:
            milli, held = holding.milli, min(holding.since, now) - now
            self._add(
                holding.course,
                holding.user,
                milli,
                milli * by_course * (1.0 - math.exp(held / by_course)),
                milli * by_user * (1.0 - math.exp(held / by_user)),
            )

    def _add(self, course: str, user: str, milli: int, by_course: float, by_user: float) -> None:
        key = course, user
        self._held[course] = self._held.get(course, 0) + milli
        self._courses[course] = self._courses.get(course, 0.0) + by_course + milli * self._course_ahead
        self._users[key] = self._users.get(key, 0.0) + by_user + milli * self._user_ahead

    def _milli(self, request: SliceRequest) -> int:
        """Return what a request takes of all its devices together (on the first that could hold it)."""
        known = self._sizes.get(id(request))
        if known is None:
            part = next(placement.candidates(request, self._devices, self._rules), None)
            known = self._sizes[id(request)] = request, part.milli * request.count if part else 1
        return known[1]


_ARRIVAL = attrgetter("since", "number")


def turns(queue: Iterable[Waiter], shares: FairShares) -> Iterator[Waiter]:
    """Yield the waiters in order of turn.

    Whoever takes one charges it to the tally before asking for the next, which
    then comes from whoever has had less.
    """
    by_rank: dict[tuple[bool, int], list[Waiter]] = {}
    for waiter in queue:
        by_rank.setdefault((waiter.batch, -waiter.priority), []).append(waiter)
    for rank in sorted(by_rank):
        yield from _fair_turns(sorted(by_rank[rank], key=_ARRIVAL), shares)


_Users = list[tuple[tuple[float, float, int], deque[Waiter]]]


def _fair_turns(arrivals: Sequence[Waiter], shares: FairShares) -> Iterator[Waiter]:
    """Yield waiters of one rank, given in order of arrival."""
    courses: list[tuple[float, float, int, _Users]] = []
    for course, users in _by_course(arrivals).items():
        entries = [(shares.user_key(waiters[0]), waiters) for waiters in users.values()]
        heapify(entries)
        # Courses that have had the same come by their first arrival.
        courses.append((shares.course_key(course), entries[0][1][0].since, len(courses), entries))
    heapify(courses)
    while courses:
        _, _, arrival, entries = heappop(courses)
        _, waiters = heappop(entries)
        waiter = waiters.popleft()
        yield waiter
        # Only this course and user can have changed meanwhile.
        if waiters:
            heappush(entries, (shares.user_key(waiters[0]), waiters))
        if entries:
            heappush(courses, (shares.course_key(waiter.course), entries[0][1][0].since, arrival, entries))


def _by_course(arrivals: Iterable[Waiter]) -> dict[str, dict[str, deque[Waiter]]]:
    courses: dict[str, dict[str, deque[Waiter]]] = {}
    for waiter in arrivals:
        courses.setdefault(waiter.course, {}).setdefault(waiter.user, deque()).append(waiter)
    return courses
