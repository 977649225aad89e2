"""Where a kernel is in its life, and what is known of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import EndReason
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.slice_state import SliceEnd


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


#: Seconds by which the pool's deadline is later than ours, which ends the kernel before its lease;
#: also what a relaunch may take.
MARGIN: Final = 5.0


class ImpossibleEventError(Exception):
    """The event cannot happen in this state; the text names both."""


@dataclass(frozen=True, slots=True)
class Session:
    """One kernel's life so far. Times are seconds of one clock, any clock."""

    #: The slice that it has, or asks for: ``2%``.
    size: str
    #: Seconds for which its death is forgiven, so that it can be launched again on its slice.
    grace: float
    state: State = State.DOWN
    #: Whether it was ever started.
    is_begun: bool = False
    #: Whether it runs in a pod, as far as its lease is known.
    in_pod: bool = False
    #: Whether, since the last start, the slice was granted, the kernel had a process, and it has answered.
    is_granted: bool = False
    is_launched: bool = False
    has_run: bool = False
    #: Whether it was stopped while it started: then it is not launched once more.
    is_stopped: bool = False
    #: Why the last start came to nothing.
    error: Exception | None = None
    #: Why it has no slice, until it has one again, however many cells have been told.
    end: SliceEnd | None = None
    #: Why a cell did not run since the kernel was ended, until somebody has read it.
    untold: str = ""
    #: How the previous kernel ended, where nobody here ended it.
    exit_message: str = ""
    #: Where it goes once it has ended, and how its lease ends then; None where that goes on.
    then: State = State.DOWN
    ends_as: EndReason | None = None
    #: When the queue is given up; None for never.
    gives_up_at: float | None = None
    #: When it is closed unless somebody comes for it; None for never.
    closes_at: float | None = None
    #: Seconds for which the end of the kernel is that of a restart, until its start.
    restarted_within: float = 0.0
    #: How long the kernel keeps its slice; None where it has none.
    idling: idle.Idling | None = None
    #: How it is parked, or about to be; None while it has its slice.
    parking: idle.Parking | None = None

    @property
    def wakes_at(self) -> float | None:
        """When ``TimePassed`` is due; None for never."""
        due = [self.closes_at]
        if self.state is State.QUEUED:
            due.append(self.gives_up_at)
        if self.state in LOOKED_AT and self.idling is not None:
            due.append(self.idling.look_at)
        return min((each for each in due if each is not None), default=None)

    @property
    def stands_in(self) -> bool:
        """Whether the proxy is all there is of the kernel: it lives, and has no process."""
        in_its_place = self.state.is_before_kernel or self.state is State.ENDING
        return in_its_place or (self.in_pod and self.state.has_kernel)

    @property
    def is_over(self) -> bool:
        """Whether a start has come to its end, without a kernel or with one that has ended."""
        return self.state in (State.WITHOUT_SLICE, State.DOWN, State.RESTARTING, State.ENDED)


#: Where it is seen how long the kernel keeps its slice.
LOOKED_AT: Final = (State.RUNNING, State.ASKED_BACK)

Outcome = tuple[Session, Sequence[do.Effect]]
