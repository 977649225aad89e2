"""Where a kernel is in its life."""

from __future__ import annotations

import enum


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
