"""How one kernel's slice stands, for those who look at it from outside: values, without I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gpu_pool_client import Activity, Lease, Outlook, SliceRequest


class SlicePhase(str, enum.Enum):
    """Where a kernel is with its slice."""

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
    RESUMING = "resuming"
    """It is parked, and something was submitted: its slice is asked for again."""
    NONE = "none"
    """It gave up, or its slice is over."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """What idleness will come to. Times are by ``time.monotonic()``; None for never."""

    #: Since when nothing was submitted; None while the kernel works.
    idle_since: float | None = None
    #: Until when its user has said that it is in use.
    kept_until: float | None = None
    #: When its slice goes back if nothing happens.
    gives_back_at: float | None = None
    #: Whether the kernel is ended then, and not parked.
    ends: bool = False
    #: Whether its user, here, asked for the slice to go back as soon as the kernel is idle.
    gives_back_when_idle: bool = False
    #: For how many seconds, from now on, its user may say that it is in use.
    keep_at_most: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceEnd:
    """Why a kernel has no slice any more, or was given none."""

    #: The value of an ``EndReason``; None where its user gave up, or the pool refused.
    reason: str | None
    #: In sentences.
    message: str


@dataclass(frozen=True, slots=True)
class ProxyState:
    """What a kernel proxy knows of its kernel's slice."""

    phase: SlicePhase
    #: What its user should read now; may be empty.
    message: str = ""
    position: int | None = None
    outlook: Outlook | None = None
    idle: IdleState = IdleState()
    end: SliceEnd | None = None
    #: Whether the kernel runs in a pod, which cannot change its size.
    in_pod: bool = False
    #: Whether it is parked because its user gave the slice back.
    given_back: bool = False


@dataclass(frozen=True, slots=True)
class KernelSliceState:
    """How one kernel's slice stands."""

    #: The pool's URL, as it was given.
    url: str
    #: What it has, or asks for.
    request: SliceRequest
    #: The size to which it changes at its next restart.
    pending: SliceRequest | None
    #: The lease as it was last seen, and when, by ``time.monotonic()``.
    lease: Lease | None
    seen_at: float
    activity: Activity | None
    proxy: ProxyState
    #: Whether a running kernel can be told of another size.
    resizes_live: bool
