"""What can be said to somebody who waits."""

from __future__ import annotations

from dataclasses import dataclass


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
        soonest, latest = (round(seconds / 60) for seconds in self.wait)
        if latest < 1:
            return "less than a minute"
        if soonest < 1:
            return f"at most about {latest} min"
        return f"about {latest} min" if soonest == latest else f"about {soonest} to {latest} min"

    def __str__(self) -> str:
        place = "You are next in line" if self.place == 1 else f"You are number {self.place} in line"
        return f"{', '.join(filter(None, (place, self.expected)))}. {self.why}".strip()
