"""The embedded pool: the store opened in the caller's own process, no daemon.

For one Unix user on one machine. Several processes may open the same store;
every decision is one transaction, so none of them needs to be in charge.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from gpu_pool.audit import AuditLog, acting, refusals, this_process
from gpu_pool.devices.activity import activity_of, in_own_thread, uses_cuda
from gpu_pool.embedded.base import OpenedPool
from gpu_pool.enforcement.tiers import with_own_caps
from gpu_pool.policy.revocation import effect_of
from gpu_pool.settings import load_settings
from gpu_pool.store import files
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.lease_table import gone, lease_number
from gpu_pool.store.leases import LeaseStore
from gpu_pool.store.queue import QueueForecast
from gpu_pool_client import (
    Activity,
    BadRequest,
    DeviceStatus,
    Effect,
    EndReason,
    Holder,
    Lease,
    LeaseState,
    NeverFits,
    NotAllowed,
    Outlook,
    PoolStatus,
    PoolUnreachable,
    Process,
    SliceRequest,
)
from gpu_pool_client._home import expanded
from gpu_pool_client._pool import split_url

if TYPE_CHECKING:
    from gpu_pool.caller import Caller

#: How often a waiter reads its place: a few microseconds of work each time.
_POLL: Final = 0.1
#: How old, in seconds, the look may be by which it is decided that something new can use the devices; for
#: how long it is waited for. And how old it may be for those who wait, and for whoever looks at the pool.
_FRESH, _DRIVER_WITHIN, _SOON, _SELDOM = 0.0, 3.0, 3.0, 10.0
#: Around what is done where decisions are not written down.
_NOT_AUDITED: Final = contextlib.nullcontext()
#: Leases that are stated at a stretch.
_AT_A_TIME: Final = 250


def open_embedded(url: str) -> EmbeddedPool:
    """Return the pool at ``embedded:[path]``; see :func:`gpu_pool_client.connect`."""
    return EmbeddedPool(store_path(url), load_settings())


def store_path(url: str) -> Path:
    """Return the store's file that an ``embedded:`` URL names."""
    parts = split_url(url)
    text = "" if parts is None else unquote(parts.netloc + parts.path)
    if parts is None or parts.query or parts.fragment or (text and not text.isprintable()):
        raise BadRequest(f"{url[:200]!a} is not the URL of an embedded pool.", "Accepted: embedded:[path].")
    path = expanded(text) if text else files.default_path()
    # What SQLite and we keep beside it is beside the file itself, by whichever name it is found.
    return path.resolve() if path.is_symlink() else path.absolute()


class EmbeddedPool(OpenedPool):
    """A pool whose decisions this process makes itself, in the store that all share.

    The store is opened, and the machine's devices are registered, by the
    first call. It may be used from several event loops.
    """

    async def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        *,
        caller: Caller | None = None,
    ) -> Lease:
        """See ``Pool.request``. Processes that are gone are looked for when nothing is free.

        Asked in the name of ``caller``; None for this process, whose user the system knows.
        """
        with self._asked(user=holder.user, course=holder.course, request=request):
            mark = os.urandom(4).hex()
            try:
                courses = self._course_admission
                check = None if courses is None else await courses.check_of(request, holder, caller)
                await self._refresh()
                within = await self._devices_for(request, holder, caller)
                counted = self._counted_as(request)
                lease = await self._store.run(self._request, counted, holder, key, check, within, mark)
                if not self._owner:
                    self._keep_in_order()
                return await self._enforcer.hand_out(lease)
            except (asyncio.CancelledError, PoolUnreachable):
                # The decision may still be made, or has been, and nobody would know of it.
                self._store.run_later(LeaseStore.release_key, key, EndReason.WITHDRAWN, mark)
                raise

    def _request(
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
        if self._awaited:
            self._register_awaited(store)
        try:
            within = within or self._own_devices(store, request)
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

    def _counted_as(self, request: SliceRequest) -> SliceRequest:
        """Return what is granted and counted for a request, which its course has been asked for."""
        return request

    async def _devices_for(
        self,
        request: SliceRequest,  # noqa: ARG002 - for pools that look
        holder: Holder,  # noqa: ARG002
        caller: Caller | None,  # noqa: ARG002
    ) -> Collection[str]:
        """Return the uuids of the devices that a request may have; none mean all that this process has.

        May refuse it.
        """
        return ()

    async def _refresh(self) -> None:
        """Note which devices there are, and which of them work, before any is granted."""
        await self._look_again_for_devices()
        await self._check_driver(_FRESH, _DRIVER_WITHIN)

    async def get_lease(self, lease_id: str) -> Lease:
        """See ``Pool.get_lease``."""
        lease = await self._store.run(LeaseStore.lease, lease_id)
        return self._enforcer.state(lease) if lease.state is LeaseState.HELD else lease

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """See ``Pool.wait``."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        if not self._owner:
            self._keep_in_order()
        while True:
            await self._check_driver(_SOON)
            lease = await self._store.run(LeaseStore.lease, lease_id)
            if lease.state is LeaseState.HELD:
                return await self._enforcer.hand_back(lease)
            _refuse_unless_waiting(lease)
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise await self._store.run(LeaseStore.shortage, lease_id)
            await asyncio.sleep(_POLL)

    async def _abandon(self, lease_id: str) -> None:
        with self._asked(lease=lease_id):
            self._store.run_later(LeaseStore.release, lease_id, EndReason.WITHDRAWN)

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """See ``Pool.watch``."""
        last: Lease | None = None
        while last is None or last.state is not LeaseState.ENDED:
            await self._check_driver(_SOON)
            lease = await self._enforcer.hand_out(await self._store.run(LeaseStore.lease, lease_id))
            if lease != last:
                yield lease
            last = lease
            await asyncio.sleep(_POLL)

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``."""
        if self._waits.are_due:
            prospects = await self._store.run(LeaseStore.prospects)
            if prospects is not None:
                await self._waits.learn(prospects)
        outlook = await self._store.run(LeaseStore.explain, lease_id)
        return replace(outlook, wait=self._waits.of(lease_number(lease_id)))

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
        within = await self._devices_for(request, holder, caller)
        counted = self._counted_as(request)
        found = await self._store.run(self._forecast, counted, holder, check, within)
        if found is None or found.prospects is None:
            return found and found.outlook
        return replace(found.outlook, wait=await self._waits.foresee(found.number, found.prospects))

    def _forecast(
        self,
        store: LeaseStore,
        request: SliceRequest,
        holder: Holder,
        check: Callable[[], None] | None,
        within: Collection[str],
    ) -> QueueForecast | None:
        if self._awaited:
            raise OtherDevices(self.note)
        return store.forecast(request, holder, check, within or self._own_devices(store, request))

    async def offers(
        self, holder: Holder, *, caller: Caller | None = None
    ) -> tuple[SliceRequest, ...] | None:
        """See ``Pool.offers``, and :meth:`request`."""
        courses = self._course_admission
        if courses is None:
            return None
        return await self._store.run(courses.offers, holder, await courses.groups(holder, caller))

    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """See ``Pool.attach``."""
        lease = await self._store.run(LeaseStore.attach, lease_id, process, ready_within, grace)
        await self._enforcer.attach(lease, process)
        return await self._enforcer.hand_out(lease)

    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """See ``Pool.renew``."""
        return await self._enforcer.hand_out(await self._store.run(LeaseStore.renew, lease_id, ttl))

    async def activity(self, lease_id: str) -> Activity:
        """See ``Pool.activity``."""
        lease = await self.get_lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        if lease.state is LeaseState.PARKED:
            # It has no device to look at, and its process may yet have used one.
            cuda = self._settings.tuning.cuda_device
            return Activity(initialised=await in_own_thread(uses_cuda, lease.process, lease.id, cuda))
        found = await self._activity(lease)
        if self._settings.checkpoint and found.initialised:
            return replace(found, movable=await self._enforcer.is_movable(lease))
        return found

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
        counted, courses = self._counted_as(request), self._course_admission
        check = None if courses is None else await courses.check_of(request, lease.holder, caller)
        if not ahead and (
            (await self._activity(lease)).initialised is not False or self._enforcer.keeps_state(lease)
        ):
            # Nobody ends a process for a size that they could not have then either.
            await self._store.run(LeaseStore.check_resize, lease_id, counted, check)
            raise NotAllowed(
                "The slice cannot change its size: its process has initialised CUDA, or may have, "
                "and what it keeps on the GPU would be in the way.",
                "End the process to give the slice back.",
            )
        return await self._enforcer.hand_out(
            await self._store.run(LeaseStore.resize, lease_id, counted, check, ahead=ahead)
        )

    async def park(self, lease_id: str, *, caller: Caller | None = None) -> Lease:
        """See ``Pool.park``. Asked in the name of ``caller``, by default this process."""
        with self._asked(lease=lease_id):
            lease = await self._own(lease_id, caller, "be lent to others")
            if (await self._activity(lease)).initialised is False:
                return await self._store.run(LeaseStore.park, lease_id)
            return await self._enforcer.park(lease)

    async def _activity(self, lease: Lease) -> Activity:
        """Look at what a lease's processes do, which takes some time on a machine with many."""
        who, cuda = (
            (lease.process, lease.slices, lease.id, lease.holder.process),
            self._settings.tuning.cuda_device,
        )
        return await in_own_thread(activity_of, *who, cuda)

    async def _own(self, lease_id: str, caller: Caller | None, what: str) -> Lease:
        """Return a lease; refuse, with ``NotAllowed``, to take its slices away in another's name."""
        lease = await self.get_lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        if lease.holder.process != (caller.process if caller else Process.current()):
            raise NotAllowed(
                f"The slice cannot {what}: only the process that asked for it knows whether it is in use.",
                "Release it to take it back.",
            )
        return lease

    async def resume(self, lease_id: str) -> Lease:
        """See ``Pool.resume``."""
        with self._asked(lease=lease_id):
            await self._check_driver(_FRESH, _DRIVER_WITHIN)
            return await self._enforcer.hand_back(await self._store.run(LeaseStore.resume, lease_id))

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """See ``Pool.release``."""
        with self._asked(lease=lease_id):
            await self._store.run(LeaseStore.release, lease_id, reason)
        self._reconciler.wake()

    async def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, by default in an administrator's name; its holder reads ``message``.

        Raises ``LeaseGone``.
        """
        with self._asked(lease=lease_id):
            await self._store.run(LeaseStore.revoke, lease_id, message, reason)
        self._reconciler.wake()

    async def effect_of_taking(self, lease_id: str) -> Effect:
        """Say what becomes of a lease's kernel if its slices are taken back now. Raises ``LeaseGone``."""
        lease = await self.get_lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        is_kernel = await self._store.run(LeaseStore.has_manager, lease_id)
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
            return await self._store.run(LeaseStore.ask_back, lease_id, message, reason, now=True)

    async def ask_back(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Let a kernel's slice go as soon as it is idle; see :meth:`withdraw`."""
        with self._asked(lease=lease_id):
            if not await self._store.run(LeaseStore.has_manager, lease_id):
                raise BadRequest(
                    "Only a kernel's slice can be taken back when it is idle.", "Take it back now."
                )
            return await self._store.run(LeaseStore.ask_back, lease_id, message, reason, now=False)

    async def drain(self, device: str, *, drained: bool = True) -> DeviceStatus:
        """See ``Pool.drain``."""
        with self._asked(device=device):
            return await self._store.run(LeaseStore.drain, device, drained)

    async def status(self) -> PoolStatus:
        """See ``Pool.status``."""
        status = await self._store.run(self._status, await self._faults(_SELDOM))
        return replace(status, leases=tuple([each async for each in self._stated(status.leases)]))

    def _status(self, store: LeaseStore, faults: Mapping[str, str]) -> PoolStatus:
        status = store.status(self.url)
        usable = self._usable(store)
        others = set() if usable is None else store.present_devices().keys() - usable
        devices = [
            _with_fault(each, faults.get(each.device.uuid, each.device.fault))
            for each in status.devices
            if each.device.uuid not in others
        ]
        told = dict.fromkeys(each.device.fault for each in devices)
        said = " ".join(filter(None, (self.note, *told, *self._why_none(devices))))
        return replace(status, devices=tuple(devices), note=said)

    async def device_fault(self) -> str:
        """Say why nothing new can run on any of this machine's devices; empty where something can."""
        now = await self._faults(_SOON, _DRIVER_WITHIN)
        devices = await self._store.run(LeaseStore.present_devices)
        faults = [now.get(uuid, device.fault) for uuid, device in devices.items()]
        return " ".join(dict.fromkeys(faults)) if faults and all(faults) else ""

    async def _stated(self, leases: Sequence[Lease]) -> AsyncIterator[Lease]:
        """Yield leases with the truth about their limits; of thousands, others are answered in between."""
        for number, lease in enumerate(leases, 1):
            yield with_own_caps(self._enforcer.state(lease))
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _asked(self, **what: str | SliceRequest | None) -> AbstractContextManager[None]:
        """Do what somebody asks for: if nobody else is known to, this process. Refusals are written down."""
        return _NOT_AUDITED if self.audit is None else self._audited(self.audit, what)

    @contextlib.contextmanager
    def _audited(self, log: AuditLog, what: Mapping[str, str | SliceRequest | None]) -> Iterator[None]:
        told = {
            name: str(value) if isinstance(value, SliceRequest) else value for name, value in what.items()
        }
        with acting(None if self._owner else this_process()), refusals(log, told):
            yield


def _with_fault(status: DeviceStatus, fault: str) -> DeviceStatus:
    return (
        status
        if fault == status.device.fault
        else replace(status, device=replace(status.device, fault=fault))
    )


def _refuse_unless_waiting(lease: Lease) -> None:
    if lease.state is LeaseState.ENDED:
        raise gone(lease)
    if lease.state is LeaseState.PARKED:
        raise BadRequest("A parked lease is not in the queue.", "Resume it first.")
