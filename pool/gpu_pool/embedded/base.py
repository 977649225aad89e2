"""What a pool in the caller's own process keeps open: its store, its devices' tiers and its audit log.

Also what its service asks for beyond the contract, what does not concern a lease, and
what pools that are more than this machine's decide in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from gpu_pool.audit import audit_log
from gpu_pool.clock import Clock
from gpu_pool.devices import Inventory, discover
from gpu_pool.devices.driver_check import DriverCheck
from gpu_pool.devices.inventory import Reading
from gpu_pool.devices.polling import DevicePoller
from gpu_pool.embedded.device_finder import DeviceFinder
from gpu_pool.embedded.expected_waits import ExpectedWaits
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.enforcer import Enforcer
from gpu_pool.enforcement.machine import owned, unowned
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.pool.reconciler import Facts, Reconciler, Step, StepCount
from gpu_pool.settings import PoolSettings
from gpu_pool.store.database import Database
from gpu_pool.store.device_table import SeenFrom
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.leases import LeaseStore
from gpu_pool.store.locks import Ownership
from gpu_pool.store.thread import ANSWER_WITHIN, StoreThread
from gpu_pool_client import (
    Device,
    DeviceStatus,
    EndedLease,
    KernelCommand,
    KernelPod,
    Lease,
    NeverFits,
    Pool,
    SliceRequest,
)
from gpu_pool_client._background import background_loop
from gpu_pool_client._processes import boot_id

if TYPE_CHECKING:
    from gpu_pool.caller import Caller
    from gpu_pool.courses.admission import CourseAdmission

#: Seconds between two transactions that keep less of what is old: they take a small part of the time.
_BETWEEN: Final = 0.1


#: Seconds after which it is looked again for devices where there were none.
_AGAIN_AFTER: Final = 5.0
#: How old, in seconds, what the driver says of the devices may be where nobody asks for any.
_SELDOM: Final = 10.0
#: Seconds without a sign of the process that keeps the pool in order after which another one does it.
_STANDS_STILL: Final = 2.5
#: The queue is served, although nothing has ended, whenever so many times as long has passed as that takes.
_SERVE_TIMES: Final = 20.0
#: Seconds in which the last pass ends when the pool is closed.
_LAST_PASS_WITHIN: Final = 5.0


class OpenedPool(Pool):
    """Opens the store, and registers the machine's devices, at the first call."""

    #: What deadlines go by.
    _clock = Clock()

    def __init__(
        self,
        path: Path,
        settings: PoolSettings | None = None,
        find_devices: Callable[[], Inventory] = discover,
        isolation: Isolation | None = None,
        *,
        owner: bool = False,
    ) -> None:
        self.url = f"embedded:{quote(str(path))}"
        self._path = path
        self._settings = settings or PoolSettings()
        self._find_devices = find_devices
        self._finder = DeviceFinder(self._find)
        self._driver = DriverCheck()
        #: Real devices of this machine, of which it is looked whether something new could use them.
        self._real_devices: Sequence[Device] = ()
        self._course_admission: CourseAdmission | None = None
        if self._settings.asks_courses:
            # Imported here because it costs some 150 ms, which most pools of one user need not pay.
            from gpu_pool.courses.admission import CourseAdmission

            self._course_admission = CourseAdmission(self._settings)
        self._owner = owner
        self._ownership: Ownership | None = None
        courses = self._course_admission
        follow = None if courses is None else courses.follow
        self._store = StoreThread(path, self._open, follow, self._finder.found)
        self._poller = DevicePoller()
        self._waits = ExpectedWaits()
        #: The real devices that are to take the place of simulated ones, once nobody uses those.
        self._awaited: Sequence[Device] = ()
        #: What whoever looks at the pool should know of it; empty for nothing.
        self.note = ""
        #: None where decisions are not written down.
        self.audit = audit_log(self._settings.audit_log)
        tiers = isolation or (owned if owner else unowned)(self._settings)
        self._enforcer = Enforcer(path, self._settings, tiers, self._store, owner=owner)
        self._reconciler = Reconciler(self._steps())
        #: The loop of passes; None where this process makes none by itself.
        self._passes: Future[None] | None = None
        self._starting = threading.Lock()
        #: When the queue is served next although nothing has happened (``time.monotonic()``).
        self._serve_at = 0.0

    async def __aenter__(self) -> OpenedPool:
        """Open the pool: whoever owns the devices keeps it in order from now on, whoever asks or not."""
        if self._owner:
            await self.reconcile()
            self._keep_in_order(asyncio.get_running_loop())
        return self

    # -- Keeping the pool in order -------------------------------------------

    async def reconcile(self) -> bool:
        """End what is over, serve the queue and make limits true, once; return whether anything changed.

        It is done by itself every second: by the owner of the devices, or by a process that has asked
        for slices.
        """
        return await self._reconciler.once()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called when something has happened by itself, in whatever thread."""
        self._reconciler.on_change.append(tell)

    @property
    def step_counts(self) -> Mapping[str, StepCount]:
        """How often each step of keeping the pool in order was done, by its name."""
        return self._reconciler.counts

    def _keep_in_order(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Make passes from now on: in this event loop, or in one of this process's own."""
        with self._starting:
            if self._passes is None:
                loop = loop or background_loop("reconciler")
                self._passes = asyncio.run_coroutine_threadsafe(self._reconciler.run(), loop)

    def _steps(self) -> Sequence[Step]:
        return (
            Step("observe", self._observe),
            Step("end what is gone", self._end_gone),
            Step("end what expired", self._end_expired),
            Step("serve the queue", self._serve_queue),
            Step("bind", self._bind),
            Step("unbind leftovers", self._unbind),
        )

    async def _observe(self, facts: Facts) -> bool:
        """See which processes are gone, and what the driver says."""
        if self._owner:
            await self._check_driver(_SELDOM)
        await self._store.run(self._look_around, facts)
        return False

    def _look_around(self, store: LeaseStore, facts: Facts) -> None:
        if self._awaited:
            with contextlib.suppress(OtherDevices):
                self._register_awaited(store)
        facts.leads = store.leads(_STANDS_STILL)
        facts.findings, facts.somebody_waits = store.findings(), store.somebody_waits()

    async def _end_gone(self, facts: Facts) -> bool:
        if not (facts.leads and facts.findings.dead):
            return False
        return await self._store.run(LeaseStore.end_gone, facts.findings)

    async def _end_expired(self, facts: Facts) -> bool:
        if not (facts.leads and facts.findings.overdue):
            return False
        return await self._store.run(LeaseStore.end_overdue, facts.findings)

    async def _serve_queue(self, facts: Facts) -> bool:
        """Grant to whoever's turn has come: since something has ended, and now and then as time decides."""
        began = time.monotonic()
        if not (facts.leads and facts.somebody_waits and (facts.findings or began >= self._serve_at)):
            return False
        granted = await self._store.run(LeaseStore.serve_queue)
        self._serve_at = began + _SERVE_TIMES * (time.monotonic() - began)
        return granted

    async def _bind(self, _: Facts) -> bool:
        """Enforce the limits of what is held and not enforced yet."""
        return await self._enforcer.bind()

    async def _unbind(self, _: Facts) -> bool:
        """Enforce no more what is not held any more."""
        await self._enforcer.settle()
        return False

    async def _end_passes(self) -> None:
        passes, self._passes = self._passes, None
        self._reconciler.stop()
        if passes is not None:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.wrap_future(passes), _LAST_PASS_WITHIN)

    # -- What is not about a lease -------------------------------------------

    @property
    def boot(self) -> str:
        """The boot of the machine whose end ends all leases; empty for a pool that outlives machines."""
        return boot_id()

    async def find(self, key: str) -> Lease | None:
        """Return the lease of a request's key, ended ones included; None if there was none."""
        return await self._store.run(LeaseStore.find, key)

    async def history(self, since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
        """See ``Pool.history``. With ``user``, of that user alone."""
        return await self._store.run(LeaseStore.history, since, user)

    async def forget_old(self) -> None:
        """Keep less of what ended long ago, in many short transactions."""
        while True:
            if not await self._store.run_alone(ANSWER_WITHIN, LeaseStore.forget_old):
                return
            await asyncio.sleep(_BETWEEN)

    async def course_versions(
        self, course: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file that were kept, see ``LeaseStore.course_versions``."""
        return await self._store.run(LeaseStore.course_versions, course, most, before)

    async def keep_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Keep versions of a course file; return the number of the last."""
        return await self._store.run(LeaseStore.add_course_versions, course, versions)

    async def remove_version(self, number: int) -> None:
        """Keep a version of a course file no longer."""
        await self._store.run(LeaseStore.remove_course_version, number)

    async def reread_course(self, file: str) -> None:
        """Follow a course file that has been replaced, at once."""
        if self._course_admission is None:
            return
        # Not followed before: the change is told as that of whoever asks.
        await self._store.run_alone(ANSWER_WITHIN, self._course_admission.reread, file)

    @property
    def device_problems(self) -> tuple[str, ...]:
        """What stood in the way when this machine's devices were looked for, in sentences."""
        found = self._finder.wait()
        # The last says how to go on where there is none.
        return found.problems if found.devices else found.problems[:-1]

    async def _check_driver(self, max_age: float, patience: float = 0.0) -> None:
        """Note which devices nothing new could use; see :meth:`_faults`."""
        faults = await self._faults(max_age, patience)
        if faults:
            await self._store.run(LeaseStore.set_faults, faults)

    async def _faults(self, max_age: float, patience: float = 0.0) -> Mapping[str, str]:
        """Return what is wrong with each device, by uuid, by a look that is no older than so many seconds.

        Waits ``patience`` seconds for it; where the driver is slower, nothing is known anew.
        """
        if not self._real_devices:
            return {}
        return await self._driver.look(self._real_devices, max_age, patience) or {}

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each of these does, real ones alone, by uuid; None for one that does not answer."""
        return await self._poller.look(devices)

    async def try_writing(self, within: float) -> None:
        """Try whether decisions can be kept. Raises ``PoolUnreachable`` where not, within so many seconds."""
        await self._store.run_alone(within, LeaseStore.try_writing)

    async def launch(
        self,
        lease_id: str,
        kernel: KernelCommand,
        *,
        caller: Caller | None = None,  # noqa: ARG002 - for pools that start kernels
    ) -> KernelPod:
        """See ``Pool.launch``."""
        return await super().launch(lease_id, kernel)

    async def pod(self, lease_id: str, seen: str = "", seconds: float = 0.0) -> KernelPod:  # noqa: ARG002
        """See ``Pool.pod``; ``seconds`` is for how long to wait for a change."""
        return await super().pod(lease_id, seen)

    def stop_waiting(self) -> None:
        """Let nobody wait any more for a change of a pod."""

    async def close(self) -> None:
        """Close the store once what was begun is done. Leases live on."""
        await self._end_passes()
        await self._poller.close()
        self._driver.close()
        self._finder.close()
        self._waits.close()
        await self._enforcer.close()
        await self._store.close()
        if self._ownership is not None:
            self._ownership.close()

    def _open(self, give_up_at: float | None) -> tuple[Database, LeaseStore]:
        """Open the store, and register this machine's devices in it."""
        found = self._finder.wait()
        devices = found.devices
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(Database(self._path)))
            ownership = opened.enter_context(contextlib.closing(Ownership(self._path, owner=self._owner)))
            database.keep(ownership.path)
            store = LeaseStore(database, self._settings, self._clock)
            # What is registered may serve the queue, whose order the course files know.
            if self._course_admission is not None:
                self._course_admission.follow(store)
            store.give_up_at = give_up_at
            # A process that sees no devices (no driver in its container, no variable
            # in its terminal) must not take away those that another one registered:
            # real ones never, simulated ones not before nobody uses them.
            if devices:
                self._register(store, devices)
            elif store.has_simulated():
                store.end_over()
                store.forget_simulated()
            self._real_devices = self._checkable(store, found)
            self._enforcer.recover(store)
            opened.pop_all()
        self._ownership = ownership
        return database, store

    def _find(self) -> Inventory:
        """Look for this machine's devices, and make them ready. Raises ``PoolUnreachable``."""
        found = self._find_devices()
        divided = self._settings.unified_memory_mib
        if divided:
            found = found.with_unified_memory(divided)
        self._driver.seen_well()
        return replace(found, devices=self._enforcer.adapt(found.devices))

    def _checkable(self, store: LeaseStore, found: Inventory) -> list[Device]:
        """Return the devices of which it is looked whether something new could use them.

        Where the driver fails, nothing new can use those that were here before.
        """
        devices: Sequence[Device] = found.devices
        if not found.by_driver:
            return []
        if found.is_broken or (self._owner and found.problems and not found.devices):
            here = store.present_devices(everywhere=self._owner)
            store.set_faults(dict.fromkeys(here, found.problems[0]))
            devices = tuple(here.values()) if self._owner else ()
        return [each for each in devices if not each.simulated and not each.node]

    async def _look_again_for_devices(self) -> None:
        """Look once more for this machine's devices where there were none: the driver may work by now."""
        found = await self._finder.found()
        if not found.devices and found.problems and self._finder.age > _AGAIN_AFTER:
            self._finder.forget()
            await self._finder.found()
            await self._store.run(self._register_found)

    def _register_found(self, store: LeaseStore) -> None:
        found = self._finder.wait()
        if found.devices:
            self._register(store, found.devices)
            self._real_devices = self._checkable(store, found)

    def _usable(self, store: LeaseStore) -> frozenset[str] | None:
        """Return the uuids of the devices that are for this process; None for all of the pool."""
        found = self._finder.wait()
        if self._owner or self._awaited or any(each.simulated for each in found.devices):
            return None
        if not found.devices and (store.has_simulated() or not found.problems):
            return None
        own = frozenset(each.uuid for each in found.devices)
        usable = own and (store.usable(own, self._seen_from(found), limited=found.is_limited) or own)
        # Whoever waits for any of them may also have what takes their place meanwhile.
        has_all = not found.is_limited and usable >= store.present_devices().keys()
        return None if has_all else usable

    def _own_devices(self, store: LeaseStore, request: SliceRequest) -> Collection[str]:
        """Return the uuids of the devices that a request of this process may have; none mean all.

        Raises ``NeverFits`` where there is none for it, with the reason.
        """
        usable, found = self._usable(store), self._finder.wait()
        if usable or found.devices or not found.problems:
            return usable or ()
        if usable is None and store.present_devices():
            return ()
        *why, way_out = found.problems
        raise NeverFits(f"You asked for {request.named}; this pool has no GPU. {' '.join(why)}", way_out)

    def _why_none(self, devices: Sequence[DeviceStatus]) -> tuple[str, ...]:
        """Say why none of the machine's devices is for this process, where there would be some."""
        found = self._finder.wait()
        there = not devices and (found.is_limited or found.is_broken)
        return self.device_problems if there else ()

    def _seen_from(self, found: Inventory) -> SeenFrom:
        """Return what this process sees. A service's pool has what the service has, and nothing else."""
        if self._owner:
            return LeaseStore.seen_from(everything=True)
        return LeaseStore.seen_from(found.digest, [each.uuid for each in found.hidden])

    def _register(self, store: LeaseStore, devices: Sequence[Device]) -> None:
        """Make these the pool's devices; where simulated ones are still in use, do so once they are not."""
        self._awaited, self.note = (), ""
        try:
            _take_over(store, devices, self._seen_from(self._finder.wait()))
        except OtherDevices as error:
            # Whoever holds the simulated ones must be found and ended, which takes an open pool.
            if self._owner or any(device.simulated for device in devices):
                raise
            self._awaited, self.note = devices, str(error)

    def _register_awaited(self, store: LeaseStore) -> None:
        """Register the devices that are awaited. Raises ``OtherDevices`` while those before are in use."""
        _take_over(store, self._awaited, self._seen_from(self._finder.wait()))
        self._awaited, self.note = (), ""


def _take_over(store: LeaseStore, devices: Sequence[Device], seen: SeenFrom) -> None:
    """Register devices, if need be after a look for leases whose processes are gone."""
    try:
        store.register(devices, seen)
    except OtherDevices:
        store.end_over()
        store.register(devices, seen)
