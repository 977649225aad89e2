"""How a kernel's slice stands, for those who look at it: the API, and with it panel, ``%gpu`` and status bar.

Pure: values in, values out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool_client import Activity, EndReason, Lease, Outlook, SliceRequest
from gpu_pool_provisioner.session import idling, texts
from gpu_pool_provisioner.session.events import OnDisk
from gpu_pool_provisioner.session.idling import IdleState
from gpu_pool_provisioner.session.session import FailedWake, Session, SliceEnd, State


class SlicePhase(str, enum.Enum):
    """Where a kernel is with its slice, in the words of the API."""

    ASKING = "asking"
    """The pool has not answered yet."""
    WAITING = "waiting"
    """Its lease is in the queue, and the kernel has not started."""
    STARTING = "starting"
    """The slice is held; the kernel is being launched, and has not answered."""
    HELD = "held"
    """The slice is held, and the kernel runs."""
    PARKED = "parked"
    """The slice is lent to others; the kernel keeps its variables."""
    ASLEEP = "asleep"
    """As parked, and the kernel is on disk."""
    RESUMING = "resuming"
    """It is parked, and something was submitted: its slice is asked for again."""
    NONE = "none"
    """It gave up, or its slice is over."""


#: In which it can be told that it gives way.
_GIVES_WAY: Final = (SlicePhase.HELD, SlicePhase.PARKED, SlicePhase.RESUMING)
#: What the user of a kernel reads that gives way, on the pages that show its slice and nowhere else.
GIVING_WAY: Final = (
    "Somebody waits for a GPU slice, so this one is lent to them while the kernel is idle. "
    "Its variables are kept, and the next cell takes a slice again."
)
GAVE_WAY: Final = (
    "This kernel was idle and somebody waited, so its GPU slice was lent to them. "
    "Its variables are kept, and the next cell takes a slice again."
)


@dataclass(frozen=True, slots=True)
class SliceView:
    """How one kernel's slice stands."""

    phase: SlicePhase
    #: What its user should read now; may be empty.
    message: str
    #: What it has, or asks for.
    request: SliceRequest
    #: The size to which it changes at its next restart.
    pending: SliceRequest | None
    #: The lease as it was last seen.
    lease: Lease | None
    activity: Activity | None
    position: int | None
    outlook: Outlook | None
    idle: IdleState
    end: SliceEnd | None
    #: Whether it is parked because its user gave the slice back.
    given_back: bool
    #: Whether its size can change without a restart.
    resizes_live: bool
    #: How its kernel sleeps; None where it does not.
    on_disk: OnDisk | None = None
    #: Which kernel another server has left on disk for it, in words; empty for none, and once it is wanted.
    left: str = ""
    #: How it could not be woken when that was tried last; None for nothing.
    failed_wake: FailedWake | None = None

    @property
    def gives_way(self) -> bool:
        """Whether its slice goes, or has gone, to somebody who waits while the kernel is idle."""
        asked = self.lease is not None and self.lease.asked_back is EndReason.YIELDED
        return asked and self.phase in _GIVES_WAY

    def takes_at_once(self, size: SliceRequest) -> bool:
        """Whether a size differs from the lease's in the limit alone, which changes while a kernel runs."""
        lease = self.lease
        if lease is None or not lease.slices or (lease.terms.in_pod and not lease.terms.parks_in_pod):
            return False
        return size.changes_only_limit_of(lease.request)


_PHASES: Final = {
    State.DOWN: SlicePhase.NONE,
    State.ASKING: SlicePhase.ASKING,
    State.QUEUED: SlicePhase.WAITING,
    State.QUEUED_RESIZING: SlicePhase.WAITING,
    State.HELD: SlicePhase.STARTING,
    State.STARTING: SlicePhase.STARTING,
    State.RUNNING: SlicePhase.HELD,
    State.ASKED_BACK: SlicePhase.HELD,
    State.RESIZING: SlicePhase.HELD,
    State.PARKING: SlicePhase.HELD,
    State.PARKED: SlicePhase.PARKED,
    State.RESUMING: SlicePhase.RESUMING,
    State.HIBERNATING: SlicePhase.PARKED,
    State.HIBERNATED: SlicePhase.ASLEEP,
    State.WAKING: SlicePhase.RESUMING,
    State.RESTARTING: SlicePhase.STARTING,
    State.WITHOUT_SLICE: SlicePhase.NONE,
    State.ENDING: SlicePhase.NONE,
    State.ENDED: SlicePhase.NONE,
}


def phase_of(session: Session) -> SlicePhase:
    """Return where the kernel is with its slice."""
    if session.state is State.ASKING and session.is_held:
        return SlicePhase.STARTING
    if session.state is State.DOWN and session.is_held and session.end is None:
        return SlicePhase.HELD  # for as long as its end is forgiven
    return _PHASES[session.state]


def view(session: Session, seen: tuple[bool, float], shown: str, now: float, *, is_told: bool) -> SliceView:
    """Return how things stand. Costs next to nothing.

    ``seen`` is whether the kernel works and when it last began or ended that; ``shown`` is what the waiting
    cell shows; ``is_told`` is whether the running kernel can be told of other variables.
    """
    phase, parking, wait = phase_of(session), session.parking, session.wait
    idle, position = IdleState(), None
    if session.idling is not None:
        idle = idling.idle_state(session.idling, *seen, session.activity or Activity(), now)
    if phase is SlicePhase.PARKED:
        idle = replace(idle, sleeps_at=session.hibernates_at)
    if wait is not None:
        position = wait.position or (session.lease.position if session.lease is not None else None)
    resizes = phase is SlicePhase.WAITING or (phase is SlicePhase.HELD and is_told)
    return SliceView(
        phase,
        _message(session, phase, shown),
        session.request,
        session.pending,
        session.lease,
        session.activity,
        position,
        wait.outlook if wait is not None else None,
        idle,
        session.end if phase is not SlicePhase.HELD else None,
        parking is not None and parking.given_back,
        resizes,
        session.on_disk if phase is SlicePhase.ASLEEP else None,
        session.left if phase is SlicePhase.ASLEEP else "",
        session.failed_wake if phase is SlicePhase.ASLEEP else None,
    )


def _message(session: Session, phase: SlicePhase, shown: str) -> str:
    """Return what the kernel's user should read now."""
    if phase is SlicePhase.NONE:
        return session.end.message if session.end is not None else ""
    gives_way = session.lease is not None and session.lease.asked_back is EndReason.YIELDED
    if phase is SlicePhase.ASLEEP:
        if session.failed_wake is not None:
            return session.failed_wake.why
        return texts.of_before(session.left) if session.left else texts.ASLEEP
    if phase is SlicePhase.PARKED and session.parking is not None:
        return GAVE_WAY if gives_way and not session.parking.given_back else session.parking.why
    if phase is SlicePhase.HELD and session.lease is not None:
        return session.lease.message or session.notice or (GIVING_WAY if gives_way else "")
    wait = session.wait
    return wait.outlook.reason if wait is not None and wait.outlook is not None else shown
