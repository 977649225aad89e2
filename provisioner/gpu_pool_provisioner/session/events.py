"""What happens to a session, by who tells it."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_pool_client import Activity, GpuPoolError, Lease, Outlook, SliceRequest
from gpu_pool_provisioner.session.effects import Work
from gpu_pool_provisioner.session.expiry_policy import ExpiryStep


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened."""


# -- Jupyter: whoever manages the kernel --------------------------------------


@dataclass(frozen=True, slots=True)
class StartRequested(Event):
    """The kernel is to be started, or started again: its slice is asked for."""

    #: In how many seconds it must be held; None where it may wait in the queue.
    within: float | None = None


@dataclass(frozen=True, slots=True)
class OnDisk:
    """How a kernel sleeps."""

    #: By the session's clock.
    since: float
    image_mib: int


@dataclass(frozen=True, slots=True)
class LeftFound(Event):
    """Another server has left the notebook's kernel on disk, or did and it is there no more."""

    #: What its user reads first, in sentences; empty for nothing.
    message: str
    #: Since when it is there, and how large it is, in words; empty where it is there no more.
    left: str = ""
    on_disk: OnDisk | None = None


@dataclass(frozen=True, slots=True)
class LaunchPrepared(Event):
    """It is said how the kernel is launched, once its slice is held; until then it is answered for."""

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


@dataclass(frozen=True, slots=True)
class PoolAway(Event):
    """The pool has not done what it was asked for: it does not answer, was asked too much, or has failed.

    What comes of a kernel is not decided by that, whichever error it is.
    """

    error: GpuPoolError
    work: Work


@dataclass(frozen=True, slots=True)
class Positioned(Event):
    """The lease is seen in the queue, or it is not known where it is."""

    position: int | None
    error: GpuPoolError | None = None


@dataclass(frozen=True, slots=True)
class LeftQueue(Event):
    """The lease is no longer in the queue: it is held, or gone."""


@dataclass(frozen=True, slots=True)
class Explained(Event):
    """The pool has said why the lease waits, or could not."""

    outlook: Outlook | None = None
    #: What its user may do about it, in a sentence or not at all.
    hint: str = ""
    error: GpuPoolError | None = None


@dataclass(frozen=True, slots=True)
class LeaseSeen(Event):
    """Somebody has seen the lease, or what the kernel's process does with its devices."""

    lease: Lease | None = None
    activity: Activity | None = None


@dataclass(frozen=True, slots=True)
class SizeChanged(Event):
    """The kernel has another size, or asks for it next."""

    request: SliceRequest
    #: The lease, where it has one.
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class SizePending(Event):
    """The size is to change at the next restart, or is not any more."""

    request: SliceRequest | None
    #: Seconds for which it is kept for that; None where others may have it meanwhile.
    kept_for: float | None = None
    #: Why it came to nothing.
    notice: str = ""


# -- The kernel ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToDisk:
    """How a kernel goes to disk that was launched so that it can."""

    #: For how many seconds it is idle before it does; None for only where it is asked to.
    after: float | None = None
    #: Whether that is what its lease's terms say, which may be others when its slice is back.
    is_by_terms: bool = False
    #: Whether the next server finds it there.
    outlives_server: bool = False


@dataclass(frozen=True, slots=True)
class Launched(Event):
    """It has a process, or its pod was ordered."""

    #: None where it stays awake.
    to_disk: ToDisk | None = None
    #: What its user is told of that, in sentences; empty for nothing.
    message: str = ""


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """It has answered, and its lease is attached to it."""

    lease: Lease
    #: By how many seconds the session's clock is ahead of Unix time, in which the ends of the lease are.
    ahead: float = 0.0


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
class Observed(Event):
    """The pool and the kernel were looked at, to see whether it keeps its slice."""

    lease: Lease
    #: Whether the kernel works on what was submitted, and when it last began or ended that.
    busy: bool
    last_activity: float
    #: What it does with its device; None where that decides nothing.
    activity: Activity | None = None
    #: By how many seconds the session's clock is ahead of Unix time, in which the ends of the lease are.
    ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class Worked(Event):
    """It works again, after it gave way to others."""


@dataclass(frozen=True, slots=True)
class LeaseNews(Event):
    """The lease of a kernel that gives way, or has no slice, has changed, as it was seen just before this."""


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
class NotNeeded(Event):
    """It was not parked, since nobody waits for its slice any more."""


@dataclass(frozen=True, slots=True)
class NotParked(Event):
    """The pool has said that it never parks it."""


@dataclass(frozen=True, slots=True)
class ParkedAgain(Event):
    """It waits for its slice no longer."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """Its slice is held again."""

    lease: Lease
    #: Whether it has looked for a GPU meanwhile, and found none.
    is_poisoned: bool = False
    #: By how many seconds the session's clock is ahead of Unix time, in which the ends of the lease are.
    ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class SleepRequested(Event):
    """The kernel is to go to disk if it is idle, whoever waits: its server ends."""


@dataclass(frozen=True, slots=True)
class Hibernated(Event):
    """It is whole on disk, and its process has ended."""

    #: MiB of its image.
    image_mib: int


@dataclass(frozen=True, slots=True)
class NotHibernated(Event):
    """It stays awake, as it was."""

    #: Why, in a sentence that goes on; empty where that is to be tried again.
    why: str = ""


@dataclass(frozen=True, slots=True)
class Woken(Event):
    """It runs again, with all that it had."""


@dataclass(frozen=True, slots=True)
class NotWoken(Event):
    """It could not be woken, and is on disk as before."""

    #: Why, and what can be done, in sentences.
    why: str


@dataclass(frozen=True, slots=True)
class SizeChange:
    """What came of asking for another size."""

    granted: bool
    #: Whether it changes when the kernel is restarted.
    at_restart: bool
    #: What its user reads.
    message: str
    #: Why there is none, where whoever has asked is to hear that as an error.
    error: GpuPoolError | None = None


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """Its size has changed, or not."""

    change: SizeChange


# -- Frontends, the clock, and mistakes of ours -------------------------------


@dataclass(frozen=True, slots=True)
class ExplanationWanted(Event):
    """Somebody wants to know why the kernel waits, also before a cell does."""


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


@dataclass(frozen=True, slots=True)
class ResumeRequested(Event):
    """Its user asks for the slice again."""


@dataclass(frozen=True, slots=True)
class ResizeRequested(Event):
    """The kernel is to have another size, at once."""

    request: SliceRequest


@dataclass(frozen=True, slots=True)
class TimePassed(Event):
    """A deadline of the session may have passed."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An effect has failed in a way that nobody has thought of."""

    error: BaseException
