"""How often a session looks at its kernel, and for how long it leaves it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """The times of a session that nobody sets; all in seconds."""

    #: Between two looks at a kernel that has a slice: never more, and never less.
    seldom: float = 30.0
    often: float = 0.2
    #: Until the next look at a kernel whose slice is gone while it works.
    soon: float = 0.5
    #: Between two looks at a lease that the pool watches over, or that may burst: its warnings are read that
    #: late.
    revocable_every: float = 2.0
    #: Without work after which a kernel is idle whose slice is asked back: the pause between two cells that
    #: run one after the other is shorter.
    pause: float = 3.0
    #: For which it counts as at work where nobody can say whether its GPU works.
    may_work: float = 60.0
    #: For which a kernel is left alone that could not be parked.
    park_again: float = 30.0
    #: In which a pool may still do what it was asked for and has not answered.
    parks_within: float = 600.0
    #: Until a pool is asked again that is away.
    ask_again: float = 2.0
    #: For which a start waits for the pool's answer: it can be neither seen nor cancelled in JupyterLab. From
    #: then on a proxy waits.
    answers_within: float = 5.0
    #: In which a pool hears of a restart. One that is slower may still keep the slice.
    attached_within: float = 15.0
    #: For which the death of a kernel is forgiven that nobody restarts by itself: enough for its manager,
    #: which looks ten times a second, to see it and restart it on request.
    brief_grace: float = 1.5


DEFAULT: Final = SessionTimes()
