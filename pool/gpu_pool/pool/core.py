"""What all share who ask one pool: its store, its devices, and what keeps them in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote
from weakref import WeakValueDictionary

from gpu_pool.audit import audit_log
from gpu_pool.clock import Clock
from gpu_pool.devices.driver_check import DevicePoller
from gpu_pool.devices.inventory import Reading
from gpu_pool.enforcement.own_caps import OwnCaps
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.pool.backend import Backend, DevicesFound, Taken
from gpu_pool.pool.expected_waits import ExpectedWaits
from gpu_pool.pool.reconciler import SELDOM, SOON, PoolSteps, Reconciler
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.settings import PoolSettings
from gpu_pool.store import files, leases, records, registration
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.lease_table import gone
from gpu_pool.store.locks import Ownership
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import Device, Failure, GpuPoolError, Lease, LeaseGone, LeaseState, PoolUnreachable

if TYPE_CHECKING:
    from gpu_pool.courses.admission import CourseAdmission

#: How old, in seconds, what is known of the devices may be when a new request is decided.
FRESH: Final = 0.0
#: Seconds for which the driver's answer is awaited then.
DRIVER_WITHIN: Final = 3.0
#: Seconds that a forecast waits until devices which have just come are in the store.
_NOTED_WITHIN: Final = 2.0
#: Seconds between two checks of that.
_NOTED_EVERY: Final = 0.02
#: Seconds between two transactions that keep less of what is old: they take a small part of the time.
_BETWEEN: Final = 0.1
#: Requests that are being decided at the same time; the others wait for their turn here. In the
#: store they would be refused after some time, and what others ask of it would wait for them all.
_AT_ONCE: Final = 32


class PoolCore:
    """What all share who ask one pool, whoever they are: see :class:`gpu_pool.pool.pool.GpuPool`.

    The store at ``path`` is opened, and the devices are registered, by the first call. May be used from
    several event loops.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        settings: PoolSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = f"embedded:{quote(str(path))}"
        self.backend = backend
        self.settings = settings or PoolSettings()
        self._path, self._clock = path, clock or Clock()
        #: The course files in front of the pool; None where nobody asks them.
        self.courses: CourseAdmission | None = None
        if self.settings.asks_courses:
            # Imported here because it costs some 150 ms, which most pools of one user need not pay.
            from gpu_pool.courses.admission import CourseAdmission

            self.courses = CourseAdmission(self.settings)
        self._ownership: Ownership | None = None
        self.registry = DeviceRegistry(is_owner=backend.is_owner)
        self._found: DevicesFound | None = None
        self.store = StoreThread(path, self._open, self._find_devices)
        self._poller = DevicePoller()
        self.waits = ExpectedWaits()
        self.own_caps = OwnCaps()
        #: None where decisions are not written down.
        self.audit = audit_log(self.settings.audit_log)
        #: Held while a request is decided, where one process decides for many.
        self.turns = asyncio.Semaphore(_AT_ONCE) if backend.is_owner else None
        #: Held while a lease's kernel is launched or ended, by the lease's id.
        self.launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._backend_runs = contextlib.AsyncExitStack()
        self._is_closed = False
        backend.join(self)
        self._steps = PoolSteps(self)
        self.reconciler = Reconciler(self._steps.all(), self.settings.tuning.passes_every)

    # -- Opening, keeping in order, closing ------------------------------------

    async def open(self) -> None:
        """Open the pool: whoever owns the devices keeps it in order from now on, whoever asks or not."""
        if not self.backend.is_owner:
            return
        try:
            await self._backend_runs.enter_async_context(self.backend.run())
            await self.store.run(_nothing)  # a store that cannot be opened is told now
            with contextlib.suppress(GpuPoolError):  # logged, and tried again
                await self.reconciler.once()
        except BaseException:
            await self.close()
            raise
        self.reconciler.begin(asyncio.get_running_loop())

    async def close(self) -> None:
        """Close the store once what was begun is done, if that was not done yet. Leases live on."""
        if self._is_closed:
            return
        self._is_closed = True
        await self.reconciler.end()
        await self._backend_runs.aclose()
        await self._poller.close()
        self.waits.close()
        await self.backend.close()
        await self.store.close()
        if self._ownership is not None:
            self._ownership.close()

    def keep_in_order(self) -> None:
        """Take part in keeping the pool in order, as those do who hold or await a slice."""
        if not self.backend.is_owner:
            self.reconciler.begin()

    def wake(self) -> None:
        """Have the pool look soon, since something has changed."""
        self.reconciler.wake()

    def last_write(self) -> tuple[int, int]:
        """Return what is another value once anything has been decided, by whichever process."""
        return files.last_write(self._path)

    async def until_written(self, seen: tuple[int, int], every: float, within: float) -> None:
        """Return once anything has been decided since :meth:`last_write` was ``seen``, by whichever process.

        Parameters
        ----------
        seen
            What it was before the caller looked at the pool.
        every
            Seconds between two looks at the file, which cost some microseconds.
        within
            Seconds after which to return although nothing was seen.
        """
        give_up_at = time.monotonic() + within
        while (left := give_up_at - time.monotonic()) > 0:
            await asyncio.sleep(min(every, left))
            if self.last_write() != seen:
                return

    def follow_bursts(self, lease: Lease) -> None:
        """Have the pool look soon where others have on top what was just granted, or this one may."""
        if lease.limit_mib or self._steps.may_burst:
            self.wake()

    async def _find_devices(self) -> None:
        self._found = await self.backend.devices(SELDOM)

    def _open(self, give_up_at: float | None) -> StoreContext:
        """Open the store, and register what was found in it."""
        if self._found is None:
            raise PoolUnreachable("The pool was not opened.", "Ask it for something first.")
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(Database(self._path)))
            owner = self.backend.is_owner
            ownership = opened.enter_context(contextlib.closing(Ownership(self._path, owner=owner)))
            database.keep(ownership.path)
            store = StoreContext(database, self.settings, self._clock, self.courses)
            # What is registered may serve the queue, whose order the course files know.
            store.follow_files()
            store.give_up_at = give_up_at
            self.registry.open(store, self._found)
            self.backend.recover(store)
            opened.pop_all()
        self._ownership = ownership
        return store

    # -- Devices -----------------------------------------------------------------

    async def refresh(self, max_age: float, patience: float = 0.0) -> None:
        """Write down which devices there are, and which of them work, by a look that is not older."""
        found = await self.backend.devices(max_age, patience, self.registry.known)
        if self.registry.may_be_news(found):
            await self.store.run(self.registry.write_down, found)

    async def until_noted(self) -> None:
        """Wait until what there is now is written down: whoever only asks writes nothing."""
        give_up_at = time.monotonic() + _NOTED_WITHIN
        while self.reconciler.is_running and time.monotonic() < give_up_at:
            found, noted = await self.backend.devices(SELDOM), self.registry.noted
            if noted is not None and noted.inventory == found.inventory:
                return
            self.wake()
            await asyncio.sleep(_NOTED_EVERY)

    async def device_fault(self) -> str:
        """Say why nothing new can run on any of this machine's devices; empty where something can."""
        now = (await self.backend.devices(SOON, DRIVER_WITHIN, self.registry.known)).faults
        devices = await self.store.run(registration.present_devices)
        faults = [now.get(uuid, device.fault) for uuid, device in devices.items()]
        return " ".join(dict.fromkeys(faults)) if faults and all(faults) else ""

    async def read_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each of these does, real ones of this machine alone, by uuid; None for no answer."""
        return await self._poller.readings([device for device in devices if not device.node])

    # -- What happens to leases by itself ------------------------------------------

    async def living(self, lease_id: str) -> Lease:
        """Return a lease that has not ended. Raises ``LeaseGone``."""
        lease = await self.store.run(leases.read, lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        return self.described(lease)

    def described(self, lease: Lease) -> Lease:
        """Return a lease with what the store does not know of it: its limits, or its place elsewhere."""
        if lease.state not in (LeaseState.HELD, LeaseState.PARKED):
            return lease
        if lease.place is not None and self.backend.queue is not None:
            lease = replace(lease, place=self.backend.queue.place(lease.id) or lease.place)
        return self.backend.describe(lease)

    async def end_taken(self, lease_id: str, taken: Taken) -> bool:
        """End a lease since what it needs is gone; return whether it had not ended yet."""
        # What can no longer be given must not be granted to whoever waits.
        await self.refresh(SELDOM)
        try:
            await self.store.run(leases.revoke, lease_id, taken.message, taken.reason)
        except LeaseGone:
            return False
        await self.withdraw_outside(lease_id)
        return True

    async def withdraw_outside(self, lease_id: str) -> None:
        """Let what has ended leave somebody else's queue, and all else that it had."""
        if self.backend.queue is not None:
            await self.backend.queue.withdraw(lease_id)
        self.reconciler.wake()

    async def record_failure(self, lease_id: str, failure: Failure) -> None:
        """Record how a lease's kernel has failed by itself."""
        await self.store.run(leases.record_failure, lease_id, failure)

    # -- The store, and the course files in front of it ------------------------------

    async def forget_old(self) -> None:
        """Keep less of what ended long ago, in many short transactions."""
        while True:
            if not await self.store.run_alone(self.store.answer_within, records.forget_old):
                return
            await asyncio.sleep(_BETWEEN)

    async def try_writing(self, within: float) -> None:
        """Try whether decisions can be kept. Raises ``PoolUnreachable`` where not, within so many seconds."""
        await self.store.run_alone(within, records.try_writing)

    async def course_versions(
        self, course: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file that were kept, see ``records.course_versions``."""
        return await self.store.run(records.course_versions, course, most, before)

    async def keep_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Keep versions of a course file; return the number of the last."""
        return await self.store.run(records.add_course_versions, course, versions)

    async def remove_version(self, number: int) -> None:
        """Keep a version of a course file no longer."""
        await self.store.run(records.remove_course_version, number)

    async def reread_course(self, file: str) -> None:
        """Follow a course file that has been replaced, at once."""
        if self.courses is not None:
            # Not followed before: the change is told as that of whoever asks.
            await self.store.run_alone(self.store.answer_within, _follow_changed, self.courses, file)

    def stop_waiting(self) -> None:
        """Let nobody wait any more for a change of a pod."""
        if self.backend.host is not None:
            self.backend.host.stop_waiting()


def _nothing(_: StoreContext) -> None:
    """Do nothing in the store, which is open then."""


def _follow_changed(store: StoreContext, courses: CourseAdmission, file: str) -> None:
    courses.reread(file)
    store.follow_files(asked=True)
