"""Where a slice goes: pure functions over devices and what is free of them.

The policy is lowest index first, which leaves whole devices free for those
who need them, with deterministic ties. Several devices prefer those linked by
NVLink, then those on one NUMA node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import WHOLE, Device, DeviceStatus, Filters, Slice, SliceRequest

#: Sets of devices compared for one request; beyond it the first that fit are taken.
_MAX_COMBINATIONS = 5_000


def accepts(filters: Filters, device: Device) -> bool:
    """Whether the filters of a request let it onto this device."""
    if filters.model and filters.model.lower() not in device.model.lower().replace(" ", "-"):
        return False
    if filters.memory_mib and device.memory_mib < filters.memory_mib:
        return False
    if filters.driver and _version(device.driver) < filters.driver:
        return False
    return not filters.index or device.index in filters.index


def cut(request: SliceRequest, device: Device, rules: Rules) -> Slice:
    """Return the slice that the request means on this device, whether or not it fits.

    Shares are rounded down to whole MiB; a request for memory alone is charged
    compute in proportion, rounded up. A MIG instance is granted as a whole, to
    whoever asks for no more of a GPU than it is.
    """
    if device.mig_profile is not None:
        milli = max(device.milli, request.milli or 0)
        memory = max(device.memory_mib, request.memory_mib or 0)
    elif request.milli is not None:
        milli, memory = request.milli, device.memory_mib * request.milli // WHOLE
    else:
        memory = request.memory_mib or 0
        milli = -(-memory * WHOLE // max(1, device.memory_mib))
    # On a node of a cluster a slot is a pod's.
    contexts = 0 if device.contexts is None else 1 if device.node else rules.lease_contexts
    return Slice(device, milli, memory, contexts)


def holds(part: Slice, rules: Rules) -> bool:
    """Whether the slice's device could hold it if it were empty, and the rules let one lease have it.

    A share is also memory and memory is also a share, so both limits are held
    against the slice that was cut, in whatever unit it was asked for.
    """
    device = part.device
    least = rules.context_mib or device.context_mib
    most = min(device.memory_mib, rules.max_memory_mib or device.memory_mib)
    return (
        least <= part.memory_mib <= most
        and part.milli <= min(device.milli, rules.max_milli)
        and (device.contexts is None or part.contexts <= device.contexts)
    )


def fits(part: Slice, status: DeviceStatus) -> bool:
    """Whether the slice fits into what is free of its device now."""
    contexts = status.free_contexts
    # Where all slices must be of one size, that is the size of those held there already.
    n = status.leases if status.device.one_size else 0
    return (
        not status.drained
        and part.memory_mib <= status.unheld_memory_mib
        and part.milli <= status.unheld_milli
        and (contexts is None or part.contexts <= contexts)
        and (n == 0 or (n * part.milli, n * part.memory_mib) == (status.held_milli, status.held_memory_mib))
    )


def candidates(request: SliceRequest, devices: Iterable[Device], rules: Rules) -> Iterator[Slice]:
    """Yield the request's slice on every device that could ever hold it."""
    for device in devices:
        part = _candidate(request, device, rules)
        if part is not None:
            yield part


def _candidate(request: SliceRequest, device: Device, rules: Rules) -> Slice | None:
    """Return the request's slice on a device; None where the device could never hold it."""
    # A process can be a client of one MPS daemon, and each device that counts contexts has its own.
    alone = request.count == 1 or device.contexts is None or bool(device.node)
    if not alone or not accepts(request.filters, device):
        return None
    part = cut(request, device, rules)
    return part if holds(part, rules) else None


def place(request: SliceRequest, statuses: Sequence[DeviceStatus], rules: Rules) -> tuple[Slice, ...] | None:
    """Choose devices for the request, or None when it does not fit now."""
    fitting = (
        part
        for status in statuses
        if (part := _candidate(request, status.device, rules)) is not None and fits(part, status)
    )
    if request.count == 1:
        first = next(fitting, None)
        if first is not None and first.device.mig_profile is not None:
            first = min((first, *fitting), key=lambda part: part.memory_mib)
        return None if first is None else (first,)
    parts = next((parts for parts in by_node(fitting) if len(parts) >= request.count), None)
    return None if parts is None else _nearest(parts, request.count)


def by_node(parts: Iterable[Slice]) -> list[list[Slice]]:
    """Return the slices of each machine together: no process has devices of two."""
    found: dict[str, list[Slice]] = {}
    for part in parts:
        found.setdefault(part.device.node, []).append(part)
    return list(found.values())


def most_together(parts: Iterable[Slice]) -> int:
    """Return how many of the slices one machine has at most."""
    return max(map(len, by_node(parts)), default=0)


def deduct(statuses: Sequence[DeviceStatus], parts: Sequence[Slice]) -> list[DeviceStatus]:
    """Return the devices as they are once the slices have been granted."""
    taken = {part.device.uuid: part for part in parts}
    return [_less(s, taken[s.device.uuid]) if s.device.uuid in taken else s for s in statuses]


def largest(statuses: Sequence[DeviceStatus], rules: Rules) -> int:
    """Return the largest share, in thousandths, that one device could grant now (0 for none)."""
    return max((_largest_share(status, rules) for status in statuses), default=0)


def _largest_share(status: DeviceStatus, rules: Rules) -> int:
    device = status.device
    memory = min(status.free_memory_mib, rules.max_memory_mib or device.memory_mib)
    # One MiB more, exclusive: every share whose memory rounds down to that much.
    by_memory = ((memory + 1) * WHOLE - 1) // max(1, device.memory_mib)
    milli = min(device.milli, rules.max_milli, status.free_milli, by_memory)
    if device.one_size and status.leases:
        milli = min(milli, status.held_milli // status.leases)
    part = cut(SliceRequest(milli=milli), device, rules)
    return milli if milli > 0 and holds(part, rules) and fits(part, status) else 0


def _less(status: DeviceStatus, part: Slice) -> DeviceStatus:
    return replace(
        status,
        held_milli=status.held_milli + part.milli,
        held_memory_mib=status.held_memory_mib + part.memory_mib,
        held_contexts=status.held_contexts + part.contexts,
        leases=status.leases + 1,
    )


def _nearest(parts: Sequence[Slice], count: int) -> tuple[Slice, ...]:
    """Return ``count`` of the slices on the best connected devices, lowest index first."""
    sets = islice(combinations(parts, count), _MAX_COMBINATIONS)
    # max() keeps the first of equals, and combinations() come in index order.
    return max(sets, key=_closeness)


def _closeness(parts: Sequence[Slice]) -> tuple[int, int]:
    pairs = [(a.device, b.device) for a, b in combinations(parts, 2)]
    linked = sum(b.uuid in a.nvlink or a.uuid in b.nvlink for a, b in pairs)
    near = sum(a.numa_node is not None and a.numa_node == b.numa_node for a, b in pairs)
    return linked, near


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", text))


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
