"""Where a kernel is in its life, and what is known of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import Activity, EndReason, Hibernation, Lease, LeaseState, Outlook, SliceRequest
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session.events import OnDisk, SizeChange, ToDisk
from gpu_pool_provisioner.session.times import DEFAULT, SessionTimes


class State(enum.Enum):
    """One state of a session."""

    DOWN = "down"
    """There is no kernel; it may be launched, for the first time or again, behind the same ports."""
    ASKING = "asking"
    """The pool was asked for the slice, and has not answered."""
    QUEUED = "queued"
    """Its lease is in the queue."""
    QUEUED_RESIZING = "queued_resizing"
    """As queued, and its lease gets another size."""
    HELD = "held"
    """The slice is held, and whoever starts the kernel prepares its launch."""
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
    HIBERNATING = "hibernating"
    """It is parked, and is being written to disk; what is submitted is held, and it is answered for."""
    HIBERNATED = "hibernated"
    """It is on disk, and has no process; what is submitted wakes it."""
    WAKING = "waking"
    """It comes back from disk; what is submitted is held."""
    RESTARTING = "restarting"
    """Its process has ended, and its manager is about to start it again; it keeps its slice."""
    WITHOUT_SLICE = "without_slice"
    """It gave up, was refused, or has lost its slice; nothing is asked for until code is submitted."""
    ENDING = "ending"
    """The kernel is being ended."""
    ENDED = "ended"
    """Its ports are closed."""

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel that has answered."""
        return self in _WITH_KERNEL

    @property
    def is_transient(self) -> bool:
        """Whether it passes by itself, and a kernel whose server ends can go to disk only after it."""
        return self in _TRANSIENT


#: Where the kernel is still to come, and has not answered.
_BEFORE_KERNEL: Final = frozenset(
    (
        *(State.ASKING, State.QUEUED, State.QUEUED_RESIZING, State.HELD),
        *(State.STARTING, State.WITHOUT_SLICE),
    )
)
_WITH_KERNEL: Final = frozenset(
    (
        *(State.RUNNING, State.ASKED_BACK, State.RESIZING, State.PARKING, State.PARKED, State.RESUMING),
        *(State.HIBERNATING, State.HIBERNATED, State.WAKING),
    )
)
_TRANSIENT: Final = (State.STARTING, State.RESIZING, State.PARKING, State.HIBERNATING, State.WAKING)
#: Where it has no process, or none that could be signalled.
_ASLEEP: Final = (State.HIBERNATING, State.HIBERNATED, State.WAKING)


#: Seconds by which the pool's deadline is later than ours, which ends the kernel before its lease;
#: also what a relaunch may take.
MARGIN: Final = 5.0
#: Seconds between two explanations of a wait, which cost a few milliseconds each: for the first in the queue,
#: for those further back (their position over two), and for those whose position has not changed.
SOON: Final = 3.0
_SELDOM: Final = 60.0
_FEW: Final = 3


class ImpossibleEventError(Exception):
    """The event cannot happen in this state; the text names both."""


@dataclass(frozen=True, slots=True)
class SliceEnd:
    """Why a kernel has no slice any more, or was given none."""

    #: The value of an ``EndReason``; None where its user gave up, or the pool refused.
    reason: str | None
    #: In sentences.
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    """How a lease waits in the queue."""

    lease_id: str
    #: Its position when it was last seen, 1 for the next; None before the first look.
    position: int | None = None
    #: Why it waits, as the pool said last; None where it has not said, or does not answer.
    outlook: Outlook | None = None
    #: The position that was explained last, and when; None where none was, or while that is done.
    explained: int | None = None
    explained_at: float = -math.inf
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """What a pool could not do, and is asked again."""

    work: do.Work
    at: float


@dataclass(frozen=True, slots=True)
class FailedWake:
    """Why a kernel could not be woken from disk, in sentences, and when, by the session's clock."""

    why: str
    at: float


@dataclass(frozen=True, slots=True)
class Session:
    """One kernel's life so far. Times are seconds of one clock, any clock."""

    #: The slice that it has, or asks for.
    request: SliceRequest
    #: Seconds for which its death is forgiven, so that it can be launched again on its slice.
    grace: float
    #: Seconds for which a start waits for a pool that is away.
    outage_timeout: float = 0.0
    state: State = State.DOWN
    times: SessionTimes = DEFAULT

    # -- The lease
    #: The lease that it keeps over restarts, also once it has ended: a kernel that has lost its slice must
    #: not be given another by a restart that nobody asked for.
    lease_id: str | None = None
    #: As it was last seen, by whomever, and when.
    lease: Lease | None = None
    seen_at: float = 0.0
    #: What the kernel's process was last seen to do with its devices.
    activity: Activity | None = None
    #: How many leases it has asked for: each request has a name, so that it is not made twice.
    asked: int = 1
    #: In how many seconds a start must have its slice; None where it waits in the queue.
    within: float | None = None
    #: When the pool was asked, by an answer that has not come, and what it said last.
    asked_at: float = 0.0
    away: str = ""
    #: When whoever waits is told next that the pool does not answer.
    tells_at: float | None = None
    retry: Retry | None = None
    wait: Wait | None = None
    #: Whether the slice that it has, or asks for, was not there at once.
    has_waited: bool = False
    #: Whether somebody has looked at it, or run a cell: then it is explained why it waits.
    is_explained: bool = False
    #: The size to which it changes at its next restart, and until when that is kept for it.
    pending: SliceRequest | None = None
    pending_until: float | None = None
    #: Why the last change of size came to nothing, for whoever uses the kernel that is launched next.
    notice: str = ""
    #: How many changes of size have come to an end, and what has come of the last one.
    changes: int = 0
    change: SizeChange | None = None

    # -- The kernel
    #: Whether it was ever started, and whether it is said how the kernel of the last start is launched.
    is_begun: bool = False
    is_prepared: bool = False
    #: Whether it runs in a pod, as far as its lease is known.
    in_pod: bool = False
    #: Whether, since the last start, the slice was granted, the kernel had a process, and it has answered.
    is_granted: bool = False
    is_launched: bool = False
    has_run: bool = False
    #: How the kernel that was launched last goes to disk, once it has been parked; None where it stays awake.
    to_disk: ToDisk | None = None
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
    #: When it goes to disk if it is still parked then; None for never.
    hibernates_at: float | None = None
    #: How it sleeps, or did when it slept last.
    on_disk: OnDisk | None = None
    #: What its user reads of the kernel that another server has left on disk, and that this one goes on
    #: with; empty where it begins anew, and once it runs.
    left: str = ""
    #: How it could not be woken when that was tried last, for who asked for it without a cell; None where it
    #: was not tried, or goes on.
    failed_wake: FailedWake | None = None

    @property
    def size(self) -> str:
        """The slice that it has, or asks for: ``2%``."""
        return self.request.size

    @property
    def is_held(self) -> bool:
        """Whether the lease was held when it was last seen."""
        return self.lease is not None and self.lease.state is LeaseState.HELD

    @property
    def is_to_hibernate(self) -> bool:
        """Whether it is to go to disk as soon as it is idle, and to stay there: its device is drained so."""
        return self.to_disk is not None and self.lease is not None and self.lease.hibernates

    def hibernation(
        self, why_awake: str = "", *, image_mib: int | None = None, is_for_now: bool = False
    ) -> do.ReportHibernation:
        """Return what the pool is told of its way to disk; ``why_awake`` and ``image_mib`` as there."""
        outlives_server = self.to_disk is not None and self.to_disk.outlives_server
        said = Hibernation(image_mib, why_awake, is_for_now, outlives_server)
        return do.ReportHibernation(said)

    @property
    def wakes_at(self) -> float | None:
        """When ``TimePassed`` is due; None for never."""
        due = [self.closes_at, self.tells_at, self.pending_until, self.explains_at]
        if self.retry is not None:
            due.append(self.retry.at)
        if self.state is State.QUEUED:
            due.append(self.gives_up_at)
        if self.state is State.PARKED:
            due.append(self.hibernates_at)
        if self.state in OBSERVED_IN and self.idling is not None:
            due.append(self.idling.observe_at)
        return min((each for each in due if each is not None), default=None)

    @property
    def explains_at(self) -> float | None:
        """When the pool is asked again why the lease waits; None where nobody looks, or nothing waits."""
        wait = self.wait
        if wait is None or wait.is_asked or not self.is_explained:
            return None
        position = wait.position or 0
        seldom = position > _FEW and position == wait.explained
        return wait.explained_at + (_SELDOM if seldom else max(SOON, position / 2))

    @property
    def stands_in(self) -> bool:
        """Whether the proxy is all there is of the kernel: it lives, and has no process."""
        in_its_place = (self.is_prepared and self.state in _BEFORE_KERNEL) or self.state is State.ENDING
        return in_its_place or self.state in _ASLEEP or (self.in_pod and self.state.has_kernel)

    @property
    def is_over(self) -> bool:
        """Whether a start has come to its end, without a kernel or with one that has ended."""
        return self.state in (State.WITHOUT_SLICE, State.DOWN, State.RESTARTING, State.ENDED)


#: Where it is seen how long the kernel keeps its slice.
OBSERVED_IN: Final = (State.RUNNING, State.ASKED_BACK)

Outcome = tuple[Session, Sequence[do.Effect]]
