"""What can be said to somebody who waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Seconds from which a wait is told in hours.
_LONG: Final = 3 * 3_600


@dataclass(frozen=True, slots=True)
class Outlook:
    """Why a lease waits and how long it may still take. Names no other user."""

    #: Place in line, 1 for the next.
    place: int
    #: One or two sentences: what is needed, what is free, who is before it.
    why: str
    #: Seconds, (likely soonest, likely latest), learnt from what others did before;
    #: None when nothing is known.
    wait: tuple[float, float] | None = None

    @property
    def expected(self) -> str:
        """The range of waits in a few words, ``about 4 to 9 min``; empty when nothing is known."""
        if self.wait is None:
            return ""
        unit, seconds = ("min", 60) if self.wait[1] < _LONG else ("h", 3_600)
        soonest, latest = (round(each / seconds) for each in self.wait)
        if latest < 1:
            return "less than a minute"
        if soonest < 1:
            return f"at most about {latest} {unit}"
        return f"about {latest} {unit}" if soonest == latest else f"about {soonest} to {latest} {unit}"

    def __str__(self) -> str:
        place = "You are next in line" if self.place == 1 else f"You are number {self.place} in line"
        return f"{', '.join(filter(None, (place, self.expected)))}. {self.why}".strip()
