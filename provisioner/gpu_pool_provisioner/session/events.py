"""What happens to a session, by who tells it."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_pool_client import Activity, GpuPoolError, Lease
from gpu_pool_provisioner.session.expiry_policy import ExpiryStep


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened."""


# -- Jupyter: whoever manages the kernel --------------------------------------


@dataclass(frozen=True, slots=True)
class StartRequested(Event):
    """The kernel is to be started, or started again."""

    #: Its lease, where it is known; without one it is asked for.
    lease: Lease | None
    #: When the start gives up the queue; None for never.
    gives_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class InterruptRequested(Event):
    """Whatever goes on is to be interrupted."""


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The kernel is to end, as a signal ends a process."""


@dataclass(frozen=True, slots=True)
class RestartBegan(Event):
    """The kernel's process has ended, and its manager prepares the next start."""


@dataclass(frozen=True, slots=True)
class RestartExpected(Event):
    """That is prepared; the start must come within so many seconds."""

    within: float


@dataclass(frozen=True, slots=True)
class ManagerExpected(Event):
    """Whoever starts the kernel must say within so many seconds that they manage it."""

    within: float


@dataclass(frozen=True, slots=True)
class ManagerCame(Event):
    """They do."""


@dataclass(frozen=True, slots=True)
class CloseRequested(Event):
    """It is over for good."""


# -- The pool -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """The lease is in the queue."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Granted(Event):
    """The lease is held."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """There is no slice."""

    error: GpuPoolError


# -- The kernel ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched(Event):
    """It has a process, or its pod was ordered."""


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """It has answered, and its lease is attached to it."""

    #: With the end of its terms by the session's clock.
    lease: Lease


@dataclass(frozen=True, slots=True)
class NotReady(Event):
    """It could not be launched, or has ended before it answered. It may be started again on its slice."""

    error: Exception


@dataclass(frozen=True, slots=True)
class NotStarted(Event):
    """Nothing has come of its launch, and its slice is to go back."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Died(Event):
    """It has ended by itself."""

    #: What is known of that, in a sentence.
    message: str = ""


@dataclass(frozen=True, slots=True)
class TermsOver(Event):
    """By the terms of its lease it must end."""

    why: ExpiryStep


@dataclass(frozen=True, slots=True)
class Gone(Event):
    """What was to be ended has ended."""


@dataclass(frozen=True, slots=True)
class Looked(Event):
    """The pool and the kernel were looked at, to see whether it keeps its slice."""

    #: With the end of its terms by the session's clock.
    lease: Lease
    #: Whether the kernel works on what was submitted, and when it last began or ended that.
    busy: bool
    last_activity: float
    #: What it does with its device; None where that decides nothing.
    activity: Activity | None = None


@dataclass(frozen=True, slots=True)
class NotLooked(Event):
    """The pool did not answer."""


@dataclass(frozen=True, slots=True)
class FoundIdle(Event):
    """The kernel has done all that it was given."""


@dataclass(frozen=True, slots=True)
class FoundAtWork(Event):
    """It has not, or does not answer."""

    #: Whether it works on nothing that is known.
    is_silent: bool


@dataclass(frozen=True, slots=True)
class Parked(Event):
    """Its slice is lent to others."""

    lease: Lease
    #: Whether its state on the device was moved away.
    is_moved: bool


@dataclass(frozen=True, slots=True)
class NotParked(Event):
    """The pool has not parked it."""

    #: Whether it said that it never will.
    is_refused: bool
    #: Whether it did not answer, so that the slice may have gone, or go later.
    is_unanswered: bool


@dataclass(frozen=True, slots=True)
class ParkedAgain(Event):
    """It waits for its slice no longer."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """Its slice is held again."""

    #: With the end of its terms by the session's clock.
    lease: Lease
    #: Whether it has looked for a GPU meanwhile, and found none.
    is_poisoned: bool = False


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """Its size has changed, or not."""


# -- Frontends, the clock, and mistakes of ours -------------------------------


@dataclass(frozen=True, slots=True)
class WorkSubmitted(Event):
    """Code was submitted, or anything else to work on, and is held."""


@dataclass(frozen=True, slots=True)
class KeepRequested(Event):
    """Its user says that it is in use, for so many seconds."""

    seconds: int


@dataclass(frozen=True, slots=True)
class GiveBackRequested(Event):
    """Its user lets the slice go as soon as the kernel is idle."""

    #: What the kernel does with its device, by which its user was told what that costs.
    activity: Activity


@dataclass(frozen=True, slots=True)
class ResumeRequested(Event):
    """Its user asks for the slice again."""


@dataclass(frozen=True, slots=True)
class ResizeRequested(Event):
    """The running kernel is to have another size."""


@dataclass(frozen=True, slots=True)
class TimePassed(Event):
    """A deadline of the session may have passed."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An effect has failed in a way that nobody has thought of."""

    error: BaseException
