"""On what terms a slice is held: until when, and what becomes of it when its kernel idles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WhenIdle(str, Enum):
    """What becomes of the slice of an idle kernel that cannot be parked."""

    KEEP = "keep"
    """Nothing."""
    END = "end"
    """The kernel is ended, after a warning."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one lease. Durations are in seconds."""

    #: Unix seconds at which the lease ends whatever its kernel does; None for no limit.
    ends_at: float | None = None
    #: After how long an idle kernel's slice is parked, where that is possible; None for never.
    idle_limit: float | None = None
    #: Where it is not.
    when_idle: WhenIdle = WhenIdle.KEEP
    #: How long before anything is taken away the user is warned.
    warn_before: float = 300.0
    #: How long the user may say "I'm still using it" at once.
    keep_at_most: float = 7_200.0
    #: Whether the pool watches over the lease: it may warn its user, and take the slice back at any time.
    guarded: bool = False
    #: Whether its kernel runs in a pod that the pool starts, by :meth:`~gpu_pool_client.Pool.launch`.
    in_pod: bool = False

    @property
    def acts_when_idle(self) -> bool:
        """Whether anything comes of idling for so long: a kernel in a pod is never parked."""
        return self.idle_limit is not None and not (self.in_pod and self.when_idle is WhenIdle.KEEP)

    @property
    def has_limits(self) -> bool:
        """Whether anything may be taken away while the kernel lives."""
        return self.guarded or self.ends_at is not None or self.idle_limit is not None


@dataclass(frozen=True, slots=True)
class Activity:
    """What the process of a lease does with its devices; None where that is not known."""

    #: Whether it has initialised CUDA, and so keeps state on the device.
    initialised: bool | None = None
    #: Whether the device has worked for it in the last seconds.
    working: bool | None = None
    #: Whether what it keeps on its devices can be moved off them while its lease is parked.
    movable: bool = False
    #: MiB of device memory in use by it and its descendants, on all devices together.
    memory_mib: int | None = None
