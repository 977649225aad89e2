"""The two clocks a pool reads: one for people, one for deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

#: Seconds of this boot, the same for every process, suspended time included where known.
_uptime: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the time comes from; tests bring their own."""

    #: Unix seconds, for history and for people. May jump.
    wall: Callable[[], float] = time.time
    #: Seconds of this boot, for deadlines: never jumps. Of a pool that outlives machines, as ``wall``.
    uptime: Callable[[], float] = _uptime

    def wall_at(self, uptime: float) -> float:
        """Return the Unix time of a moment of this boot, as the wall's clock is set now."""
        return uptime + self.wall() - self.uptime()
