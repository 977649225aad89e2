"""What becomes free when slices are given back: the reverse of ``placement.deduct``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_pool_client import DeviceStatus, Slice


def give_back(statuses: Sequence[DeviceStatus], parts: Sequence[Slice]) -> list[DeviceStatus]:
    """Return the devices as they are once the slices have been given back."""
    given = {part.device.uuid: part for part in parts}
    return [more(s, given[s.device.uuid]) if s.device.uuid in given else s for s in statuses]


def more(status: DeviceStatus, part: Slice) -> DeviceStatus:
    """Return the device with one slice less held of it."""
    return replace(
        status,
        held_milli=status.held_milli - part.milli,
        held_memory_mib=status.held_memory_mib - part.memory_mib,
        held_contexts=status.held_contexts - part.contexts,
        leases=status.leases - 1,
    )
