"""Where a kernel is in its life."""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """One state of a session."""

    DOWN = "down"
    """There is no kernel; it may be launched, for the first time or again, behind the same ports."""
    ASKING = "asking"
    """The pool was asked for the slice, and has not answered."""
    QUEUED = "queued"
    """Its lease is in the queue."""
    STARTING = "starting"
    """The slice is held; the kernel is launched, and has not answered."""
    RUNNING = "running"
    """Everything is relayed to the kernel."""
    ASKED_BACK = "asked_back"
    """As running, and the slice is to go as soon as the kernel is idle."""
    RESIZING = "resizing"
    """The running kernel gets another size; what is submitted is held meanwhile."""
    PARKING = "parking"
    """What is submitted is held; if the kernel turns out to be idle it is parked, or ended."""
    PARKED = "parked"
    """The slice is lent to others; the kernel keeps its variables, and what is submitted is held."""
    RESUMING = "resuming"
    """It is parked, and its slice is asked for again."""
    RESTARTING = "restarting"
    """Its process has ended, and its manager is about to start it again; it keeps its slice."""
    WITHOUT_SLICE = "without_slice"
    """It gave up, was refused, or has lost its slice; nothing is asked for until code is submitted."""
    ENDING = "ending"
    """The kernel is being ended."""
    ENDED = "ended"
    """Its ports are closed."""

    @property
    def is_before_kernel(self) -> bool:
        """Whether the kernel is still to come, and has not answered."""
        return self in (State.ASKING, State.QUEUED, State.STARTING, State.WITHOUT_SLICE)

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel that has answered."""
        return self in _WITH_KERNEL


_WITH_KERNEL: Final = frozenset(
    (State.RUNNING, State.ASKED_BACK, State.RESIZING, State.PARKING, State.PARKED, State.RESUMING)
)
