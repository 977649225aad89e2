"""When a kernel worked on what was submitted: pieces of work to be told to its pool, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Pieces that are kept until they are told; of more the oldest are left out.
_MOST: Final = 1_000
#: Seconds between two times that they are told.
EVERY: Final = 60.0


class BusyTimes:
    """Pieces of work, each as Unix seconds of its begin and its length in seconds."""

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._clock = wall, clock
        #: When the piece began that is under way, by both clocks.
        self._begun: tuple[float, float] | None = None
        self._spans: list[tuple[float, float]] = []
        self._told_at = clock()

    def see(self, *, busy: bool) -> None:
        """Note whether the kernel works now."""
        if busy and self._begun is None:
            self._begun = self._wall(), self._clock()
        elif not busy and self._begun is not None:
            began, by_clock = self._begun
            self._begun = None
            self._spans.append((began, self._clock() - by_clock))
            del self._spans[:-_MOST]

    def due(self) -> tuple[tuple[float, float], ...]:
        """Return what is to be told now, once; nothing if that was done lately."""
        now = self._clock()
        if not self._spans or now - self._told_at < EVERY:
            return ()
        told, self._spans, self._told_at = tuple(self._spans), [], now
        return told
