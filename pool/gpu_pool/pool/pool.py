"""The one pool: every rule about leases, over a store that others may share and a backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final, final

from gpu_pool.audit import AuditLog, acting, refusals, this_process
from gpu_pool.audit.callers import Caller
from gpu_pool.devices.activity import activity_of, in_own_thread, uses_cuda
from gpu_pool.policy import placement
from gpu_pool.policy.yielding import effect_of
from gpu_pool.pool.backend import Adapted, KernelHost
from gpu_pool.pool.core import DRIVER_WITHIN, FRESH, PoolCore
from gpu_pool.pool.for_caller import Guard, PoolForCaller
from gpu_pool.pool.reconciler import SELDOM, SOON, rest_after
from gpu_pool.pool.registry import DeviceRegistry
from gpu_pool.store import leases, reclaim, records, registration, requests, yielding
from gpu_pool.store.context import StoreContext
from gpu_pool.store.lease_table import gone, lease_number
from gpu_pool.store.queue import QueueForecast
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import (
    Activity,
    BadRequest,
    DeviceStatus,
    EndedLease,
    EndReason,
    Hibernation,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseState,
    MemoryMove,
    MoveResult,
    NeverFits,
    NotAllowed,
    Outlook,
    PodDeviceUse,
    Pool,
    PoolStatus,
    PoolUnreachable,
    Process,
    SliceRequest,
    TakingEffect,
    TimedOut,
)
from gpu_pool_client._operations import operation_of

#: Seconds between two checks, by one who waits, of whether anything was decided (a look at the file's time).
_GLANCE: Final = 0.02
#: The same for those who follow a lease that does not wait: of these there are many.
_HELD_GLANCE: Final = 0.1
#: Seconds for which news of a pod are waited for, unless it is said.
_POD_POLL: Final = 25.0
#: Around what is done where decisions are not written down, and what nobody waits for.
_NOTHING: Final = contextlib.nullcontext()
#: Leases that are stated at a stretch.
_AT_A_TIME: Final = 250


@final
class GpuPool(Pool):
    """Leases of slices of a backend's devices, as this process asks for them or a caller whom it serves.

    The store is opened, and the devices are registered, by the first call. Where the backend's devices
    are this process's alone, the pool is kept in order from ``async with`` on; else by one of those
    processes that have asked for slices. It may be used from several event loops. What a method does
    and raises, the contract says.
    """

    def __init__(self, core: PoolCore, caller: Caller | None = None) -> None:
        self.core, self._caller = core, caller
        self.url, self.backend = core.url, core.backend
        #: Where transactions are made in the caller's name.
        self.store = core.store.for_caller(caller)

    def for_caller(
        self, caller: Caller, guard: Guard | None = None, *, other_courses: bool = False
    ) -> PoolForCaller:
        """Return the contract as one caller sees it: it refuses and filters, by the table of operations.

        Parameters
        ----------
        caller
            Who asks.
        guard
            What goes around each of their operations; by default nothing.
        other_courses
            Whether a server that was started for one course may ask in the name of others.
        """
        courses = self.core.courses
        return PoolForCaller(GpuPool(self.core, caller), caller, guard, courses, other_courses=other_courses)

    async def __aenter__(self) -> GpuPool:
        """Open the pool: whoever owns the devices keeps it in order from now on, whoever asks or not."""
        await self.core.open()
        return self

    async def close(self) -> None:
        """Close the store once what was begun is done. Leases live on."""
        await self.core.close()

    # -- Requests --------------------------------------------------------------

    async def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """See ``Pool.request``. What is over is ended first where nothing is free."""
        mark, backend = os.urandom(4).hex(), self.backend
        with self._asked(user=holder.user, course=holder.course, request=request):
            async with self.core.turns or _NOTHING:
                try:
                    if backend.queue is not None or backend.host is not None:
                        # One that is known is answered, whatever there would be for a new one by now.
                        found = await self.find(key)
                        if found is not None:
                            return await self._bound(found)
                    store = await self._store_of(holder)
                    await self.core.refresh(FRESH, DRIVER_WITHIN)
                    adapted = await backend.adapt(request, holder, self._caller)
                    lease = await store.run(_decide, self.core.registry, adapted, holder, key, mark)
                    self.core.keep_in_order()
                    self.core.follow_bursts(lease)
                    if backend.queue is not None and lease.state is LeaseState.HELD:
                        await backend.queue.submit(lease)
                        lease = await self._parked_in_queue(lease)
                    return await self._bound(lease)
                except (asyncio.CancelledError, PoolUnreachable):
                    # The decision may still be made, or has been, and nobody would know of it.
                    self.store.run_later(leases.end_request, key, EndReason.WITHDRAWN, mark)
                    raise

    async def _store_of(self, holder: Holder) -> StoreThread:
        """Return the store for what a holder asks for, with the groups that the course files go by."""
        courses, caller = self.core.courses, self._caller
        if courses is None or not holder.user or (caller is not None and caller.groups is not None):
            return self.store
        account = None if caller is None else caller.account
        groups = await courses.groups(account or holder.user)
        asks = caller or Caller(holder.user, True, "", Process.current())
        return self.store.for_caller(replace(asks, groups=groups))

    async def _parked_in_queue(self, lease: Lease) -> Lease:
        """Park a lease that waits in somebody else's queue: nothing is counted for it there. Return it."""
        queue = self.backend.queue
        if queue is None or queue.place(lease.id) is None:
            return lease
        return await self.store.run(leases.lend, lease.id, queued=True)

    async def _bound(self, lease: Lease) -> Lease:
        """Return a lease described; if it is held, it takes effect from now on."""
        held = lease.state is LeaseState.HELD
        return await self.backend.bind(lease) if held else self.core.described(lease)

    async def _restored(self, lease: Lease) -> Lease:
        """Return the same for one that may have been parked: with what it keeps on its devices."""
        lease = await self._bound(lease)
        if lease.state is LeaseState.HELD and self.backend.suspension is not None:
            await self.backend.suspension.restore(lease)
        return lease

    async def find(self, key: str) -> Lease | None:
        """Return the lease of a request's key, ended ones included; None if there was none."""
        return await self.store.run(leases.read_by_key, key)

    async def get_lease(self, lease_id: str) -> Lease:
        """See ``Pool.get_lease``."""
        lease = await self.store.run(leases.read, lease_id)
        if lease.state is not LeaseState.ENDED and lease.holder.process == Process.current():
            self.core.keep_in_order()  # it may hold it by another pool than that by which it asked for it
        return self.core.described(lease)

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        self.core.keep_in_order()
        while True:
            began, seen = time.monotonic(), self.core.last_write()
            await self.core.refresh(SOON)
            lease = await self.store.run(leases.read, lease_id)
            if lease.state is LeaseState.HELD:
                return await self._restored(lease)
            lease = self.core.described(lease)
            _refuse_unless_waiting(lease)
            if give_up_at is not None and time.monotonic() >= give_up_at:
                if lease.place is not None:
                    raise TimedOut(str(lease.place.outlook(time.time())), "Wait for longer, or ask later.")
                raise await self.store.run(requests.shortage, lease_id)
            every = max(_GLANCE, rest_after(time.monotonic() - began))
            await self.core.until_written(seen, every, self.core.settings.tuning.waiting_read_every)

    async def _abandon(self, lease_id: str) -> None:
        with self._asked(lease=lease_id):
            self.store.run_later(leases.end_lease, lease_id, EndReason.WITHDRAWN)

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        last: Lease | None = None
        tuning = self.core.settings.tuning
        while last is None or last.state is not LeaseState.ENDED:
            waits = last is None or last.state is LeaseState.WAITING
            began, seen = time.monotonic(), self.core.last_write()
            lease = self.core.described(await self.store.run(leases.read, lease_id))
            waits = lease.state is LeaseState.WAITING
            every = max(_GLANCE if waits else _HELD_GLANCE, rest_after(time.monotonic() - began))
            if lease != last:
                yield lease
            last = lease
            poll = tuning.waiting_read_every if waits else tuning.held_read_every
            await self.core.until_written(seen, every, poll)

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``."""
        if self.backend.queue is not None and (place := (await self.core.living(lease_id)).place) is not None:
            return place.outlook(time.time())
        if self.core.waits.are_due:
            prospects = await self.store.run(requests.prospects)
            if prospects is not None:
                await self.core.waits.learn(prospects)
        outlook = await self.store.run(requests.why_waiting, lease_id)
        outlook = replace(outlook, wait=self.core.waits.of(lease_number(lease_id)))
        if self.backend.capacity is None:
            return outlook
        request = (await self.get_lease(lease_id)).request
        return self.backend.capacity.expected(outlook, request, lease_number(lease_id))

    async def forecast(self, request: SliceRequest, holder: Holder) -> Outlook | None:
        """See ``Pool.forecast``. Nobody knows in which courses somebody new is."""
        store = await self._store_of(holder)
        await self.core.until_noted()
        adapted = await self.backend.adapt(request, holder, self._caller)
        found = await store.run(_foresee, self.core.registry, adapted, holder)
        if found is None:
            return None
        outlook = found.outlook
        if found.prospects is not None:
            outlook = replace(outlook, wait=await self.core.waits.foresee(found.number, found.prospects))
        capacity = self.backend.capacity
        return outlook if capacity is None else capacity.expected(outlook, request, None)

    async def offers(self, holder: Holder) -> tuple[SliceRequest, ...] | None:
        """See ``Pool.offers``."""
        courses, caller = self.core.courses, self._caller
        if courses is None:
            return None
        groups = caller.groups if caller is not None else None
        if groups is None:
            groups = await courses.groups((caller and caller.account) or holder.user)
        return await courses.offers(holder, groups)

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
        lease = await self.store.run(leases.bind_process, lease_id, process, ready_within, grace)
        return await self.backend.bind(lease, process) if lease.state is LeaseState.HELD else lease

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """See ``Pool.renew``."""
        return await self._bound(await self.store.run(leases.set_deadline, lease_id, ttl))

    async def report_busy(
        self,
        lease_id: str,
        spans: Sequence[tuple[float, float]],
        *,
        gives_way_since: float | None = None,
    ) -> None:
        """See ``Pool.report_busy``."""
        await self.store.run(records.report_busy, lease_id, tuple(spans), gives_way_since)

    async def report_hibernation(self, lease_id: str, hibernation: Hibernation) -> None:
        """See ``Pool.report_hibernation``."""
        await self.store.run(records.report_hibernation, lease_id, hibernation)

    async def activity(self, lease_id: str) -> Activity:
        """See ``Pool.activity``."""
        lease = await self.core.living(lease_id)
        if lease.state is LeaseState.PARKED and not lease.terms.in_pod:
            # It has no device to look at, and its process may yet have used one.
            cuda = self.core.settings.tuning.cuda_device
            return Activity(initialised=await in_own_thread(uses_cuda, lease.process, lease.id, cuda))
        found, suspension = await self._activity(lease), self.backend.suspension
        if self.core.settings.checkpoint != "off" and found.initialised and suspension is not None:
            return replace(found, movable=await suspension.is_movable(lease))
        return found

    async def _activity(self, lease: Lease) -> Activity:
        """Look at what a lease's processes do, which takes some time on a machine with many."""
        if self.backend.host is not None and lease.terms.in_pod:
            return self.backend.host.activity(lease.id)
        who = lease.process, lease.slices, lease.id, lease.holder.process
        return await in_own_thread(activity_of, *who, self.core.settings.tuning.cuda_device)

    async def report_use(
        self, devices: Sequence[str], uses: Sequence[PodDeviceUse], *, complete: bool = True
    ) -> None:
        """See ``Pool.report_use``."""
        agents, node = self.backend.agents, self._caller.node if self._caller else ""
        if agents is None or not node:
            raise NotAllowed(*operation_of(Pool.report_use).refusal)
        await agents.report(node, devices, uses, complete=complete)

    async def move_memory(
        self,
        unmovable: Mapping[str, str],
        results: Sequence[MoveResult] = (),
        *,
        known: Sequence[str] = (),
        seconds: float = 0.0,
    ) -> tuple[MemoryMove, ...]:
        """See ``Pool.move_memory``."""
        agents, node = self.backend.agents, self._caller.node if self._caller else ""
        if agents is None or not node:
            raise NotAllowed(*operation_of(Pool.move_memory).refusal)
        return await agents.moves(node, unmovable, results, known, seconds)

    async def resize(self, lease_id: str, request: SliceRequest, *, ahead: bool = False) -> Lease:
        """See ``Pool.resize``."""
        with self._asked(lease=lease_id, request=request):
            lease = await self._own(lease_id, "change its size")
            ahead = ahead and lease.state is LeaseState.HELD
            counted = (await self.backend.adapt(request)).counted
            store = await self._store_of(lease.holder)
            in_pod = self._in_pod(lease_id)
            # Where the pool divides devices, a pod that has a slice can have another size on the same ones.
            stays = in_pod and lease.terms.parks_in_pod and lease.state is LeaseState.HELD
            # What may be used on top needs no other slice, so what its process keeps on the GPU can stay.
            moves = not counted.changes_only_limit_of(lease.request) or (in_pod and not stays)
            is_free = stays or not in_pod
            if moves and not ahead and not (is_free and await self._can_resize(lease, counted)):
                # Nobody ends a process for a size that they could not have then either.
                await store.run(leases.check_size, lease_id, counted)
                raise NotAllowed(
                    "The slice cannot change its size: its process has initialised CUDA, or may have, "
                    "and what it keeps on the GPU would be in the way.",
                    "End the process to give the slice back.",
                )
            lease = await store.run(
                leases.change_size, lease_id, counted, ahead=ahead, stays=stays and not ahead
            )
            self.core.follow_bursts(lease)
            return await self._bound(lease)

    async def _can_resize(self, lease: Lease, counted: SliceRequest) -> bool:
        """Whether nothing that its process keeps on its devices is in the way of another size.

        In a pod that stays on them, what it is seen to use has to be within that size.
        """
        activity = await self._activity(lease)
        if activity.initialised is False:
            return self.backend.suspension is None or not self.backend.suspension.keeps(lease)
        if not self._in_pod(lease.id) or activity.memory_mib is None:
            return False
        rules = self.core.settings.rules
        return activity.memory_mib <= sum(
            placement.cut(counted, part.device, rules).memory_mib for part in lease.slices
        )

    def _in_pod(self, lease_id: str) -> bool:
        return self.backend.host is not None and self.backend.host.has_kernel(lease_id)

    async def park(self, lease_id: str, *, yields: bool = False) -> Lease:
        """See ``Pool.park``."""
        with self._asked(lease=lease_id):
            lease = await self._own(lease_id, "be lent to others")
            if self._in_pod(lease_id):
                await self._refuse_unless_parkable(lease)
            if yields and lease.state is LeaseState.HELD and lease.asked_back is None:
                return lease
            suspension = self.backend.suspension
            if suspension is None or (await self._activity(lease)).initialised is False:
                return await self._lent(lease_id, yields=yields)
            await suspension.suspend(lease)
            try:
                lent = await self._lent(lease_id, yields=yields)
            except BaseException:
                await suspension.restore(lease)
                raise
            if lent.state is LeaseState.HELD:  # whoever waited has gone meanwhile
                await suspension.restore(lent)
            return lent

    async def _refuse_unless_parkable(self, lease: Lease) -> None:
        """Raise ``NotAllowed`` where a kernel in a pod never lends its slice, or its memory stays there."""
        if not lease.terms.can_be_parked:
            raise NotAllowed(
                "The slice of a kernel in a pod or job cannot be lent to others.",
                "End the kernel to give it back.",
            )
        if self.backend.suspension is not None or lease.state is not LeaseState.HELD:
            return
        if (await self._activity(lease)).initialised is not False:
            raise NotAllowed(
                "The kernel is not parked: it keeps memory on the GPU, or may, and that cannot be moved away "
                "from a pod.",
                "End the kernel to give the slice back.",
            )

    async def _lent(self, lease_id: str, *, yields: bool) -> Lease:
        """Lend a lease's slices to others, and return it parked; held where nobody needs them any more."""
        lease = await self.store.run(leases.lend, lease_id, yields=yields)
        self.core.follow_bursts(lease)
        return lease

    async def _own(self, lease_id: str, what: str) -> Lease:
        """Return a lease; refuse, with ``NotAllowed``, to take its slices away in another's name."""
        lease = await self.core.living(lease_id)
        if lease.holder.process != (self._caller.process if self._caller else Process.current()):
            raise NotAllowed(
                f"The slice cannot {what}: only the process that asked for it knows whether it is in use.",
                "Release it to take it back.",
            )
        return lease

    async def resume(self, lease_id: str) -> Lease:
        """See ``Pool.resume``."""
        with self._asked(lease=lease_id):
            if self.backend.queue is not None and (lease := await self.core.living(lease_id)).is_queued:
                return lease
            await self.core.refresh(FRESH, DRIVER_WITHIN)
            lease = await self.store.run(_queue_again, lease_id)
            self.core.follow_bursts(lease)
            return await self._restored(lease)

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        with self._asked(lease=lease_id):
            await self.store.run(leases.end_lease, lease_id, reason)
        await self.core.withdraw_outside(lease_id)

    async def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, by default in an administrator's name; its holder reads ``message``.

        Raises ``LeaseGone``.
        """
        with self._asked(lease=lease_id):
            await self.store.run(leases.revoke, lease_id, message, reason)
        await self.core.withdraw_outside(lease_id)

    # -- Kernels that run elsewhere ----------------------------------------------

    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        """See ``Pool.launch``."""
        host, core = await self._host(lease_id, kernel), self.core
        async with core.launching.setdefault(lease_id, asyncio.Lock()):
            lease = await core.living(lease_id)
            if lease.state is LeaseState.PARKED and self.backend.queue is not None:
                # Its kernel waits in somebody else's queue, or is started anew.
                lease = await self._bound(await self.store.run(leases.queue_again, lease_id))
            if lease.state is not LeaseState.HELD:
                raise BadRequest(f"The lease is {lease.state.value}.", "Start the kernel once it is held.")
            found = await host.launch(lease, kernel, self._caller)
            await self._parked_in_queue(lease)
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
        await self.core.living(lease_id)
        async with self.core.launching.setdefault(
            lease_id, asyncio.Lock()
        ):  # what is being started is ended too
            await host.end(lease_id)

    # -- Taking slices back --------------------------------------------------------

    async def effect_of_taking(self, lease_id: str) -> TakingEffect:
        """Say what becomes of a lease's kernel if its slices are taken back now. Raises ``LeaseGone``."""
        lease = await self.core.living(lease_id)
        is_kernel = await self.store.run(leases.has_manager, lease_id)
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
            if await self.effect_of_taking(lease_id) is not TakingEffect.KEEPS_KERNEL:
                raise NotAllowed(
                    "The slice cannot go without its kernel, which has used the GPU.",
                    "Take it back when the kernel is idle, or end the kernel.",
                )
            return await self.store.run(leases.ask_back, lease_id, message, reason, now=True)

    async def ask_back(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Let a kernel's slice go as soon as it is idle; see :meth:`withdraw`."""
        with self._asked(lease=lease_id):
            lease = await self.core.living(lease_id)
            if not (lease.terms.parks_in_pod or await self.store.run(leases.has_manager, lease_id)):
                raise BadRequest(
                    "Only a kernel's slice can be taken back when it is idle.", "Take it back now."
                )
            return await self.store.run(leases.ask_back, lease_id, message, reason, now=False)

    # -- The pool ------------------------------------------------------------------

    async def drain(self, device: str, *, drained: bool = True, hibernate: bool = False) -> DeviceStatus:
        """See ``Pool.drain``."""
        with self._asked(device=device):
            return await self.store.run(registration.close_device, device, drained, hibernate=hibernate)

    async def status(self) -> PoolStatus:
        """See ``Pool.status``."""
        registry = self.core.registry
        faults = (await self.backend.devices(SELDOM, known=registry.known)).faults
        status = await self.store.run(registry.status, self.url, faults)
        described = tuple([each async for each in self._described(status.leases)])
        return replace(status, leases=described, prepared=self.backend.prepared_pods())

    async def _described(self, leases: Sequence[Lease]) -> AsyncIterator[Lease]:
        """Yield leases with the truth about their limits; of thousands, others are answered in between."""
        for number, lease in enumerate(leases, 1):
            yield self.core.own_caps.described(self.core.described(lease))
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    async def history(self, since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
        """See ``Pool.history``. With ``user``, of that user alone."""
        return await self.store.run(records.history, since, user)

    async def ended_after(self, place: int, since: float = 0.0) -> tuple[list[EndedLease], int]:
        """Return what has ended after a place in the order of ends, and the place from which to go on.

        For whoever counts each end once, whatever the clock says. See ``HistoryTable.ended_after``.
        """
        return await self.store.run(records.ended_after, place, since)

    async def busy_times(self, since: float = 0.0) -> Mapping[str, tuple[tuple[float, float], ...]]:
        """See ``Pool.busy_times``."""
        return await self.store.run(records.busy_times, since)

    def _asked(self, **what: str | SliceRequest | None) -> AbstractContextManager[None]:
        """Do what somebody asks for: if nobody else is known to, this process. Refusals are written down."""
        log = self.core.audit
        return _NOTHING if log is None else self._audited(log, what)

    @contextlib.contextmanager
    def _audited(self, log: AuditLog, what: Mapping[str, str | SliceRequest | None]) -> Iterator[None]:
        told = {
            name: str(value) if isinstance(value, SliceRequest) else value for name, value in what.items()
        }
        with acting(None if self.backend.is_owner else this_process()), refusals(log, told):
            yield


def _decide(
    store: StoreContext, registry: DeviceRegistry, adapted: Adapted, holder: Holder, key: str, mark: str
) -> Lease:
    """Grant or queue a request, and end what is over if it has to wait."""
    if registry.awaited:
        registry.register_awaited(store)
    try:
        within = adapted.within or registry.devices_for(store, adapted.counted)
    except NeverFits:
        known = leases.read_by_key(store, key)  # whatever would be said of a new one by now
        if known is None:
            raise
        return known
    lease = requests.decide(store, adapted.counted, holder, key, within, mark, adapted.asked)
    if lease.state is LeaseState.WAITING:
        reclaim.end_over(store)
        yielding.ask_back(store, at_once=True)
        lease = leases.read(store, lease.id)
    return lease


def _queue_again(store: StoreContext, lease_id: str) -> Lease:
    lease = leases.queue_again(store, lease_id)
    if lease.state is LeaseState.WAITING:
        yielding.ask_back(store, at_once=True)
    return lease


def _foresee(
    store: StoreContext, registry: DeviceRegistry, adapted: Adapted, holder: Holder
) -> QueueForecast | None:
    registry.refuse_awaited()
    within = adapted.within or registry.devices_for(store, adapted.counted)
    return requests.foresee(store, adapted.counted, holder, within, adapted.asked)


def _refuse_unless_waiting(lease: Lease) -> None:
    if lease.state is LeaseState.ENDED:
        raise gone(lease)
    if lease.state is LeaseState.PARKED and not lease.is_queued:
        raise BadRequest("A parked lease is not in the queue.", "Resume it first.")
