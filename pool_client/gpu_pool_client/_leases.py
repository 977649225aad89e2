"""What a pool says of leases: whose they are, how they stand, how they end. All are immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from gpu_pool_client._devices import DeviceStatus, Enforcement, Slice
from gpu_pool_client._processes import Process
from gpu_pool_client._requests import SliceRequest, format_share

#: Seconds that a kernel is idle before it gives way to anybody: longer than the pause between two cells that
#: run one after the other.
_PAUSE: Final = 5.0


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
    revocable: bool = False
    #: Whether its kernel runs in a pod that the pool starts, by :meth:`~gpu_pool_client.Pool.launch`.
    in_pod: bool = False
    #: Whether it ends then because a length was said with its request, and not because its course says so.
    ends_as_asked: bool = False
    #: After how long an idle kernel gives its slice to somebody who waits, where it can be parked, and sooner
    #: to somebody who has waited for as long; None for never, as in most pods.
    yield_after: float | None = None
    #: Whether its pod goes on while its slice is lent to others. Else a kernel in a pod is never parked.
    parks_in_pod: bool = False
    #: The job of a batch system that its devices are of, such as ``Slurm job 4711``; empty for none.
    job: str = ""
    #: Unix seconds at which that job ends, and everything in it; None where that is not known, or never.
    job_ends_at: float | None = None
    #: After how long an idle kernel goes to disk, where its server can do that; None for never.
    hibernate_after: float | None = None

    @property
    def over_at(self) -> float | None:
        """When it is over at the latest, by its own end or that of its job; None for no limit."""
        return min((at for at in (self.ends_at, self.job_ends_at) if at is not None), default=None)

    @property
    def why_it_ends(self) -> str:
        """Why it ends at ``ends_at``, as the end of a sentence."""
        return "nothing longer was asked for" if self.ends_as_asked else "its course allows no longer lease"

    @property
    def can_be_parked(self) -> bool:
        """Whether its kernel can live on without its slice, as far as that does not depend on the kernel."""
        return self.parks_in_pod or not self.in_pod

    @property
    def acts_when_idle(self) -> bool:
        """Whether anything comes of idling for so long: most kernels in pods are never parked."""
        return self.idle_limit is not None and (self.can_be_parked or self.when_idle is not WhenIdle.KEEP)

    @property
    def can_be_kept(self) -> bool:
        """Whether it makes a difference that its user says that an idle kernel is in use."""
        return self.acts_when_idle or self.yield_after is not None

    @property
    def has_limits(self) -> bool:
        """Whether anything may be taken away while the kernel lives."""
        return self.revocable or bool(self.job) or self.ends_at is not None or self.idle_limit is not None


def gives_way_after(yield_after: float) -> float:
    """Return how many seconds a kernel is idle at least before it gives its slice to anybody who waits."""
    return min(_PAUSE, yield_after)


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
    #: Whether nobody can ever say if its devices work for it, as on MIG instances: what is submitted decides.
    unmeasured: bool = False
    #: How many seconds ago this was seen; 0 for now. What differs in nothing else is the same.
    age: float = field(default=0.0, compare=False)


#: Variables that say which devices a program finds, and how these are named.
_NAMING: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_MINUTE: Final = 60
_HOUR: Final = 3_600
#: Seconds from which a wait is told in hours.
_LONG: Final = 3 * _HOUR


@dataclass(frozen=True, slots=True)
class Outlook:
    """Why a lease waits and how long it may still take. Names no other user."""

    #: Position in the queue, 1 for the next; None where a queue that is not the pool's own does not say it.
    position: int | None
    #: One or two sentences: what is needed, what is free, who is before it.
    why: str
    #: Seconds, (likely soonest, likely latest): a guess from what others did before, and no promise.
    #: None when nothing is known, as of a lease that has outlasted all that are known.
    wait: tuple[float, float] | None = None
    #: Idle kernels that are asked to give way to it, and have not yet.
    giving_way: int = 0

    @property
    def reason(self) -> str:
        """Why it waits, and before that who gives way for it, if anybody does."""
        if not self.giving_way:
            return self.why
        kernels = "1 idle kernel is" if self.giving_way == 1 else f"{self.giving_way} idle kernels are"
        return f"{kernels} giving way. {self.why}".rstrip()

    @property
    def expected(self) -> str:
        """The range of waits, ``perhaps about 4 to 9 min``; empty when nothing is known."""
        if self.wait is None:
            return ""
        soonest, latest = self.wait
        if latest < _MINUTE / 2:
            return "perhaps less than a minute"
        unit, seconds = ("min", _MINUTE) if latest < _LONG else ("h", _HOUR)
        last = round(latest / seconds)
        if soonest < _MINUTE / 2:
            return f"perhaps up to {last} {unit}"
        if unit == "h" and soonest < _HOUR:
            return f"perhaps about {round(soonest / _MINUTE)} min to {last} h"
        first = round(soonest / seconds)
        return f"perhaps about {last} {unit}" if first == last else f"perhaps about {first} to {last} {unit}"

    def __str__(self) -> str:
        where = {None: "You wait in the queue", 1: "You are next in the queue"}
        place = where.get(self.position, f"You are number {self.position} in the queue")
        return f"{', '.join(filter(None, (place, self.expected)))}. {self.reason}".strip()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lease stands in a queue that is not the pool's own, such as Kueue's, as far as that says it."""

    #: 1 for the next; None where it is not known.
    position: int | None = None
    #: Whose queue it is: ``its course``; empty for that of all.
    among: str = ""
    #: Why it waits, in a sentence; empty where it is not known.
    reason: str = ""
    #: When it is expected to start, in Unix seconds; None where nobody says it.
    expected_start: float | None = None

    def outlook(self, now: float) -> Outlook:
        """Return what is to be said of the wait at a time, in Unix seconds."""
        left = None if self.expected_start is None else max(0.0, self.expected_start - now)
        why = f"It waits in the cluster's own queue. {self.reason}".rstrip()
        return Outlook(self.position, why, None if left is None else (left, left))

    def told(self, now: float) -> str:
        """Say in sentences where it stands, what wait is expected and why it waits; empty for nothing."""
        position = ""
        if self.position is not None:
            number = "next" if self.position == 1 else f"number {self.position}"
            position = f"It is {number} in the queue{f' of {self.among}' if self.among else ''}"
        expected = self.outlook(now).expected
        if expected and not position:
            expected = f"The wait is {expected}"
        where = ", ".join(filter(None, (position, expected)))
        return " ".join(filter(None, (f"{where}." if where else "", self.reason)))


class LeaseState(str, Enum):
    """Where a lease is in its life.

    waiting → held or ended; held → parked or ended; parked → waiting or ended.
    """

    WAITING = "waiting"
    HELD = "held"
    PARKED = "parked"
    ENDED = "ended"


class EndReason(str, Enum):
    """Why a lease ended. Kept in the history."""

    RELEASED = "released"
    """Its holder gave it back."""
    WITHDRAWN = "withdrawn"
    """Its holder stopped waiting."""
    PROCESS_GONE = "process-gone"
    """The process that kept it alive ended."""
    NEVER_ATTACHED = "never-attached"
    """It was granted, and no process was attached to it in time."""
    NOT_READY = "not-ready"
    """Its process was attached and never reported that it works."""
    EXPIRED = "expired"
    """Its holder stopped renewing it."""
    REVOKED = "revoked"
    """An administrator took it back."""
    DEVICE_LOST = "device-lost"
    """Its device is no longer on this machine."""
    NOT_ENFORCED = "not-enforced"
    """It was granted, and its limits could not be enforced."""
    NOT_RESTORED = "not-restored"
    """What it kept on its device while it was parked could not be brought back."""
    TOO_LONG = "longest-lease"
    """It was held for as long as its course allows."""
    IDLE = "idle"
    """Its kernel was idle for longer than its course allows."""
    OVER_MEMORY = "over-memory"
    """It used more device memory than it was granted, and did not stop."""
    TAKEN = "taken-by-cluster"
    """The cluster took the pod of its kernel away, or ended its job."""
    YIELDED = "yielded"
    """Its kernel was idle, and somebody waited. No lease ends for this: its slices are asked back."""


#: Why a slice is over, to the person who had it.
_WHY_OVER: Final = {
    EndReason.RELEASED: "it was given back",
    EndReason.WITHDRAWN: "it left the queue",
    EndReason.PROCESS_GONE: "its kernel or command ended",
    EndReason.NEVER_ATTACHED: "it was granted, and never used",
    EndReason.NOT_READY: "its kernel did not start",
    EndReason.EXPIRED: "the pool did not hear of its server or command any more",
    EndReason.REVOKED: "an administrator took it back",
    EndReason.DEVICE_LOST: "its GPU is gone",
    EndReason.NOT_ENFORCED: "its limits could not be set up",
    EndReason.NOT_RESTORED: "what it kept while it was parked could not be brought back",
    EndReason.TOO_LONG: "it was held for as long as its course allows",
    EndReason.IDLE: "its kernel was idle",
    EndReason.OVER_MEMORY: "it used more GPU memory than it was granted",
    EndReason.TAKEN: "the cluster took it away",
    EndReason.YIELDED: "its kernel was idle, and somebody waited for it",
}


def why_over(reason: str) -> str:
    """Say why a slice is over, where "it" is the slice; ``reason`` itself where that is not known."""
    return {each.value: why for each, why in _WHY_OVER.items()}.get(reason, reason)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks.

    ``process`` is the requesting process: while no other process is attached,
    its death ends the lease. A pool that runs in the caller's own process
    fills it in when it is None.
    """

    user: str
    course: str | None = None
    #: What the lease is for, as a person recognises it: a kernel's name, a command.
    kernel: str | None = None
    process: Process | None = None
    #: Whether it is batch work, such as grading: it comes after all that is not, whatever its priority.
    batch: bool = False
    #: Whether it can give its slices to others while it is idle, as a kernel can and a command cannot. Idle
    #: kernels give way to such alone, and to leases that end soon.
    yields: bool = False


class TakingEffect(Enum):
    """What taking a lease's slices back does to whatever uses them."""

    LEAVES_QUEUE = "leaves-queue"
    """It waits for its first slice: nothing runs, and its position is lost."""
    KEEPS_KERNEL = "keeps-kernel"
    """Its kernel has not used CUDA: it lives on, and its next cell waits for a slice again."""
    ENDS_KERNEL = "ends-kernel"
    """Its kernel is ended, and its variables are lost."""
    FREES_SLICE = "frees-slice"
    """A command or a shell has it, which no kernel manager looks after."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a kernel in a pod has ended by itself, with another status than 0."""

    #: Unix seconds.
    at: float
    #: What its user reads: its status, and the last that it said.
    message: str
    pod: str
    node: str
    image: str


@dataclass(frozen=True, slots=True)
class Hibernation:
    """How a kernel that can go to disk stands, as its server says it."""

    #: MiB of its image; None while it is awake.
    image_mib: int | None = None
    #: Why it stays awake, in sentences; empty where it is on disk, or may go there.
    why_awake: str = ""
    #: Whether it goes there once that is over, as where it runs a cell.
    is_for_now: bool = False
    #: Whether its image is there for the next server, too, when its own ends.
    outlives_server: bool = False


def memory_on_top(parts: Sequence[Slice], write: Callable[[int], str]) -> str:
    """Say how much memory may be used of each device where that is more than what is granted; else nothing.

    Such as ``, now up to 2GiB``; ``write`` writes an amount in MiB. Where it is all of the limit, on a node
    of a cluster, it may be so for good: there who places pods knows what is free at any moment.
    """
    if not parts or not all(part.limit_mib and part.burst_mib for part in parts):
        return ""
    allowed = min(part.allowed_mib for part in parts)
    is_all = all(part.allowed_mib == part.limit_mib for part in parts)
    return f", {'' if is_all and parts[0].device.node else 'now '}up to {write(allowed)}"


@dataclass(frozen=True, slots=True)
class Lease:
    """A request and its fate, as it was when the pool answered."""

    id: str
    key: str
    request: SliceRequest
    holder: Holder
    state: LeaseState
    #: Unix seconds.
    requested_at: float
    #: Since when it has the slices it has now; once it has ended, its first grant.
    held_at: float | None = None
    #: Its first grant, also where it was parked, resumed or resized since.
    first_held_at: float | None = None
    ended_at: float | None = None
    end_reason: EndReason | None = None
    #: What is held now; empty unless the state is HELD.
    slices: tuple[Slice, ...] = ()
    enforcement: Enforcement = field(default_factory=Enforcement)
    #: Variables by which its tier enforces it, and by which it names devices where the pool is set to do so
    #: in another way than by uuid; a part of :attr:`environment`.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: What its user should read now, such as a warning that it uses too much memory; often empty.
    notice: str = ""
    #: The attached process, whose death ends the lease.
    process: Process | None = None
    #: Position in the queue, 1 for the next; None unless the state is WAITING.
    position: int | None = None
    #: Where it stands in a queue that is not the pool's own, for as long as it waits there. It is PARKED
    #: meanwhile: nothing is counted for it.
    place: Place | None = None
    terms: Terms = field(default_factory=Terms)
    #: By whom its slices are asked back: RELEASED by its user, REVOKED by an administrator, YIELDED where
    #: somebody waits and its kernel has been idle for long enough. They go as soon
    #: as its kernel is idle; those of a parked lease have gone. None unless somebody did.
    asked_back: EndReason | None = None
    #: How its kernel has failed, the last time that one did.
    failure: Failure | None = None
    #: When the pool asked last for what runs to be interrupted, in Unix seconds, where it can't do that
    #: itself: in a pod. Each such moment is for one interrupt.
    interrupt_at: float | None = None
    #: Seconds for which it was held before ``held_at``: until it was parked, or had another size. And what
    #: was used then, in whole GPUs times seconds.
    held_before: float = 0.0
    used_before: float = 0.0
    #: Since when others can have what it held; None where it holds it, or waits outside the pool. And what
    #: they could have before that, in whole GPUs times seconds.
    parked_at: float | None = None
    lent_before: float = 0.0
    #: Since when it may use on top what it may now, all its slices together; None where that is nothing. What
    #: it could use on top before then, in MiB times seconds, and the most at once, in MiB.
    burst_since: float | None = None
    burst_before: float = 0.0
    burst_peak_mib: int = 0
    #: Whether its kernel is to go to disk as soon as it is idle: one of its devices is drained for that.
    hibernates: bool = False
    #: How its kernel stands with that; None where nobody says that it can.
    hibernation: Hibernation | None = None

    @property
    def message(self) -> str:
        """What its user should read of it now: who asks its slices back, or has taken them, or its notice."""
        if self.asked_back in (None, EndReason.YIELDED):
            return self.notice
        by_admin = self.asked_back is EndReason.REVOKED
        quoted = f" \u201c{self.notice}\u201d" if self.notice else ""
        if self.state is LeaseState.HELD:
            who = "An administrator asks" if by_admin else "You asked on the pool's page"
            return f"{who} for this kernel's GPU slice: it goes back as soon as the kernel is idle.{quoted}"
        who = "An administrator took" if by_admin else "You gave"
        where = "back" if by_admin else "back on the pool's page"
        return f"{who} this kernel's GPU slice {where}; its variables are kept.{quoted}"

    @property
    def simulated(self) -> bool:
        """Whether any of its devices is simulated."""
        return any(part.device.simulated for part in self.slices)

    @property
    def is_queued(self) -> bool:
        """Whether it waits in a queue that is not the pool's own, such as Kueue's."""
        return self.state is LeaseState.PARKED and self.place is not None

    @property
    def memory_mib(self) -> int:
        """Memory granted on each device, in MiB."""
        return min((part.memory_mib for part in self.slices), default=0)

    @property
    def allowed_mib(self) -> int:
        """Memory that may be used now on each device, with the burst on top of what is granted, in MiB."""
        return min((part.allowed_mib for part in self.slices), default=0)

    @property
    def limit_mib(self) -> int:
        """The most that may ever be used on each device, in MiB; 0 where no more is than what is granted."""
        limits = [part.limit_mib for part in self.slices]
        return min(limits) if limits and all(limits) else 0

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a process needs to use this slice, and facts for people and tools.

        Device order follows ``slices``; the share and the total memory are the
        first device's, the memory is what every device grants. Nothing in it is secret.
        """
        if not self.slices:
            return {}
        facts = {
            "CUDA_VISIBLE_DEVICES": ",".join(part.device.uuid for part in self.slices),
            "GPU_POOL_LEASE": self.id,
            "GPU_POOL_SLICE": self.request.size,
            "GPU_POOL_DEVICE_NAMES": ",".join(part.device.label for part in self.slices),
            "GPU_POOL_MILLI": str(self.slices[0].milli),
            "GPU_POOL_HELD_SINCE": f"{self.held_at or self.requested_at:.0f}",
            "GPU_POOL_ENFORCED": self.describe_limits(),
        }
        if self.slices[0].device.memory_mib:  # else it is not known
            facts["GPU_POOL_MEMORY_MIB"] = str(self.memory_mib)
            facts["GPU_POOL_DEVICE_MEMORY_MIB"] = str(self.slices[0].device.memory_mib)
        if self.limit_mib:
            facts["GPU_POOL_ALLOWED_MIB"] = str(self.allowed_mib)
            facts["GPU_POOL_LIMIT_MIB"] = str(self.limit_mib)
        if self.simulated:
            facts["GPU_POOL_SIMULATED"] = "1"
        if self.terms.ends_at is not None:
            facts["GPU_POOL_ENDS_AT"] = f"{self.terms.ends_at:.0f}"
            if self.terms.ends_as_asked:
                facts["GPU_POOL_ENDS_AS_ASKED"] = "1"
        if self.terms.idle_limit is not None and self.terms.acts_when_idle:
            facts["GPU_POOL_IDLE_LIMIT"] = f"{self.terms.idle_limit:.0f}"
            if not self.terms.can_be_parked:
                facts["GPU_POOL_IDLE_ENDS"] = "1"
            elif self.terms.when_idle is WhenIdle.END:
                facts["GPU_POOL_IDLE_ENDS_CUDA"] = "1"
        if self.terms.yield_after is not None:
            facts["GPU_POOL_YIELD_AFTER"] = f"{self.terms.yield_after:.0f}"
        return {**facts, **self.variables}

    def named_by_uuid(self) -> Lease:
        """Return the lease with an environment that names its devices by uuid."""
        kept = {name: value for name, value in self.variables.items() if name not in _NAMING}
        return replace(self, variables=kept)

    def describe_limits(self) -> str:
        """Say in one line what is granted and what is enforced."""
        share = format_share(self.slices[0].milli) if self.slices else "nothing"
        on_top = memory_on_top(self.slices, lambda mib: f"{mib} MiB")
        is_known = self.memory_mib or not self.slices
        memory = f"{self.memory_mib} MiB{on_top}" if is_known else "not known"
        return f"memory: {memory}, {self.enforcement.memory}; compute: {share}, {self.enforcement.compute}"


@dataclass(frozen=True, slots=True)
class EndedLease:
    """What the history keeps of a lease that has ended. Times are Unix seconds.

    Of old ones it keeps sums of one day: then ``leases`` says of how many, ``id`` and ``request`` are empty,
    and the times are those of the first request, the first grant and the last end.
    """

    id: str
    #: Its last size, as written: ``2%``.
    request: str
    #: Thousandths of compute that it had in all, at its last size.
    milli: int
    user: str
    #: Empty for none.
    course: str
    #: What it was for; None if nobody said.
    kernel: str | None
    requested_at: float
    #: Its first grant; None if it never was granted.
    held_at: float | None
    ended_at: float
    #: Seconds for which it was held; parked time is left out.
    held_seconds: float
    #: What was used, in whole GPUs times seconds, whatever sizes it had.
    gpu_seconds: float
    #: The value of an :class:`EndReason`.
    reason: str
    #: What its user was told at its end, such as an administrator's words; often empty.
    note: str = ""
    #: How its kernel failed the last time that one did; None if none did.
    failure: Failure | None = None
    #: The most memory in use on one device, and the mean, in MiB; None where nothing was measured.
    peak_mib: int | None = None
    mean_mib: float | None = None
    #: Seconds with a process on a device; None where nothing was measured.
    device_seconds: float | None = None
    #: Whether there ever was a process on a device; None where nothing was measured.
    touched: bool | None = None
    #: Of how many leases of one user, course, day and reason this is the sum.
    leases: int = 1
    #: What others could have of it while it was parked, in whole GPUs times seconds.
    lent_gpu_seconds: float = 0.0
    #: What it could use on top of what it was granted, on all its devices together, in MiB times seconds; and
    #: the most at once, in MiB.
    burst_mib_seconds: float = 0.0
    burst_peak_mib: int = 0
    #: The jobs of a batch system in which its kernels were, such as ``Slurm job 4711``; empty for none.
    job: str = ""


@dataclass(frozen=True, slots=True)
class PreparedStatus:
    """The pods of one course in which a kernel can begin, on a cluster."""

    course: str
    #: How many there may be at a time.
    most: int
    #: How many wait for a kernel, by node; and how many are on their way.
    ready: Mapping[str, int]
    starting: int = 0
    #: Why there are no more, in a sentence; empty where there is one for each server that could use it.
    why: str = ""

    def __str__(self) -> str:
        nodes = ", ".join(f"{node}: {count}" for node, count in self.ready.items())
        places = f" ({nodes})" if nodes else ""
        on_the_way = f", {self.starting} starting" if self.starting else ""
        return f"{sum(self.ready.values())} of at most {self.most} ready{places}{on_the_way}"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One consistent snapshot of a pool."""

    #: The pool's URL, as given to :func:`~gpu_pool_client.connect`.
    url: str
    devices: tuple[DeviceStatus, ...]
    #: Held and parked leases, oldest first.
    leases: tuple[Lease, ...]
    #: Waiting leases in the order of the queue.
    queue: tuple[Lease, ...]
    #: What keeps all this from being used, or from being up to date; empty for nothing.
    note: str = ""
    #: Bytes that the files of its store take; None where that is not told, as to those who only use it.
    store_bytes: int | None = field(default=None, compare=False)
    #: What there is of prepared pods, by the name of the course, for each that has any.
    prepared: tuple[PreparedStatus, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether any device is simulated."""
        return any(status.device.simulated for status in self.devices)
