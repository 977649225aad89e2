"""What the queue is told, and what it decides. All are immutable.

Times are seconds of one clock, any clock; amounts of GPU are thousandths of a
device (*milli*), and use is milli times seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_pool_client import WHOLE, DeviceStatus, Slice, SliceRequest


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be granted to one lease, and on one device, as plain integers."""

    #: Memory, in MiB, that CUDA itself takes in a process; no slice may be smaller. 0 for each device's own.
    context_mib: int = 0
    #: Thousandths of compute that may be granted on one device in all.
    device_milli: int = WHOLE
    #: Context slots one lease takes on a device that counts them.
    lease_contexts: int = 2
    #: The largest share of one device that one lease may have, in thousandths.
    max_milli: int = WHOLE
    #: The most memory, in MiB, that one lease may have on one device; 0 for no limit.
    max_memory_mib: int = 0
    #: The most devices that one lease may have; 0 for no limit.
    max_devices: int = 0


@dataclass(frozen=True, slots=True)
class Waiter:
    """One waiting lease, as far as its turn is concerned."""

    #: The store's number of the lease.
    number: int
    request: SliceRequest
    #: uuids it must have (a parked lease returns to its own devices); empty for any.
    devices: frozenset[str] = frozenset()
    user: str = ""
    course: str = ""
    #: When it began to wait.
    since: float = 0.0
    #: Set by the administrator: all of a higher priority come first.
    priority: int = 0
    #: uuids kept free for it by an earlier decision.
    reserved: tuple[str, ...] = ()
    #: Whether it comes after all that is not batch work, whatever its priority.
    batch: bool = False
    #: Whether it returns to devices that it was parked on: these are the ones that it must have.
    is_parked: bool = False
    #: For how long it is held at most, in seconds; None where nothing limits it.
    longest: float | None = None
    #: Whether that is a length that was said with the request, which is believed.
    is_said: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        """What turns go by before anything else: the least comes first."""
        return self.batch, -self.priority


@dataclass(frozen=True, slots=True)
class Holding:
    """One held lease, as far as the queue is concerned."""

    user: str
    course: str
    parts: tuple[Slice, ...]
    #: When it ends at the latest; None where nothing limits it.
    ends_by: float | None = None
    #: When it was granted.
    since: float = 0.0
    #: Whether ``ends_by`` follows from a length that was said, which is believed.
    is_said: bool = False
    #: What it holds of all its devices together: added up once, since decisions ask for it over and over.
    milli: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "milli", sum(part.milli for part in self.parts))


@dataclass(frozen=True, slots=True)
class HoldingTime:
    """How long a lease was held that has ended."""

    course: str
    milli: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of leases that are not held any more, each faded by :func:`faded_use`."""

    #: By course, faded by ``Policy.course_half_life``.
    courses: Mapping[str, float] = field(default_factory=dict)
    #: By (course, user), faded by ``Policy.user_half_life``.
    users: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """What an administrator can say about turns. Durations are in seconds."""

    #: What a course is to receive, in proportion; 1 for those not named, 0 for what others leave.
    weights: Mapping[str, float] = field(default_factory=dict)
    #: How long a request waits before devices are emptied for it.
    drain_after: float = 1800.0
    #: In this time, what a course has used counts half. Short: a course that worked
    #: while the others slept owes them little.
    course_half_life: float = 900.0
    #: In this time, what a user has used counts half.
    user_half_life: float = 3600.0

    def weight(self, course: str) -> float:
        """Return the weight of a course."""
        return self.weights.get(course, 1.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the queue decides by, at one moment."""

    queue: Sequence[Waiter]
    #: All held leases.
    holdings: Sequence[Holding]
    #: The devices that may be granted from, in placement order.
    statuses: Sequence[DeviceStatus]
    rules: Rules
    policy: Policy
    usage: Usage
    now: float
    #: The courses whose leases wait, where some are left out of ``queue``; see ``fairness.courses_in_turn``.
    courses: frozenset[str] = frozenset()
    #: Of leases that have ended, the latest of each course and size: what is known of how long others last.
    history: Sequence[HoldingTime] = ()

    def waiter(self, number: int) -> Waiter:
        """Return the waiter of that number. Raises ``KeyError`` if it is not in the queue."""
        for waiter in self.queue:
            if waiter.number == number:
                return waiter
        raise KeyError(number)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who is granted what now, and which devices are kept free for whom."""

    grants: tuple[tuple[Waiter, tuple[Slice, ...]], ...]
    #: By waiter's number: all reservations now in force, to be given back as ``Waiter.reserved``.
    reservations: Mapping[int, tuple[str, ...]]
