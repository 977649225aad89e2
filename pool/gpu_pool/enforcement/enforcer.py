"""What makes the limits of held leases real: the tiers, the watchdog, and what parked leases keep on devices.

What a parked lease keeps there is moved out when it is parked, and back later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gpu_pool.devices.activity import users_of
from gpu_pool.enforcement import Isolation, TierFailed
from gpu_pool.enforcement.checkpoint import Broken, Checkpoint, NotRestored, NotSuspended, folder_beside
from gpu_pool.enforcement.machine import INDEX, with_indices
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases
from gpu_pool.store.context import CourseFiles, StoreContext
from gpu_pool.store.lease_table import gone
from gpu_pool.store.thread import StoreThread
from gpu_pool.worker import Worker
from gpu_pool_client import (
    Device,
    EndReason,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    PoolUnreachable,
    Process,
)

if TYPE_CHECKING:
    from gpu_pool.enforcement.watchdog import WatchdogThread


#: Moving takes as long as copying takes, and is bounded by whoever does it.
_MOVE_WITHIN: Final = 3_600.0
#: How often it is tried to bring a lease back while its GPU has too little memory.
_TRIES: Final = 3


class Lost(Exception):
    """What a lease kept on its devices is lost; its processes have been killed."""


class ParkedMemory:
    """Moves the device memory of leases, where that can be done.

    ``store`` is the pool's file, beside which is recorded what was moved.
    """

    def __init__(self, store: Path, settings: PoolSettings, isolation: Isolation) -> None:
        self._folder = folder_beside(store)
        self._settings = settings
        self._isolation = isolation
        self._checkpoint = Checkpoint(self._folder, settings)
        #: By the UUID of a device: what hangs on one holds up no other.
        self._movers: dict[str, Worker] = {}
        # One of its own: whoever asks whether it can be done does not wait for what is being moved.
        self._prober = Worker("gpu-pool-probe")

    async def is_movable(self, lease: Lease) -> bool:
        """Whether it can be tried to move a held lease's memory off its devices."""
        return not await self._prober.run(lambda: self._unavailable(lease), _MOVE_WITHIN)

    def _unavailable(self, lease: Lease) -> str:
        tiers = [(part.device, self._isolation.tier(part.device).name) for part in lease.slices]
        return next(filter(None, (self._checkpoint.unavailable(*each) for each in tiers)), "")

    async def move_out(self, lease: Lease) -> None:
        """Take a held lease's memory off its devices. Raises ``NotAllowed`` where it stays, and ``Lost``."""
        await self._mover(lease).run(lambda: self._move_out(lease), _MOVE_WITHIN)

    def _mover(self, lease: Lease) -> Worker:
        device = _device(lease)
        if device not in self._movers:
            self._movers[device] = Worker("gpu-pool-memory")
        return self._movers[device]

    def _move_out(self, lease: Lease) -> None:
        process = lease.process
        why = self._unavailable(lease)
        if why or process is None:
            raise _kept(why or "nothing runs on it yet")
        try:
            users = users_of(process, lease.id, self._settings.tuning.cuda_device)
            self._checkpoint.suspend(lease.id, users, _device(lease))
        except NotSuspended as error:
            raise _kept(str(error)) from error
        except Broken as broken:
            raise _lost(broken) from broken

    async def move_back(self, lease: Lease) -> None:
        """Bring back what was moved, if anything was. Raises ``Lost``, and ``PoolUnreachable``."""
        if not self.holds(lease.id):
            return
        for _ in range(_TRIES):
            with contextlib.suppress(NotRestored):
                await self._mover(lease).run(lambda: self._move_back(lease.id), _MOVE_WITHIN)
                return
            await asyncio.sleep(self._settings.tuning.restored_every)
        raise PoolUnreachable(
            "Something else uses the GPU memory that this kernel needs to go on; its variables are kept.",
            "Ask the administrator what runs on the GPU, and run the cell again.",
        )

    def holds(self, lease_id: str) -> bool:
        """Whether something of this lease was moved out."""
        return (self._folder / lease_id).exists()

    def _move_back(self, lease_id: str) -> None:
        try:
            self._checkpoint.restore(lease_id)
        except Broken as broken:
            raise _lost(broken) from broken

    def recover(self, state: Callable[[str], LeaseState]) -> list[str]:
        """Mend what was cut off, before anything else is done; return the leases that are lost by it."""
        if not self._folder.is_dir():
            return []
        states: Mapping[str, LeaseState] = {each: state(each) for each in self._checkpoint.suspended()}
        broken = self._checkpoint.recover(states) if states else {}
        for each in broken.values():
            _kill(each.pids)
        return list(broken)

    def stop(self) -> None:
        """End the threads, and what asks the driver, after what they are doing."""
        for mover in self._movers.values():
            mover.stop()
        self._prober.submit(self._checkpoint.close)
        self._prober.stop()


def _device(lease: Lease) -> str:
    """Return the UUID of the device by which what is done to a lease's memory is put in order."""
    return min((part.device.uuid for part in lease.slices), default="")


def _kept(why: str) -> NotAllowed:
    return NotAllowed(
        "The slice cannot be lent to others: its process has initialised CUDA, or may have, and what it "
        f"keeps on the GPU would be in the way. It is not moved, since {why.rstrip('.')}.",
        "End the process to give the slice back.",
    )


def _lost(broken: Broken) -> Lost:
    _kill(broken.pids)
    return Lost(str(broken))


def _kill(pids: Collection[int]) -> None:
    # At once: a process whose device is gone may hang while it exits.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


T = TypeVar("T")

#: Seconds between two looks at whether the tiers still work: each starts processes.
_TEND_EVERY: Final = 20.0


class Enforcer:
    """Enforces the leases of one pool, as far as this process is the one to do it.

    The ``owner`` of the devices enforces all leases; any other process those
    that it keeps itself.
    """

    #: Where the leases are; set before anything is enforced.
    store: StoreThread
    #: The course files in front of the pool, by which the queue is served; None where there are none.
    courses: CourseFiles | None = None

    def __init__(self, path: Path, settings: PoolSettings, isolation: Isolation, *, owner: bool) -> None:
        self._isolation = isolation
        self._memory = ParkedMemory(path, settings, isolation)
        self._tiers = Worker("gpu-pool-tiers")
        self._path = path
        self._settings = settings
        self._owner = owner
        #: Taken by whichever thread starts the watchdog, and never let go of.
        self._watchdog_claim = threading.Lock()
        self._tended = 0.0
        self._watchdog: WatchdogThread | None = None

    def adapt(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """Make devices ready; return them as placement is to see them. Raises ``PoolUnreachable``."""
        try:
            return self._isolation.adapt(devices)
        except TierFailed as failure:
            raise PoolUnreachable(failure.message, failure.remedy) from failure

    def recover(self, lease_store: StoreContext) -> None:
        """Find what an earlier process of the pool has left, when the store is opened."""
        if self._isolation.acts:
            self._isolation.recover(held(lease_store))
        for lease_id in self._memory.recover(lambda each: _state(lease_store, each)):
            leases.end_lease(lease_store, lease_id, EndReason.NOT_RESTORED)

    def state(self, lease: Lease) -> Lease:
        """Return a lease with the truth about its limits, and whether it is watched over."""
        lease = self._isolation.state(lease)
        if lease.request.has_limit and lease.slices:
            lease = _without_effect(lease, self.allows_burst)
        if self._settings.device_names == INDEX and lease.state is LeaseState.HELD:
            lease = with_indices(lease, self._isolation)
        if self._owner or (self._settings.watchdog in ("warn", "end") and not lease.simulated):
            return replace(lease, terms=replace(lease.terms, revocable=True))
        return lease

    async def enforce(self, lease: Lease) -> None:
        """Enforce the limits of a held lease from now on."""
        if self._isolation.acts and self._isolation.must_open(lease):
            opened, others = await self._opened(), await self.store.run(held)
            await self._unless_it_fails(lease, lambda: self._isolation.enforce(lease, others, opened))
        if not lease.simulated:
            self._watch_over()

    async def attach(self, lease: Lease, process: Process) -> None:
        """Hold a process of the lease, and whatever it starts, to its limits."""
        if self._isolation.acts:
            await self._unless_it_fails(lease, lambda: self._isolation.attach(lease, process))

    async def is_movable(self, lease: Lease) -> bool:
        """Whether it can be tried to move what a lease keeps off its devices."""
        return await self._memory.is_movable(lease)

    def keeps(self, lease: Lease) -> bool:
        """Whether something was moved off a parked lease's devices, and must go back to the same."""
        return self._memory.holds(lease.id)

    async def suspend(self, lease: Lease) -> None:
        """Move what a lease keeps off its devices. Raises ``NotAllowed`` where it stays."""
        await self._unless_lost(lease.id, self._memory.move_out(lease))

    async def restore(self, lease: Lease) -> None:
        """Move back to its devices what was moved off them, if anything was."""
        await self._unless_lost(lease.id, self._memory.move_back(lease))

    async def settle(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """Enforce no more what is not held any more; ``living`` reads what is."""
        if not self._isolation.acts:
            return
        opened = await self._opened()
        leases = [lease for lease in await living() if lease.state is LeaseState.HELD]
        await self._on_tiers(lambda: self._isolation.settle(leases, opened))
        now = time.monotonic()
        if now >= self._tended + _TEND_EVERY:
            self._tended = now
            await self._tend()

    async def _tend(self) -> None:
        told = await self._on_tiers(self._isolation.tend)
        for lease_id, words in told.items():
            await self.store.run(leases.set_notice, lease_id, words)

    def allows_burst(self, device: Device) -> bool:
        """Whether what enforces slices of a device lets them have more for a while."""
        return not device.one_size and self._isolation.tier(device).allows_burst

    def memory_in_use(self) -> Mapping[str, Mapping[str, int]]:
        """Return what leases were last seen to use: MiB by lease id and device uuid."""
        return {} if self._watchdog is None else self._watchdog.memory_in_use

    async def close(self) -> None:
        """Enforce nothing that needs this process any more: devices on which no lease lives are as before."""
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.stop)
        if self._isolation.acts:
            with contextlib.suppress(PoolUnreachable):
                await self._leave(await self._opened(), await self.store.run(held))
        self._tiers.stop()
        self._memory.stop()

    async def _leave(self, opened: Iterable[Lease], leases: Iterable[Lease]) -> None:
        def leave() -> None:
            self._isolation.settle(leases, opened)
            self._isolation.stop()

        await self._on_tiers(leave)

    async def _unless_it_fails(self, lease: Lease, job: Callable[[], None]) -> None:
        """Enforce a lease further; end it where that fails, so that nobody holds what is not enforced."""
        try:
            await self._on_tiers(job)
        except (TierFailed, PoolUnreachable) as failure:
            await self._end(lease.id, EndReason.NOT_ENFORCED)
            raise PoolUnreachable(failure.message, failure.remedy) from failure

    async def _opened(self) -> tuple[Lease, ...]:
        """Return what is enforced, once what was begun is done: perhaps for nobody any more."""
        return await self._on_tiers(self._isolation.opened)

    async def _on_tiers(self, job: Callable[[], T]) -> T:
        """Run a job in the tiers' thread. Raises ``PoolUnreachable`` where that takes too long."""
        try:
            return await self._tiers.run(job, self._settings.enforced_within)
        except TimeoutError as error:
            within = self._settings.enforced_within
            raise PoolUnreachable(
                f"What enforces slices on this machine did not answer within {within:g} seconds.",
                "Ask the administrator to check the log of the service.",
            ) from error

    def _watch_over(self) -> None:
        """Start the watchdog with the first lease on a real device: no other has anything to measure."""
        if not self._watchdog_claim.acquire(blocking=False):
            return
        # Imported here because it costs some 40 ms, which simulated devices need not pay.
        from gpu_pool.enforcement.watchdog import OwnStore, WatchdogRules, WatchdogThread

        self._watchdog = WatchdogThread(
            OwnStore(self._path, self._settings, self.courses),
            WatchdogRules.of(self._settings, auto="end" if self._owner else "off"),
            watches=_all if self._owner else _kept_here,
            state=self._isolation.state,
            evict=self._evict,
        )
        self._watchdog.start()

    def _evict(self, lease: Lease, pids: Sequence[int]) -> None:
        """Take processes off the lease's devices; called by the watchdog, in its thread."""
        if self._isolation.acts:
            self._tiers.call(lambda: self._isolation.evict(lease, pids), self._settings.enforced_within)

    async def _unless_lost(self, lease_id: str, moving: Awaitable[None]) -> None:
        """Move what a lease keeps on its devices; end the lease where that is lost."""
        try:
            await moving
        except Lost:
            raise gone(await self._end(lease_id, EndReason.NOT_RESTORED)) from None

    async def _end(self, lease_id: str, reason: EndReason) -> Lease:
        await self.store.run(leases.end_lease, lease_id, reason, asked=False)
        return await self.store.run(leases.read, lease_id)


def held(lease_store: StoreContext) -> list[Lease]:
    """Return the leases that are held now."""
    return [lease for lease in leases.status(lease_store, "").leases if lease.state is LeaseState.HELD]


def _state(lease_store: StoreContext, lease_id: str) -> LeaseState:
    try:
        return leases.read(lease_store, lease_id).state
    except LeaseGone:
        return LeaseState.ENDED


def _all(_: Lease) -> bool:
    return True


def _kept_here(lease: Lease) -> bool:
    return lease.holder.process == Process.current()


def _without_effect(lease: Lease, allows_burst: Callable[[Device], bool]) -> Lease:
    """Say so where a limit above the guarantee changes nothing: on MIG instances, say, and under MPS."""
    if all(part.limit_mib and allows_burst(part.device) for part in lease.slices):
        return lease
    slices = tuple(
        part if allows_burst(part.device) else replace(part, limit_mib=0, burst_mib=0)
        for part in lease.slices
    )
    memory = lease.enforcement.memory
    memory = replace(memory, by=f"{memory.by}; the limit above it changes nothing here")
    return replace(lease, slices=slices, enforcement=replace(lease.enforcement, memory=memory))
