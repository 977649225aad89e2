"""A backend of another package, as small as one can be: some devices, and somebody else's queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from gpu_pool.audit.callers import Caller
from gpu_pool.devices import Inventory
from gpu_pool.devices.inventory import parse_devices
from gpu_pool.pool.backend import Adapted, Backend, DevicesFound, LeasesObserved
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.store.device_table import SeenFrom
from gpu_pool_client import Device, Holder, Lease, LeaseState, Place, Process, SliceRequest
from support.service import DEVICES


class RackQueue:
    """Somebody who lets in whom they like, everybody at once by default; the others read why they wait."""

    def __init__(self) -> None:
        #: Why whoever is handed over from now on has to wait; empty where nobody has to.
        self.full = ""
        #: When the first of them is expected to start, in Unix seconds.
        self.expected_start: float | None = None
        #: Those who wait, in their order, each with why.
        self.waiting: dict[str, str] = {}

    async def submit(self, lease: Lease) -> None:
        if self.full:
            self.waiting.setdefault(lease.id, self.full)

    def place(self, lease_id: str) -> Place | None:
        if lease_id not in self.waiting:
            return None
        position = list(self.waiting).index(lease_id) + 1
        expected = self.expected_start if position == 1 else None
        return Place(position, "its racks", self.waiting[lease_id], expected)

    async def withdraw(self, lease_id: str) -> None:
        self.waiting.pop(lease_id, None)

    def let_in(self, lease_id: str) -> None:
        """Say that it is its turn."""
        del self.waiting[lease_id]


class RackBackend(Backend):
    """Machines in racks, for all processes that have the store open. What is bound is in :attr:`bound`."""

    is_owner = False

    def __init__(self, *devices: Device) -> None:
        self._devices = devices or tuple(parse_devices(DEVICES))
        self.queue: RackQueue = RackQueue()
        self.bound: set[str] = set()

    def run(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def devices(
        self, max_age: float, patience: float = 0.0, known: Collection[Device] = ()
    ) -> DevicesFound:
        return DevicesFound(Inventory(self._devices, "racks"), SeenFrom("racks"))

    async def adapt(
        self, request: SliceRequest, holder: Holder | None = None, caller: Caller | None = None
    ) -> Adapted:
        return Adapted(request)

    def describe(self, lease: Lease) -> Lease:
        return lease

    async def bind(self, lease: Lease, process: Process | None = None) -> Lease:
        self.bound.add(lease.id)
        return lease

    async def unbind(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        bound = set(self.bound)
        self.bound -= bound - {lease.id for lease in await living() if lease.state is LeaseState.HELD}

    async def observe(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> LeasesObserved:
        waiting = {lease.id for lease in await living() if lease.is_queued}
        return LeasesObserved(admitted=waiting - self.queue.waiting.keys())

    async def close(self) -> None:
        pass


def open_racks(url: str, **settings: object) -> GpuPool:
    """Return the pool at ``racks:PATH``, as the entry point of such a package does."""
    path, chosen = Path(url.removeprefix("racks:")), PoolSettings(courses={"cs101": {}}, **settings)
    return GpuPool(PoolCore(path, RackBackend(), chosen))
