"""The one pool: every rule about leases, over a store that others may share and a backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, final
from urllib.parse import quote
from weakref import WeakValueDictionary

from gpu_pool.audit import AuditLog, acting, audit_log, refusals, this_process
from gpu_pool.clock import Clock
from gpu_pool.devices.activity import activity_of, in_own_thread, uses_cuda
from gpu_pool.devices.driver_check import DevicePoller
from gpu_pool.devices.inventory import Reading
from gpu_pool.enforcement.tiers import with_own_caps
from gpu_pool.policy.revocation import effect_of
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.pool.backend import Backend, DevicesFound, KernelHost, Taken
from gpu_pool.pool.expected_waits import ExpectedWaits
from gpu_pool.pool.passes import SELDOM, Passes
from gpu_pool.pool.reconciler import StepCount
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.settings import PoolSettings
from gpu_pool.store.database import Database
from gpu_pool.store.lease_table import gone, lease_number
from gpu_pool.store.leases import LeaseStore
from gpu_pool.store.locks import Ownership
from gpu_pool.store.queue import QueueForecast
from gpu_pool.store.thread import ANSWER_WITHIN, StoreThread
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    DeviceStatus,
    Effect,
    EndedLease,
    EndReason,
    Failure,
    GpuPoolError,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NeverFits,
    NotAllowed,
    Outlook,
    PodPhase,
    PoolStatus,
    PoolUnreachable,
    Process,
    SliceRequest,
)
from gpu_pool_client import Pool as Contract

if TYPE_CHECKING:
    from gpu_pool.caller import Caller
    from gpu_pool.courses.admission import CourseAdmission

#: How often a waiter reads its place: a few microseconds of work each time.
_POLL: Final = 0.1
#: How old, in seconds, the look may be by which it is decided that something new can use the devices; for
#: how long it is waited for. And how old it may be for those who wait.
_FRESH, _DRIVER_WITHIN, _SOON = 0.0, 3.0, 3.0
#: Seconds that a forecast waits for what has just come to be written down, and between two looks at that.
_NOTED_WITHIN, _NOTED_EVERY = 2.0, 0.02
#: Seconds between two transactions that keep less of what is old: they take a small part of the time.
_BETWEEN: Final = 0.1
#: Seconds for which news of a pod are waited for, unless it is said.
_POD_POLL: Final = 25.0
#: Requests that are being decided at the same time; the others wait for their turn here. In the
#: store they would be refused after some time, and what others ask of it would wait for them all.
_AT_ONCE: Final = 32
#: Around what nobody waits for.
_NO_TURNS: Final = contextlib.nullcontext()
#: Around what is done where decisions are not written down.
_NOT_AUDITED: Final = contextlib.nullcontext()
#: Leases that are stated at a stretch.
_AT_A_TIME: Final = 250


@final
class Pool(Contract):
    """Leases of slices of a backend's devices, in the store at ``path``.

    The store is opened, and the devices are registered, by the first call. Where the backend's devices
    are this process's alone, the pool is kept in order from ``async with`` on; else by one of those
    processes that have asked for slices. It may be used from several event loops. What a method does
    and raises, the contract says.
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
        self._path = path
        self._settings = settings or PoolSettings()
        self._clock = clock or Clock()
        self._course_admission: CourseAdmission | None = None
        if self._settings.asks_courses:
            # Imported here because it costs some 150 ms, which most pools of one user need not pay.
            from gpu_pool.courses.admission import CourseAdmission

            self._course_admission = CourseAdmission(self._settings)
        self._ownership: Ownership | None = None
        self.registry = DeviceRegistry(is_owner=backend.is_owner)
        self._found: DevicesFound | None = None
        courses = self._course_admission
        follow = None if courses is None else courses.follow
        self.store = StoreThread(path, self._open, follow, self._find_devices)
        self._poller = DevicePoller()
        self._waits = ExpectedWaits()
        #: None where decisions are not written down.
        self.audit = audit_log(self._settings.audit_log)
        self._turns = asyncio.Semaphore(_AT_ONCE) if backend.is_owner else None
        self._launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._backend_runs = contextlib.AsyncExitStack()
        backend.join(self)
        self._passes = Passes(self)

    @property
    def boot(self) -> str:
        """The boot of the machine whose end ends all leases; empty for a pool that outlives machines."""
        return self.backend.boot

    # -- Opening, keeping in order, closing ------------------------------------

    async def __aenter__(self) -> Pool:
        """Open the pool: whoever owns the devices keeps it in order from now on, whoever asks or not."""
        if self.backend.is_owner:
            try:
                await self._backend_runs.enter_async_context(self.backend.run())
                await self.store.run(_nothing)  # a store that cannot be opened is told now
                with contextlib.suppress(GpuPoolError):  # logged, and tried again
                    await self.reconcile()
            except BaseException:
                await self.close()
                raise
            self._passes.begin(asyncio.get_running_loop())
        return self

    async def close(self) -> None:
        """Close the store once what was begun is done. Leases live on."""
        await self._passes.end()
        await self._backend_runs.aclose()
        await self._poller.close()
        self._waits.close()
        await self.backend.close()
        await self.store.close()
        if self._ownership is not None:
            self._ownership.close()

    async def reconcile(self) -> bool:
        """End what is over, serve the queue and make limits true, once; return whether anything changed.

        It is done by itself every second: by the owner of the devices, or by a process that has asked
        for slices.
        """
        return await self._passes.once()

    def wake(self) -> None:
        """Have a pass made soon, since something has changed."""
        self._passes.wake()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called when something has happened by itself, in whatever thread."""
        self._passes.on_change.append(tell)

    @property
    def step_counts(self) -> Mapping[str, StepCount]:
        """How often each step of keeping the pool in order was done, by its name."""
        return self._passes.counts

    async def _find_devices(self) -> None:
        self._found = await self.backend.devices(SELDOM)

    def _open(self, give_up_at: float | None) -> tuple[Database, LeaseStore]:
        """Open the store, and register what was found in it."""
        if self._found is None:
            raise PoolUnreachable("The pool was not opened.", "Ask it for something first.")
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(Database(self._path)))
            owner = self.backend.is_owner
            ownership = opened.enter_context(contextlib.closing(Ownership(self._path, owner=owner)))
            database.keep(ownership.path)
            store = LeaseStore(database, self._settings, self._clock)
            # What is registered may serve the queue, whose order the course files know.
            if self._course_admission is not None:
                self._course_admission.follow(store)
            store.give_up_at = give_up_at
            self.registry.open(store, self._found)
            self.backend.recover(store)
            opened.pop_all()
        self._ownership = ownership
        return database, store

    async def refresh(self, max_age: float, patience: float = 0.0) -> None:
        """Write down which devices there are, and which of them work, by a look that is not older."""
        found = await self.backend.devices(max_age, patience, self.registry.known)
        if found != self.registry.noted:
            await self.store.run(self._write_down, found)

    def _write_down(self, store: LeaseStore, found: DevicesFound) -> None:
        self.registry.write_down(store, found)

    async def _until_noted(self) -> None:
        """Wait until what there is now is written down: whoever only asks writes nothing."""
        give_up_at = time.monotonic() + _NOTED_WITHIN
        while self._passes.are_made and time.monotonic() < give_up_at:
            found, noted = await self.backend.devices(SELDOM), self.registry.noted
            if noted is not None and noted.inventory == found.inventory:
                return
            self.wake()
            await asyncio.sleep(_NOTED_EVERY)

    # -- Requests --------------------------------------------------------------

    async def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        *,
        caller: Caller | None = None,
    ) -> Lease:
        """See ``Pool.request``. What is over is ended first where nothing is free.

        Asked in the name of ``caller``; None for this process, whose user the system knows.
        """
        with self._asked(user=holder.user, course=holder.course, request=request):
            async with self._turns or _NO_TURNS:
                return await self._request(request, holder, key, caller)

    async def _request(self, request: SliceRequest, holder: Holder, key: str, caller: Caller | None) -> Lease:
        mark = os.urandom(4).hex()
        try:
            if self.backend.queue is not None or self.backend.host is not None:
                # One that is known is answered, whatever there would be for a new one by now.
                found = await self.find(key)
                if found is not None:
                    return await self._bound(found)
            courses = self._course_admission
            check = None if courses is None else await courses.check_of(request, holder, caller)
            await self.refresh(_FRESH, _DRIVER_WITHIN)
            counted, within = await self.backend.adapt(request, holder, caller)
            lease = await self.store.run(self._decide, counted, holder, key, check, within, mark)
            self._keep_in_order()
            if self.backend.queue is not None and lease.state is LeaseState.HELD:
                await self.backend.queue.submit(lease)
            return await self._bound(lease)
        except (asyncio.CancelledError, PoolUnreachable):
            # The decision may still be made, or has been, and nobody would know of it.
            self.store.run_later(LeaseStore.release_key, key, EndReason.WITHDRAWN, mark)
            raise

    def _decide(
        self,
        store: LeaseStore,
        request: SliceRequest,
        holder: Holder,
        key: str,
        check: Callable[[], None] | None,
        within: Collection[str],
        mark: str,
    ) -> Lease:
        """Ask in the store's thread, and end what is over if it has to wait."""
        self.registry.register_awaited(store)
        try:
            within = within or self.registry.devices_for(store, request)
        except NeverFits:
            known = store.find(key)  # whatever would be said of a new one by now
            if known is None:
                raise
            return known
        lease = store.request(request, holder, key, check, within, mark)
        if lease.state is LeaseState.WAITING:
            store.end_over()
            lease = store.lease(lease.id)
        return lease

    def _keep_in_order(self) -> None:
        """Take part in keeping the pool in order, as those do who hold or await a slice."""
        if not self.backend.is_owner:
            self._passes.begin()

    async def _bound(self, lease: Lease) -> Lease:
        """Return a lease that takes effect from now on, if it is held."""
        return await self.backend.bind(lease) if lease.state is LeaseState.HELD else lease

    async def _restored(self, lease: Lease) -> Lease:
        """Return the same for one that may have been parked: with what it keeps on its devices."""
        lease = await self._bound(lease)
        if lease.state is LeaseState.HELD and self.backend.suspension is not None:
            await self.backend.suspension.restore(lease)
        return lease

    async def find(self, key: str) -> Lease | None:
        """Return the lease of a request's key, ended ones included; None if there was none."""
        return await self.store.run(LeaseStore.find, key)

    async def get_lease(self, lease_id: str) -> Lease:
        """See ``Pool.get_lease``."""
        lease = await self.store.run(LeaseStore.lease, lease_id)
        return self.backend.describe(lease) if lease.state is LeaseState.HELD else lease

    async def living(self, lease_id: str) -> Lease:
        """Return a lease that has not ended. Raises ``LeaseGone``."""
        lease = await self.get_lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        return lease

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        self._keep_in_order()
        while True:
            await self.refresh(_SOON)
            lease = await self.store.run(LeaseStore.lease, lease_id)
            if lease.state is LeaseState.HELD:
                return await self._restored(lease)
            _refuse_unless_waiting(lease)
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise await self.store.run(LeaseStore.shortage, lease_id)
            await asyncio.sleep(_POLL)

    async def _abandon(self, lease_id: str) -> None:
        with self._asked(lease=lease_id):
            self.store.run_later(LeaseStore.release, lease_id, EndReason.WITHDRAWN)

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        last: Lease | None = None
        while last is None or last.state is not LeaseState.ENDED:
            await self.refresh(_SOON)
            lease = await self._bound(await self.store.run(LeaseStore.lease, lease_id))
            if lease != last:
                yield lease
            last = lease
            await asyncio.sleep(_POLL)

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``."""
        if self._waits.are_due:
            prospects = await self.store.run(LeaseStore.prospects)
            if prospects is not None:
                await self._waits.learn(prospects)
        outlook = await self.store.run(LeaseStore.explain, lease_id)
        outlook = replace(outlook, wait=self._waits.of(lease_number(lease_id)))
        if self.backend.capacity is None:
            return outlook
        request = (await self.get_lease(lease_id)).request
        return self.backend.capacity.expected(outlook, request, lease_number(lease_id))

    async def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        *,
        caller: Caller | None = None,
    ) -> Outlook | None:
        """See ``Pool.forecast``, and :meth:`request`. Nobody knows in which courses somebody new is."""
        check, courses = None, self._course_admission
        if holder.user and courses is not None:
            check = await courses.check_of(request, holder, caller)
        await self._until_noted()
        counted, within = await self.backend.adapt(request, holder, caller)
        found = await self.store.run(self._forecast, counted, holder, check, within)
        if found is None:
            return None
        outlook = found.outlook
        if found.prospects is not None:
            outlook = replace(outlook, wait=await self._waits.foresee(found.number, found.prospects))
        capacity = self.backend.capacity
        return outlook if capacity is None else capacity.expected(outlook, request, None)

    def _forecast(
        self,
        store: LeaseStore,
        request: SliceRequest,
        holder: Holder,
        check: Callable[[], None] | None,
        within: Collection[str],
    ) -> QueueForecast | None:
        self.registry.refuse_awaited()
        return store.forecast(request, holder, check, within or self.registry.devices_for(store, request))

    async def offers(
        self, holder: Holder, *, caller: Caller | None = None
    ) -> tuple[SliceRequest, ...] | None:
        """See ``Pool.offers``, and :meth:`request`."""
        courses = self._course_admission
        if courses is None:
            return None
        return await self.store.run(courses.offers, holder, await courses.groups(holder, caller))

    # -- Leases ----------------------------------------------------------------

    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """See ``Pool.attach``."""
        lease = await self.store.run(LeaseStore.attach, lease_id, process, ready_within, grace)
        return await self.backend.bind(lease, process) if lease.state is LeaseState.HELD else lease

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """See ``Pool.renew``."""
        return await self._bound(await self.store.run(LeaseStore.renew, lease_id, ttl))

    async def activity(self, lease_id: str) -> Activity:
        """See ``Pool.activity``."""
        lease = await self.living(lease_id)
        if lease.state is LeaseState.PARKED:
            # It has no device to look at, and its process may yet have used one.
            cuda = self._settings.tuning.cuda_device
            return Activity(initialised=await in_own_thread(uses_cuda, lease.process, lease.id, cuda))
        found, suspension = await self._activity(lease), self.backend.suspension
        if self._settings.checkpoint and found.initialised and suspension is not None:
            return replace(found, movable=await suspension.is_movable(lease))
        return found

    async def _activity(self, lease: Lease) -> Activity:
        """Look at what a lease's processes do, which takes some time on a machine with many."""
        if self.backend.host is not None:
            return self.backend.host.activity(lease.id)
        who = lease.process, lease.slices, lease.id, lease.holder.process
        return await in_own_thread(activity_of, *who, self._settings.tuning.cuda_device)

    async def resize(
        self,
        lease_id: str,
        request: SliceRequest,
        *,
        ahead: bool = False,
        caller: Caller | None = None,
    ) -> Lease:
        """See ``Pool.resize``. Asked in the name of ``caller``, by default this process."""
        with self._asked(lease=lease_id, request=request):
            return await self._resize(lease_id, request, caller, ahead=ahead)

    async def _resize(
        self,
        lease_id: str,
        request: SliceRequest,
        caller: Caller | None,
        *,
        ahead: bool,
    ) -> Lease:
        lease = await self._own(lease_id, caller, "change its size")
        ahead = ahead and lease.state is LeaseState.HELD
        counted, courses = (await self.backend.adapt(request)).counted, self._course_admission
        check = None if courses is None else await courses.check_of(request, lease.holder, caller)
        if not ahead and ((await self._activity(lease)).initialised is not False or self._keeps_state(lease)):
            # Nobody ends a process for a size that they could not have then either.
            await self.store.run(LeaseStore.check_resize, lease_id, counted, check)
            raise NotAllowed(
                "The slice cannot change its size: its process has initialised CUDA, or may have, "
                "and what it keeps on the GPU would be in the way.",
                "End the process to give the slice back.",
            )
        return await self._bound(
            await self.store.run(LeaseStore.resize, lease_id, counted, check, ahead=ahead)
        )

    def _keeps_state(self, lease: Lease) -> bool:
        return self.backend.suspension is not None and self.backend.suspension.keeps(lease)

    async def park(self, lease_id: str, *, caller: Caller | None = None) -> Lease:
        """See ``Pool.park``. Asked in the name of ``caller``, by default this process."""
        if self.backend.host is not None and self.backend.host.has_kernel(lease_id):
            raise NotAllowed(
                "The slice of a kernel in a pod cannot be lent to others.", "End the kernel to give it back."
            )
        with self._asked(lease=lease_id):
            lease = await self._own(lease_id, caller, "be lent to others")
            suspension = self.backend.suspension
            if suspension is None or (await self._activity(lease)).initialised is False:
                return await self.store.run(LeaseStore.park, lease_id)
            await suspension.suspend(lease)
            try:
                return await self.store.run(LeaseStore.park, lease_id)
            except BaseException:
                await suspension.restore(lease)
                raise

    async def count(self, lease_id: str, *, waits: bool) -> Lease:
        """Count nothing for a lease that waits in somebody else's queue, and its slice for any other."""
        if waits:
            return await self.store.run(LeaseStore.park, lease_id, queued=True)
        return await self.store.run(LeaseStore.resume, lease_id)

    async def _own(self, lease_id: str, caller: Caller | None, what: str) -> Lease:
        """Return a lease; refuse, with ``NotAllowed``, to take its slices away in another's name."""
        lease = await self.living(lease_id)
        if lease.holder.process != (caller.process if caller else Process.current()):
            raise NotAllowed(
                f"The slice cannot {what}: only the process that asked for it knows whether it is in use.",
                "Release it to take it back.",
            )
        return lease

    async def resume(self, lease_id: str) -> Lease:
        """See ``Pool.resume``."""
        with self._asked(lease=lease_id):
            await self.refresh(_FRESH, _DRIVER_WITHIN)
            return await self._restored(await self.store.run(LeaseStore.resume, lease_id))

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        with self._asked(lease=lease_id):
            await self.store.run(LeaseStore.release, lease_id, reason)
        await self._withdraw_outside(lease_id)

    async def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, by default in an administrator's name; its holder reads ``message``.

        Raises ``LeaseGone``.
        """
        with self._asked(lease=lease_id):
            await self.store.run(LeaseStore.revoke, lease_id, message, reason)
        await self._withdraw_outside(lease_id)

    async def _withdraw_outside(self, lease_id: str) -> None:
        """Let what has ended leave somebody else's queue, and all else that it had."""
        if self.backend.queue is not None and self.backend.queue.waits(lease_id):
            await self.backend.queue.withdraw(lease_id)
        self.wake()

    async def end_taken(self, lease_id: str, taken: Taken) -> bool:
        """End a lease since what it needs is gone; return whether it had not ended yet."""
        # What can no longer be given must not be granted to whoever waits.
        await self.refresh(SELDOM)
        try:
            await self.revoke(lease_id, taken.message, taken.reason)
        except LeaseGone:
            return False
        return True

    async def record_failure(self, lease_id: str, failure: Failure) -> None:
        """Record how a lease's kernel has failed by itself."""
        await self.store.run(LeaseStore.record_failure, lease_id, failure)

    # -- Kernels that run elsewhere ----------------------------------------------

    async def launch(
        self, lease_id: str, kernel: KernelCommand, *, caller: Caller | None = None
    ) -> KernelPod:
        """See ``Pool.launch``."""
        host = await self._host(lease_id, kernel)
        async with self._launching.setdefault(lease_id, asyncio.Lock()):
            lease = await self.living(lease_id)
            if lease.state is LeaseState.PARKED and self.backend.queue is not None:
                lease = await self.count(lease_id, waits=False)  # its kernel waits in somebody else's queue
            if lease.state is not LeaseState.HELD:
                raise BadRequest(f"The lease is {lease.state.value}.", "Start the kernel once it is held.")
            found = await host.launch(lease, kernel, caller)
            if found.phase is PodPhase.QUEUED:
                await self.count(lease_id, waits=True)
        return found

    async def _host(self, lease_id: str, kernel: KernelCommand | None = None) -> KernelHost:
        if self.backend.host is None:
            if kernel is not None:
                await super().launch(lease_id, kernel)
            await super().pod(lease_id)
        assert self.backend.host is not None
        return self.backend.host

    async def pod(self, lease_id: str, seen: str = "", seconds: float = _POD_POLL) -> KernelPod:
        """See ``Pool.pod``; ``seconds`` is for how long to wait for news."""
        return await (await self._host(lease_id)).follow(lease_id, seen, seconds)

    async def end_pod(self, lease_id: str) -> None:
        """See ``Pool.end_pod``."""
        host = await self._host(lease_id)
        await self.living(lease_id)
        async with self._launching.setdefault(lease_id, asyncio.Lock()):  # what is being started is ended too
            await host.end(lease_id)

    def stop_waiting(self) -> None:
        """Let nobody wait any more for a change of a pod."""
        if self.backend.host is not None:
            self.backend.host.stop_waiting()

    # -- Taking slices back --------------------------------------------------------

    async def effect_of_taking(self, lease_id: str) -> Effect:
        """Say what becomes of a lease's kernel if its slices are taken back now. Raises ``LeaseGone``."""
        lease = await self.living(lease_id)
        is_kernel = await self.store.run(LeaseStore.has_manager, lease_id)
        return effect_of(lease, await self._activity(lease), is_kernel=is_kernel)

    async def withdraw(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Take a lease's slices from its kernel, which lives on: the lease is parked.

        ``reason`` says by whom: RELEASED by its user, REVOKED by an administrator, who says why in
        ``message``.
        Raises ``NotAllowed`` where that would end the kernel, and ``LeaseGone``.
        """
        with self._asked(lease=lease_id):
            if await self.effect_of_taking(lease_id) is not Effect.KEEPS_KERNEL:
                raise NotAllowed(
                    "The slice cannot go without its kernel, which has used the GPU.",
                    "Take it back when the kernel is idle, or end the kernel.",
                )
            return await self.store.run(LeaseStore.ask_back, lease_id, message, reason, now=True)

    async def ask_back(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Let a kernel's slice go as soon as it is idle; see :meth:`withdraw`."""
        with self._asked(lease=lease_id):
            if not await self.store.run(LeaseStore.has_manager, lease_id):
                raise BadRequest(
                    "Only a kernel's slice can be taken back when it is idle.", "Take it back now."
                )
            return await self.store.run(LeaseStore.ask_back, lease_id, message, reason, now=False)

    # -- The pool ------------------------------------------------------------------

    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """See ``Pool.drain``."""
        with self._asked(device=device):
            return await self.store.run(LeaseStore.drain, device, drained)

    async def status(self) -> PoolStatus:
        """See ``Pool.status``."""
        faults = (await self.backend.devices(SELDOM, known=self.registry.known)).faults
        status = await self.store.run(self._status, faults)
        return replace(status, leases=tuple([each async for each in self._described(status.leases)]))

    def _status(self, store: LeaseStore, faults: Mapping[str, str]) -> PoolStatus:
        status, registry = store.status(self.url), self.registry
        usable = registry.usable(store)
        others = set() if usable is None else store.present_devices().keys() - usable
        devices = [
            _with_fault(each, faults.get(each.device.uuid, each.device.fault))
            for each in status.devices
            if each.device.uuid not in others
        ]
        told = dict.fromkeys(each.device.fault for each in devices)
        said = " ".join(filter(None, (registry.note, *told, *registry.why_none(devices))))
        return replace(status, devices=tuple(devices), note=said)

    async def _described(self, leases: Sequence[Lease]) -> AsyncIterator[Lease]:
        """Yield leases with the truth about their limits; of thousands, others are answered in between."""
        for number, lease in enumerate(leases, 1):
            yield with_own_caps(self.backend.describe(lease))
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    async def device_fault(self) -> str:
        """Say why nothing new can run on any of this machine's devices; empty where something can."""
        now = (await self.backend.devices(_SOON, _DRIVER_WITHIN, self.registry.known)).faults
        devices = await self.store.run(LeaseStore.present_devices)
        faults = [now.get(uuid, device.fault) for uuid, device in devices.items()]
        return " ".join(dict.fromkeys(faults)) if faults and all(faults) else ""

    @property
    def device_problems(self) -> tuple[str, ...]:
        """What stood in the way when this machine's devices were looked for, in sentences."""
        return self.registry.problems

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each of these does, real ones of this machine alone, by uuid; None for no answer."""
        return await self._poller.look([device for device in devices if not device.node])

    async def history(self, since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
        """See ``Pool.history``. With ``user``, of that user alone."""
        return await self.store.run(LeaseStore.history, since, user)

    async def forget_old(self) -> None:
        """Keep less of what ended long ago, in many short transactions."""
        while True:
            if not await self.store.run_alone(ANSWER_WITHIN, LeaseStore.forget_old):
                return
            await asyncio.sleep(_BETWEEN)

    async def try_writing(self, within: float) -> None:
        """Try whether decisions can be kept. Raises ``PoolUnreachable`` where not, within so many seconds."""
        await self.store.run_alone(within, LeaseStore.try_writing)

    # -- Course files --------------------------------------------------------------

    async def course_versions(
        self, course: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file that were kept, see ``LeaseStore.course_versions``."""
        return await self.store.run(LeaseStore.course_versions, course, most, before)

    async def keep_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Keep versions of a course file; return the number of the last."""
        return await self.store.run(LeaseStore.add_course_versions, course, versions)

    async def remove_version(self, number: int) -> None:
        """Keep a version of a course file no longer."""
        await self.store.run(LeaseStore.remove_course_version, number)

    async def reread_course(self, file: str) -> None:
        """Follow a course file that has been replaced, at once."""
        if self._course_admission is None:
            return
        # Not followed before: the change is told as that of whoever asks.
        await self.store.run_alone(ANSWER_WITHIN, self._course_admission.reread, file)

    def _asked(self, **what: str | SliceRequest | None) -> AbstractContextManager[None]:
        """Do what somebody asks for: if nobody else is known to, this process. Refusals are written down."""
        return _NOT_AUDITED if self.audit is None else self._audited(self.audit, what)

    @contextlib.contextmanager
    def _audited(self, log: AuditLog, what: Mapping[str, str | SliceRequest | None]) -> Iterator[None]:
        told = {
            name: str(value) if isinstance(value, SliceRequest) else value for name, value in what.items()
        }
        with acting(None if self.backend.is_owner else this_process()), refusals(log, told):
            yield


def _nothing(_: LeaseStore) -> None:
    """Do nothing in the store, which is open then."""


def _with_fault(status: DeviceStatus, fault: str) -> DeviceStatus:
    if fault == status.device.fault:
        return status
    return replace(status, device=replace(status.device, fault=fault))


def _refuse_unless_waiting(lease: Lease) -> None:
    if lease.state is LeaseState.ENDED:
        raise gone(lease)
    if lease.state is LeaseState.PARKED:
        raise BadRequest("A parked lease is not in the queue.", "Resume it first.")
