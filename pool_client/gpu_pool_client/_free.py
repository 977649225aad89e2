"""What a request means on a device, and how many of it are free: pure functions over a pool's status."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Final

from gpu_pool_client._devices import Device, DeviceStatus, Slice
from gpu_pool_client._requests import WHOLE, Filters, SliceRequest


def accepts(filters: Filters, device: Device) -> bool:
    """Whether the filters of a request let it onto this device."""
    if filters.model and filters.model.lower() not in device.model.lower().replace(" ", "-"):
        return False
    if filters.memory_mib and device.memory_mib < filters.memory_mib:
        return False
    if filters.driver and _version(device.driver) < filters.driver:
        return False
    return not filters.index or device.index in filters.index


def cut(request: SliceRequest, device: Device, lease_contexts: int = 1) -> Slice:
    """Return the slice that the request means on this device, whether or not it fits.

    Shares are rounded down to whole MiB; a request for memory alone is charged
    compute in proportion, rounded up. A MIG instance is granted as a whole, or in as many equal parts as it
    has context slots, to whoever asks for no more of a GPU than that is. The request's limit changes none
    of that; it is at most the device's memory. ``lease_contexts`` is how many
    context slots a lease takes of a device that counts them.
    """
    if device.mig_profile is not None:
        parts = max(1, device.contexts or 1)
        milli = max(device.milli // parts, request.milli or 0)
        memory = max(device.memory_mib // parts, request.memory_mib or 0)
    elif request.milli is not None:
        milli, memory = request.milli, device.memory_mib * request.milli // WHOLE
    else:
        memory = request.memory_mib or 0
        milli = -(-memory * WHOLE // max(1, device.memory_mib))
    # On a node of a cluster a slot is a pod's; a device that admits one process has one.
    one = device.node or device.exclusive
    contexts = 0 if device.contexts is None else 1 if one else lease_contexts
    limit = _limit(request, device)
    return Slice(device, milli, memory, contexts, limit if limit > memory else 0)


def _limit(request: SliceRequest, device: Device) -> int:
    """Return how much of the device's memory the request may ever use, in MiB; 0 where its guarantee is all.

    Where the hardware, or the daemon that all of a device share, holds each slice to its size, that is all.
    """
    if not request.has_limit or device.mig_profile is not None or device.one_size:
        return 0
    if request.limit_milli is not None:
        return device.memory_mib * request.limit_milli // WHOLE
    return min(request.limit_mib or 0, device.memory_mib)


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


def free_slices(status: DeviceStatus, milli: int, memory_mib: int, contexts: int = 1) -> int:
    """Return how many slices of this size a device has free; of 0 any number is free."""
    free = [status.free_milli // max(1, milli)]
    if memory_mib and status.device.memory_mib:
        free.append(status.free_memory_mib // memory_mib)
    if status.free_contexts is not None and contexts:
        free.append(status.free_contexts // contexts)
    return min(free)


def whole_requests(slices: Sequence[int], count: int) -> int:
    """Return how many requests for ``count`` devices devices with so many ``slices`` each can serve.

    The parts of one request lie on different devices.
    """
    most = sum(slices) // count
    while most and sum(min(number, most) for number in slices) < most * count:
        most -= 1
    return most


def accepting(request: SliceRequest, statuses: Iterable[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that the request's filters let it onto, whatever is free of them."""
    return [each for each in statuses if accepts(request.filters, each.device)]


def free_now(request: SliceRequest, statuses: Iterable[DeviceStatus]) -> int | None:
    """Return how many such requests these devices could grant now, quotas and the queue left aside.

    For people to read: what is granted, the pool decides. None where a queue that is not the pool's decides,
    such as Slurm's: its devices stand for as many as there are, and say nothing of what is free.
    """
    able = list(accepting(request, statuses))
    if any(each.device.unbounded for each in able):
        return None
    return whole_requests([_free_on(request, each) for each in able], request.count)


def _free_on(request: SliceRequest, status: DeviceStatus) -> int:
    device, part = status.device, cut(request, status.device)
    is_larger = part.milli > device.milli or part.memory_mib > device.memory_mib
    if is_larger or not fits(part, status):
        return 0
    if device.mig_profile is not None:
        return max(0, max(1, device.contexts or 1) - status.leases)
    return free_slices(status, part.milli, part.memory_mib)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", text))


#: Devices that are named; of more it is said how many.
_MOST_NAMED: Final = 8


def say_drained(drained: Sequence[DeviceStatus]) -> str:
    """Say which devices grant nothing new, and why: what is wrong with them, or by whom and since when.

    Empty for none. The time is that of the clock and the time zone of this process.
    """
    faults = dict.fromkeys(status.device.fault for status in drained if status.device.fault)
    closed = [status for status in drained if not status.device.fault]
    return " ".join(filter(None, (*faults, _say_closed(closed))))


def _say_closed(drained: Sequence[DeviceStatus]) -> str:
    if not drained:
        return ""
    them = "it" if len(drained) == 1 else "them"
    by_cluster = all(status.drained_at is None for status in drained)
    who = "The cluster has closed" if by_cluster else "An administrator has drained"
    return f"{who} {_names(drained)}{_since(drained)}: nothing new is granted on {them}."


def ask_about(drained: Sequence[DeviceStatus]) -> str:
    """Say what somebody can do who waits for drained devices, beyond what is said of these."""
    drained = [status for status in drained if not status.device.fault]
    if not drained:
        return ""
    are = "it is" if len(drained) == 1 else "they are"
    return f"Ask the administrator when {are} in use again."


def _names(drained: Sequence[DeviceStatus]) -> str:
    indexes = [str(status.device.index) for status in drained]
    if len(indexes) > _MOST_NAMED or len(set(indexes)) < len(indexes):  # such as MIG instances of one GPU
        return f"{len(indexes)} GPUs"
    if len(indexes) == 1:
        return f"GPU {indexes[0]}"
    return f"GPUs {', '.join(indexes[:-1])} and {indexes[-1]}"


def _since(drained: Sequence[DeviceStatus]) -> str:
    known = [status.drained_at for status in drained if status.drained_at is not None]
    if not known:
        return ""
    first = "" if len(drained) == 1 else "the first "
    return f" ({first}since {time.strftime('%Y-%m-%d %H:%M %Z', time.localtime(min(known)))})"
