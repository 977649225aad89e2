"""What differs between the places where a pool's devices are: this machine, a cluster, or another package's.

A :class:`Backend` says which devices there are and makes leases take effect there; every rule about
leases is the pool's. What not every place has, is a part of its own: :class:`Suspension` where device
memory can be moved, a :class:`KernelHost` where kernels do not run beside their server, an
:class:`ExternalQueue` where somebody else decides whose turn it is, :class:`ElasticCapacity` where
machines come and go, and :class:`NodeAgents` where programs on other machines say what is used there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gpu_pool.audit.callers import Caller
from gpu_pool.devices.inventory import Inventory
from gpu_pool.store.context import CourseFiles, StoreContext
from gpu_pool.store.device_table import ForeignUse, SeenFrom
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import (
    Activity,
    Device,
    EndReason,
    Failure,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    MemoryMove,
    MoveResult,
    Outlook,
    Place,
    PodDeviceUse,
    PreparedStatus,
    Process,
    SliceRequest,
)


@dataclass(frozen=True, slots=True)
class DevicesFound:
    """What was found at one look at the devices."""

    inventory: Inventory
    #: What they were seen from.
    seen: SeenFrom
    #: What others than leases have of them, by uuid; None where that is not known.
    others: Mapping[str, ForeignUse] | None = None
    #: Why nothing new can run on devices, by uuid, empty where it can. Of those left out nothing is known.
    faults: Mapping[str, str] = field(default_factory=dict)


class Adapted(NamedTuple):
    """What a request would really get."""

    #: What is granted and counted for it.
    counted: SliceRequest
    #: The uuids of the devices that it may have; none mean all.
    within: Collection[str] = ()
    #: What was asked for, where a course offers that and would not know what is counted for it.
    asked: SliceRequest | None = None


class Taken(NamedTuple):
    """Why a lease ends, or a wait, since what it needs is gone."""

    reason: EndReason
    #: What its user reads.
    message: str


@dataclass(frozen=True, slots=True)
class LeasesObserved:
    """What a look at the living leases has found."""

    #: Those that have lost what they need, by id.
    taken: Mapping[str, Taken] = field(default_factory=dict)
    #: Those of which :attr:`Lease.is_queued` is true, and which its :class:`ExternalQueue` has let in, by id.
    admitted: Collection[str] = ()


class PoolSide(Protocol):
    """What a backend may ask of the pool that it belongs to."""

    #: Where the leases are.
    store: StoreThread

    @property
    def courses(self) -> CourseFiles | None:
        """The course files in front of the pool; None where nobody asks them."""

    async def living(self, lease_id: str) -> Lease:
        """Return a lease that has not ended. Raises ``LeaseGone``."""

    async def end_taken(self, lease_id: str, taken: Taken) -> bool:
        """End a lease since what it needs is gone; return whether it had not ended yet."""

    async def record_failure(self, lease_id: str, failure: Failure) -> None:
        """Record how a lease's kernel has failed by itself."""

    def wake(self) -> None:
        """Have the pool look soon, since something has changed."""


class Backend(ABC):
    """Where a pool's devices are, and how a lease takes effect there.

    It belongs to one pool. A verb that fails raises ``PoolUnreachable`` and is tried again; but for
    :meth:`run`, each may be called in several event loops.
    """

    #: The pool that it belongs to.
    pool: PoolSide
    #: The boot of the machine whose end ends all leases; empty for a place that outlives machines.
    boot: str = ""
    #: Whether this process alone decides about the devices; else all that have the store open do.
    is_owner: bool = True
    suspension: Suspension | None = None
    host: KernelHost | None = None
    queue: ExternalQueue | None = None
    capacity: ElasticCapacity | None = None
    agents: NodeAgents | None = None

    def join(self, pool: PoolSide) -> None:
        """Belong to a pool, from before anything else is asked."""
        self.pool = pool

    @abstractmethod
    def run(self) -> AbstractAsyncContextManager[object]:
        """Keep what it needs while the pool is open: informers, threads, connections.

        Entered before anything else where this process owns the devices. What it holds that is needed
        without that, it begins when it is first asked, and ends in :meth:`close`.
        """

    @abstractmethod
    async def devices(
        self, max_age: float, patience: float = 0.0, known: Collection[Device] = ()
    ) -> DevicesFound:
        """Return what there is now, and who else uses it. It writes nothing, and one sick device is no error.

        Parameters
        ----------
        max_age
            How old the answer may be, in seconds; with 0 it is looked anew, also where nothing was found.
        patience
            Seconds to wait for it; what takes longer is left out.
        known
            Devices that were here before, for a place that can say of them alone whether they work.
        """

    @abstractmethod
    async def adapt(
        self, request: SliceRequest, holder: Holder | None = None, caller: Caller | None = None
    ) -> Adapted:
        """Return what such a request would really get here, by facts that are known: nothing is changed.

        For a ``holder`` also on which devices. Raises the errors of ``Pool.request`` for what it cannot have.
        """

    @abstractmethod
    def describe(self, lease: Lease) -> Lease:
        """Return a held or parked lease with its environment's variables and the truth about its limits."""

    def recover(self, store: StoreContext) -> None:  # noqa: B027 - most places need not
        """Take up what an earlier process has left; called in the store's thread, first of all."""

    @abstractmethod
    async def bind(self, lease: Lease, process: Process | None = None) -> Lease:
        """Make a held lease take effect, for a ``process`` of it, too; return it described.

        Idempotent, and called again after a resize. What cannot take effect is ended, in words.
        """

    @abstractmethod
    async def unbind(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """Let nothing take effect that is not living any more.

        ``living`` reads the leases: after it was noted what is bound, so that nothing new is taken for old.
        Idempotent; what is gone already is no error.
        """

    @abstractmethod
    async def observe(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> LeasesObserved:
        """Return which of the living leases have lost what they need, and which were let in elsewhere.

        ``living`` reads the leases. Whether their processes live, the pool judges itself. What was let in
        by its :attr:`queue` is held from then on.
        """

    def allows_burst(self, device: Device) -> bool:  # noqa: ARG002 - elsewhere who places kernels knows of limits
        """Whether leases with a limit may use more of a device than they were granted while nobody else is.

        Not where something holds each process to what was granted when it was started.
        """
        return False

    def memory_in_use(self) -> Mapping[str, Mapping[str, int]]:
        """Return what leases were last seen to use: MiB by lease id and device uuid, where that is known."""
        return {}

    def prepared_pods(self) -> tuple[PreparedStatus, ...]:
        """Return what there is of pods in which kernels can begin, by course."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything. Leases live on."""


class Suspension(Protocol):
    """Moves what a lease keeps in device memory, so that it can be parked although its process lives."""

    async def is_movable(self, lease: Lease) -> bool:
        """Whether it can be tried."""

    def keeps(self, lease: Lease) -> bool:
        """Whether something of it was moved away, and must go back to the same devices."""

    async def suspend(self, lease: Lease) -> None:
        """Move it off its devices. Raises ``NotAllowed`` where it stays, ``LeaseGone`` where it is lost."""

    async def restore(self, lease: Lease) -> None:
        """Move it back, if it was moved. Raises ``LeaseGone`` where it is lost."""


class KernelHost(Protocol):
    """Runs kernels elsewhere than beside their servers: in pods, in jobs."""

    async def launch(self, lease: Lease, kernel: KernelCommand, caller: Caller | None) -> KernelPod:
        """Start a kernel on a held lease, in place of the one that it has; the same start is done once.

        The keys of its connection go to the kernel, and into no store.
        """

    async def follow(self, lease_id: str, seen: str, seconds: float) -> KernelPod:
        """Return how it is, once its version is not ``seen``, or after so many seconds."""

    async def end(self, lease_id: str) -> None:
        """End it; what is just being started is ended too."""

    def activity(self, lease_id: str) -> Activity:
        """Return what is known of what it does."""

    def has_kernel(self, lease_id: str) -> bool:
        """Whether one may use the slice."""

    def stop_waiting(self) -> None:
        """Let nobody wait any more in :meth:`follow`."""


class ExternalQueue(Protocol):
    """Somebody else decides whose turn it is: Kueue, Slurm.

    A lease that the pool would grant is handed over, and nothing is counted for it (it is PARKED) while
    it has a place there; once :meth:`Backend.observe` tells that it was let in, it is held.
    """

    async def submit(self, lease: Lease) -> None:
        """Hand over a lease that the pool would grant. Idempotent.

        Where it is the kernel that is handed over, nothing is done before its launch.
        """

    def place(self, lease_id: str) -> Place | None:
        """Return where a lease stands there, as it was last told; None where it does not wait there.

        It is asked for each lease at each look at the pool, and asks nobody.
        """

    async def withdraw(self, lease_id: str) -> None:
        """Take it back; what is not there is no error."""


class ElasticCapacity(Protocol):
    """Machines come when they are needed, go, or are closed for a while."""

    def expected(self, outlook: Outlook, request: SliceRequest, number: int | None) -> Outlook:
        """Return what is said of a wait, with what is to be expected of machines.

        ``number`` is that of the lease; None for somebody who does not wait yet.
        """


class NodeAgents(Protocol):
    """Programs on other machines that see what runs there, and are believed of their own machine alone."""

    async def node_of(self, token: str) -> str:
        """Return the name of the machine whose agent has this token.

        Raises ``NotAllowed`` where it is no agent's, and ``PoolUnreachable`` where that cannot be found out.
        """

    async def report(
        self, node: str, devices: Sequence[str], uses: Sequence[PodDeviceUse], *, complete: bool
    ) -> None:
        """Take what the agent of a machine says. See ``Pool.report_use``."""

    async def moves(
        self,
        node: str,
        unmovable: Mapping[str, str],
        results: Sequence[MoveResult],
        known: Collection[str],
        seconds: float,
    ) -> tuple[MemoryMove, ...]:
        """Return what the agent of a machine is to move there. See ``Pool.move_memory``."""

    def ages(self) -> Mapping[str, float]:
        """Return how many seconds ago each machine's agent last said something that was believed."""
