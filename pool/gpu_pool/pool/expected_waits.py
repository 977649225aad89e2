"""Expected waits of all who wait in the queue, worked out beside everything else, and seldom."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from gpu_pool.policy.forecast import expected_wait, expected_waits
from gpu_pool.policy.queue_state import Situation
from gpu_pool.worker import Worker

T = TypeVar("T")
# A forecast for a queue of two hundred takes seconds of computing, and everybody asks for it: so it is kept
#: for so many times as long as it took,
_TIMES: Final = 100.0
#: but so many seconds at most.
_LONGEST: Final = 300.0
#: Whoever asks waits no longer than this for what is being worked out.
_PATIENCE: Final = 0.5
#: So many may ask at once what they alone are to be told; the others are told nothing, as if it took long.
_MOST_ASKING: Final = 8


class ExpectedWaits:
    """For about how long everybody in the queue may have to wait. May be used from several event loops."""

    def __init__(
        self,
        *,
        times: float = _TIMES,
        longest: float = _LONGEST,
        patience: float = _PATIENCE,
        most_asking: int = _MOST_ASKING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times, self.longest, self.patience = times, longest, patience
        self._clock = clock
        self._known: Mapping[int, tuple[float, float]] = {}
        self._as_of = self._due_at = -math.inf
        self._worker: Worker | None = None
        self._learning = threading.Lock()
        self._asking = threading.Semaphore(most_asking)

    @property
    def are_due(self) -> bool:
        """Whether the prospects are to be read, and told to :meth:`learn`."""
        return self._clock() >= self._due_at and not self._learning.locked()

    async def learn(self, prospects: Situation) -> None:
        """Work out anew what is known; return when that is done, or when it takes long."""
        if self._learning.acquire(blocking=False):
            await self._run(self._learning, lambda: self._work_out(prospects))

    def of(self, number: int | None) -> tuple[float, float] | None:
        """Return (likely soonest, likely latest) in seconds from now for a waiter; None if not known."""
        age = self._clock() - self._as_of
        if number is None or number not in self._known or age > self.longest:
            return None
        soonest, latest = self._known[number]
        return max(0.0, soonest - age), max(0.0, latest - age)

    async def foresee(self, number: int, prospects: Situation) -> tuple[float, float] | None:
        """Return the same for somebody who is only in these prospects; None also if that takes long."""
        if not self._asking.acquire(blocking=False):
            return None
        return await self._run(self._asking, lambda: expected_wait(number, prospects))

    async def _run(self, place: threading.Lock | threading.Semaphore, job: Callable[[], T]) -> T | None:
        """Do a job, and give its place back when it is done, whoever still waits for it."""

        def do() -> T:
            try:
                return job()
            finally:
                place.release()

        if self._worker is None:
            self._worker = Worker("gpu-pool-waits")
        try:
            return await self._worker.run(do, self.patience)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End the thread that works things out, once it has."""
        if self._worker is not None:
            self._worker.stop()

    def _work_out(self, prospects: Situation) -> None:
        as_of, began = self._clock(), time.thread_time()
        if as_of < self._due_at:
            return
        self._known = expected_waits(prospects)
        self._as_of = as_of
        self._due_at = as_of + min(self.longest, self.times * (time.thread_time() - began))
