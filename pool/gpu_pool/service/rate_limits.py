"""How much each user may ask of the service, and how soon again: so often a minute, and so much at once."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gpu_pool_client import OverQuota

#: Users who are remembered before those are forgotten who have been quiet.
_MOST_KNOWN: Final = 1000
#: Whoever waits is told to ask again after this part of the longest time, or later.
_SPREAD: Final = 0.6


def spread(seconds: float) -> float:
    """Return these seconds or fewer: a class that joins the queue together is not to come back together."""
    return seconds * random.uniform(_SPREAD, 1.0)  # noqa: S311 - nothing hangs on it


class RatePerMinute:
    """Lets each user do something so many times a minute, all at once if they like.

    Every ``{most}`` in the message is that number.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        message: str = "You have sent the pool {most} change requests within a minute, which is the limit.",
    ) -> None:
        self._most = per_minute
        self._clock = clock
        self._message = message
        #: How many times are left to a user, and as of when.
        self._left: dict[str, tuple[float, float]] = {}

    def count(self, user: str) -> None:
        """Count one time. Raises ``OverQuota`` for one too many."""
        self.check(user)
        if user not in self._left and len(self._left) >= _MOST_KNOWN:
            self._forget()
        self._left[user] = self._left_to(user) - 1, self._clock()

    def check(self, user: str) -> None:
        """Raise ``OverQuota`` where one more would be too many, and say how soon it would not."""
        left = self._left_to(user)
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / self._most)
            wait = "1 second" if seconds == 1 else f"{seconds} seconds"
            raise OverQuota(self._message.format(most=self._most), f"Try again in {wait}, and send fewer.")

    def take_back(self, user: str) -> None:
        """Count one time less, which turned out to be none."""
        if user in self._left:
            self._left[user] = min(float(self._most), self._left_to(user) + 1), self._clock()

    def _left_to(self, user: str) -> float:
        now = self._clock()
        left, at = self._left.get(user, (self._most, now))
        return min(float(self._most), left + (now - at) * self._most / 60)

    def _forget(self) -> None:
        self._left = {user: known for user, known in self._left.items() if self._left_to(user) < self._most}


class ConcurrencyLimit:
    """Lets each user have so many of something at once. Every ``{most}`` in the message is that number."""

    def __init__(self, most: int, message: str, remedy: str) -> None:
        self._most = most
        self._message = message
        self._remedy = remedy
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, user: str) -> Iterator[None]:
        """Count one for as long as it lasts. Raises ``OverQuota`` for one too many."""
        if self._open[user] >= self._most:
            raise OverQuota(self._message.format(most=self._most), self._remedy)
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            self._open += Counter()  # forgets those who have none
