"""How many slices of a size are free. Pure, and for people to read: what is granted, the pool decides."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_pool_client import WHOLE, Device, DeviceStatus, Filters, SliceRequest


def free_now(request: SliceRequest, statuses: Sequence[DeviceStatus]) -> int:
    """Return how many such requests these devices could grant now, quotas and the line left aside."""
    each = [_on(request, status) for status in statuses]
    most = sum(each) // request.count
    # The parts of one request lie on different devices.
    while most and sum(min(number, most) for number in each) < most * request.count:
        most -= 1
    return most


def _on(request: SliceRequest, status: DeviceStatus) -> int:
    """Return how many of the request's slices one device has room for."""
    device = status.device
    if status.drained or not accepts(request.filters, device):
        return 0
    milli, memory = _cost(request, device)
    if milli > device.milli or memory > device.memory_mib:
        return 0
    if device.mig_profile is not None:
        return int(not status.leases)
    n = status.leases if device.one_size else 0
    if n and (n * milli, n * memory) != (status.held_milli, status.held_memory_mib):
        return 0
    room = min(status.free_milli // milli, status.free_memory_mib // max(1, memory))
    return room if status.free_contexts is None else min(room, status.free_contexts)


def _cost(request: SliceRequest, device: Device) -> tuple[int, int]:
    """Return the compute and the memory that a request takes of a device."""
    if request.milli is not None:
        return request.milli, device.memory_mib * request.milli // WHOLE
    memory = request.memory_mib or 0
    return max(1, -(-memory * WHOLE // max(1, device.memory_mib))), memory


def accepts(filters: Filters, device: Device) -> bool:
    """Whether the filters of a request let it onto this device."""
    model = device.model.lower().replace(" ", "-")
    driver = tuple(int(part) for part in device.driver.split(".") if part.isdecimal())
    return (
        (filters.model or "").lower() in model
        and device.memory_mib >= (filters.memory_mib or 0)
        and driver >= (filters.driver or ())
        and (not filters.index or device.index in filters.index)
    )
