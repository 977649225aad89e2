"""Where a slice goes: pure functions over devices and what is free of them.

The policy is lowest index first, which leaves whole devices free for those
who need them, with deterministic ties. Several devices prefer those linked by
NVLink, then those on one NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import WHOLE, Device, DeviceStatus, Slice, SliceRequest, _free
from gpu_pool_client._free import accepts, fits

#: Sets of devices compared for one request; beyond it the first that fit are taken.
_MAX_COMBINATIONS = 5_000


def cut(request: SliceRequest, device: Device, rules: Rules) -> Slice:
    """Return the slice that the request means on this device, whether or not it fits; see ``_free.cut``.

    Its limit is no more than what the rules let one lease have.
    """
    part = _free.cut(request, device, rules.lease_contexts)
    if not part.limit_mib:
        return part
    most = min(device.memory_mib * rules.max_milli // WHOLE, rules.max_memory_mib or device.memory_mib)
    limit = min(part.limit_mib, most)
    return replace(part, limit_mib=limit if limit > part.memory_mib else 0)


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


def candidates(request: SliceRequest, devices: Iterable[Device], rules: Rules) -> Iterator[Slice]:
    """Yield the request's slice on every device that could ever hold it."""
    for device in devices:
        part = _candidate(request, device, rules)
        if part is not None:
            yield part


class Sizes:
    """What requests take of all their devices together, each worked out once."""

    def __init__(self, devices: Sequence[Device], rules: Rules) -> None:
        self._devices, self._rules = devices, rules
        #: By identity: the same few objects are asked for over and over, and hashing one takes long.
        #: The request is kept, so that no other one gets its identity.
        self._known: dict[int, tuple[SliceRequest, int]] = {}

    def milli(self, request: SliceRequest) -> int:
        """Return what it takes on the first of the devices that could hold it; 1 where none could."""
        known = self._known.get(id(request))
        if known is None:
            part = next(candidates(request, self._devices, self._rules), None)
            known = self._known[id(request)] = request, part.milli * request.count if part else 1
        return known[1]


def _candidate(request: SliceRequest, device: Device, rules: Rules) -> Slice | None:
    """Return the request's slice on a device; None where the device could never hold it."""
    # A process can be a client of one MPS daemon, and each device that counts contexts has its own.
    alone = request.count == 1 or device.contexts is None or bool(device.node) or device.exclusive
    if not alone or not accepts(request.filters, device):
        return None
    part = cut(request, device, rules)
    return part if holds(part, rules) else None


def with_room(statuses: Iterable[DeviceStatus]) -> dict[str, DeviceStatus]:
    """Return by uuid, in their order, the devices on which anything could fit now: few of a full pool."""
    return {
        each.device.uuid: each
        for each in statuses
        if not each.drained
        # A part of a MIG instance may be less than a thousandth of a GPU.
        and (each.held_milli < each.milli or each.device.unbounded or each.device.mig_profile is not None)
    }


def place(request: SliceRequest, statuses: Iterable[DeviceStatus], rules: Rules) -> tuple[Slice, ...] | None:
    """Choose devices for the request, or None when it does not fit now."""
    least = request.milli or 0
    fitting = (
        part
        for status in statuses
        # A slice is at least as large as its request: most of a full pool is passed over uncut.
        if (least + status.held_milli <= status.milli or status.device.unbounded)
        and (part := _candidate(request, status.device, rules)) is not None
        and fits(part, status)
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
    if not any(part.device.nvlink or part.device.numa_node is not None for part in parts):
        return tuple(parts[:count])  # none is nearer to another
    sets = islice(combinations(parts, count), _MAX_COMBINATIONS)
    # max() keeps the first of equals, and combinations() come in index order.
    return max(sets, key=_closeness)


def _closeness(parts: Sequence[Slice]) -> tuple[int, int]:
    pairs = [(a.device, b.device) for a, b in combinations(parts, 2)]
    linked = sum(b.uuid in a.nvlink or a.uuid in b.nvlink for a, b in pairs)
    near = sum(a.numa_node is not None and a.numa_node == b.numa_node for a, b in pairs)
    return linked, near


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
