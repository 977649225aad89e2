"""The two clocks a pool reads: one for people, one for deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_WEEK: Final = 7 * 86_400
_FIRST_MONDAY: Final = 4 * 86_400


def _uptime() -> float:
    """Seconds of this boot, the same for every process, suspended time included where known."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the time comes from; tests bring their own."""

    #: Unix seconds, for history and for people. May jump.
    wall: Callable[[], float] = time.time
    #: Seconds of this boot, for deadlines: never jumps. Of a pool that outlives machines, as ``wall``.
    uptime: Callable[[], float] = _uptime

    def week_began(self) -> float:
        """Return the Unix time of last Monday's midnight, UTC: the same in every process."""
        now = self.wall()
        # The Unix epoch was a Thursday.
        return now - (now - _FIRST_MONDAY) % _WEEK
