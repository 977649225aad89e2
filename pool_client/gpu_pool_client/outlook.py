"""What can be said to somebody who waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MINUTE: Final = 60
_HOUR: Final = 3_600
#: Seconds from which a wait is told in hours.
_LONG: Final = 3 * _HOUR


@dataclass(frozen=True, slots=True)
class Outlook:
    """Why a lease waits and how long it may still take. Names no other user."""

    #: Position in the queue, 1 for the next.
    position: int
    #: One or two sentences: what is needed, what is free, who is before it.
    why: str
    #: Seconds, (likely soonest, likely latest): a guess from what others did before, and no promise.
    #: None when nothing is known, as of a lease that has outlasted all that are known.
    wait: tuple[float, float] | None = None

    @property
    def expected(self) -> str:
        """The range of waits, ``perhaps about 4 to 9 min``; empty when nothing is known."""
        if self.wait is None:
            return ""
        soonest, latest = self.wait
        if latest < _MINUTE / 2:
            return "perhaps less than a minute"
        unit, seconds = ("min", _MINUTE) if latest < _LONG else ("h", _HOUR)
        last = round(latest / seconds)
        if unit == "h" and soonest < _HOUR:
            return f"perhaps about {round(soonest / _MINUTE)} min to {last} h"
        first = round(soonest / seconds)
        return f"perhaps about {last} {unit}" if first == last else f"perhaps about {first} to {last} {unit}"

    def __str__(self) -> str:
        place = (
            "You are next in the queue"
            if self.position == 1
            else f"You are number {self.position} in the queue"
        )
        return f"{', '.join(filter(None, (place, self.expected)))}. {self.why}".strip()
