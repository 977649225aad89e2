"""Reservations: devices that are emptied for a request that has waited long enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from gpu_pool.policy import placement
from gpu_pool.policy.placement import more
from gpu_pool.policy.queue_state import Holding, Rules, Waiter
from gpu_pool_client import Device, DeviceStatus, Slice
from gpu_pool_client._free import fits

#: Of so many devices one may be reserved: each stands idle for a part of its time. More make
#: all others wait longer in every workload that was tried, and the large hardly shorter.
_ONE_IN = 4


#: Thousandths of a GPU, and MiB.
Size: TypeAlias = tuple[int, int]


class Reservations:
    """Which devices are kept free for whom, one in four unless one request needs more."""

    def __init__(self, devices: Sequence[Device], rules: Rules) -> None:
        self._devices = {device.uuid: device for device in devices}
        self._rules = rules
        self.by_number: dict[int, tuple[str, ...]] = {}

    def keep(self, waiter: Waiter) -> bool:
        """Take over an earlier reservation as it is, if all its devices are still there and its alone."""
        taken = self.of_others(waiter)
        free = {part.device.uuid for part in self._able(waiter)} - taken
        kept = tuple(dict.fromkeys(waiter.reserved))
        if not free.issuperset(kept) or len(kept) != waiter.request.count:
            return False
        self.by_number[waiter.number] = kept
        return True

    def of_others(self, waiter: Waiter) -> set[str]:
        """Return the uuids that are reserved for somebody else."""
        return {uuid for number, kept in self.by_number.items() if number != waiter.number for uuid in kept}

    def is_hindered(self, waiter: Waiter, smallest: Mapping[str, Size]) -> bool:
        """Whether leases stand in its way whose next end need not make room for it.

        Those are smaller ones, and where all on a device have one size, those of another.
        """
        able = self._able(waiter)
        if placement.most_together(able) < waiter.request.count:
            return False
        return waiter.request.count > 1 or any(
            _is_in_the_way(smallest[part.device.uuid], part) for part in able if part.device.uuid in smallest
        )

    @property
    def full(self) -> bool:
        """Whether no further device may be reserved."""
        return self._too_many(1)

    def add(self, waiter: Waiter, statuses: Sequence[DeviceStatus], holdings: Sequence[Holding]) -> bool:
        """Reserve the devices that the waiter could be placed on soonest.

        Returns False if it has to wait for other reservations to end. So has
        everybody after it, or one that needs many devices would wait for ever.
        """
        taken = self.of_others(waiter)
        free = [part for part in self._able(waiter) if part.device.uuid not in taken]
        count = waiter.request.count
        if placement.most_together(free) < count or self._too_many(count):
            return False
        by_uuid = {status.device.uuid: status for status in statuses}
        ready = {p.device.uuid: _readiness(p, by_uuid[p.device.uuid], holdings) for p in free}
        together = [
            sorted(parts, key=lambda part: ready[part.device.uuid])[:count]
            for parts in placement.by_node(free)
            if len(parts) >= count
        ]
        soonest = min(together, key=lambda parts: ready[parts[-1].device.uuid])
        chosen = {part.device.uuid for part in soonest}
        self.by_number[waiter.number] = tuple(uuid for uuid in self._devices if uuid in chosen)
        return True

    def _able(self, waiter: Waiter) -> list[Slice]:
        """Return its slice on every device that could ever hold it."""
        home = waiter.devices
        devices = [d for d in self._devices.values() if not home or d.uuid in home]
        return list(placement.candidates(waiter.request, devices, self._rules))

    def _too_many(self, more: int) -> bool:
        reserved = sum(map(len, self.by_number.values()))
        return bool(reserved) and reserved + more > max(1, len(self._devices) // _ONE_IN)


def smallest_by_device(holdings: Iterable[Holding]) -> dict[str, Size]:
    """Return the size of the smallest lease on each device."""
    smallest: dict[str, Size] = {}
    for holding in holdings:
        for part in holding.parts:
            uuid, size = part.device.uuid, (part.milli, part.memory_mib)
            if uuid not in smallest or size < smallest[uuid]:
                smallest[uuid] = size
    return smallest


def _is_in_the_way(size: Size, part: Slice) -> bool:
    return size[0] < part.milli or (part.device.one_size and size != (part.milli, part.memory_mib))


def _readiness(part: Slice, status: DeviceStatus, holdings: Iterable[Holding]) -> tuple[float, int, int]:
    """Return when the slice will fit at the latest, how much is held until then, and the index.

    Of equals the last device is taken: placement fills the first ones first.
    """
    uuid = part.device.uuid
    ends = [
        (math.inf if holding.ends_by is None else holding.ends_by, other)
        for holding in holdings
        for other in holding.parts
        if other.device.uuid == uuid
    ]
    return _fits_at(part, status, sorted(ends, key=lambda end: end[0])), status.held_milli, -part.device.index


def _fits_at(part: Slice, status: DeviceStatus, ends: Sequence[tuple[float, Slice]]) -> float:
    """Return the end after which the slice fits; ``ends`` are in order of time."""
    for at, ended in ends:
        status = more(status, ended)
        if fits(part, status):
            return at
    return math.inf
