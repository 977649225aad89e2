"""What happens to a session, by who tells it."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_pool_client import GpuPoolError, Lease
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


# -- Frontends, the clock, and mistakes of ours -------------------------------


@dataclass(frozen=True, slots=True)
class CodeSubmitted(Event):
    """Code was submitted, and is held."""


@dataclass(frozen=True, slots=True)
class TimePassed(Event):
    """A deadline of the session may have passed."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An effect has failed in a way that nobody has thought of."""

    error: BaseException
