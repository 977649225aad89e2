"""How leases of a pool as it should be change their size."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from gpu_pool.policy import admission, placement, quotas
from gpu_pool_client import Device, DeviceStatus, GpuPoolError, LeaseState, Slice, SliceRequest, TimedOut
from model.admitting import Admitting
from model.known import Known


class Resizing(Admitting):
    """A pool whose leases can be resized."""

    def resize(self, known: Known, request: SliceRequest) -> type[GpuPoolError] | None:
        """Change a lease's size; return the error that this must meet instead."""
        try:
            self._resize(known, request)
        except GpuPoolError as error:
            return type(error)
        return None

    def _resize(self, known: Known, asked: SliceRequest) -> None:
        request = self.counted_as(asked)
        admission.check_rules(request, self.rules)
        self.courses.check(known.course, asked, known.user, (), datetime.now(timezone.utc))
        if request == known.request:
            return
        if known.state is LeaseState.HELD and request.changes_only_limit_of(known.request):
            cuts = [placement.cut(request, part.device, self.rules) for part in known.parts]
            self._hold(known, request, tuple(cuts))
            return
        devices = self._devices()
        admission.check(request, devices, self.rules)
        new = next(placement.candidates(request, devices, self.rules))
        old = next(placement.candidates(known.request, devices, self.rules), None)
        is_less = (
            old is not None
            and request.count <= known.request.count
            and new.milli <= old.milli
            and new.memory_mib <= old.memory_mib
        )
        milli, memory_mib = self._size(request)
        if not is_less:
            more = (max(0, milli - known.milli), max(0, memory_mib - known.memory_mib))
            self._check_quotas(quotas.Account(known.user, known.course, 0, *more))
        if known.state is LeaseState.HELD:
            self._resize_held(known, request)
        else:
            self._resize_later(known, request, milli, memory_mib, keeps_turn=is_less)

    def _resize_held(self, known: Known, request: SliceRequest) -> None:
        parts = self._room_for(known, request)
        if parts is None:
            raise TimedOut("")
        self._hold(known, request, parts)

    def _hold(self, known: Known, request: SliceRequest, parts: tuple[Slice, ...]) -> None:
        held_at, ends_by = self.wall, known.ends_by
        known.stop_holding(self.uptime)
        known.request, known.parts, known.held_at, known.ends_by = request, parts, held_at, ends_by
        known.held_from = self.uptime
        known.measure()

    def _room_for(self, known: Known, request: SliceRequest) -> tuple[Slice, ...] | None:
        """Return what a held lease may have: of what is free and nobody waits for, and of its own."""
        own = {part.device.uuid: part for part in known.parts}
        rooms = []
        for status in self._present():
            part = own.get(status.device.uuid)
            rest = status if part is None else _without(status, part)
            if not status.drained and not self._is_waited_for(status.device, known):
                rooms.append(rest)
            elif part is not None:
                rooms.append(_nothing_but(part, rest))
        at_home = [each for each in rooms if each.device.uuid in own]
        return placement.place(request, at_home, self.rules) or placement.place(request, rooms, self.rules)

    def _is_waited_for(self, device: Device, by: Known) -> bool:
        return any(
            any(placement.candidates(each.request, [device], self.rules))
            for each in self.queue
            if (by.batch or not each.batch) and (not each.home or device.uuid in each.home)
        )

    def _resize_later(
        self, known: Known, request: SliceRequest, milli: int, memory_mib: int, *, keeps_turn: bool
    ) -> None:
        known.request, known.milli, known.memory_mib, known.reserved = request, milli, memory_mib, ()
        if known.state is LeaseState.WAITING and not keeps_turn:
            known.since = self.wall
            self.queue.remove(known)
            self.queue.append(known)
        at_home = [each for each in self._devices() if each.uuid in known.home]
        if len(list(placement.candidates(request, at_home, self.rules))) < request.count:
            known.home = frozenset()


def _without(status: DeviceStatus, part: Slice) -> DeviceStatus:
    return replace(
        status,
        held_milli=status.held_milli - part.milli,
        held_memory_mib=status.held_memory_mib - part.memory_mib,
        held_contexts=status.held_contexts - part.contexts,
        leases=status.leases - 1,
    )


def _nothing_but(part: Slice, status: DeviceStatus) -> DeviceStatus:
    return replace(
        status,
        drained=False,
        held_milli=status.milli - part.milli,
        held_memory_mib=status.device.memory_mib - part.memory_mib,
        held_contexts=(status.device.contexts or 0) - part.contexts,
    )
