"""Values as plain dictionaries: the JSON shapes, which programs may rely on.

Amounts of memory are in MiB, shares in thousandths of a device (``milli``),
times in Unix seconds. Keys are only ever added.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gpu_pool_client import (
    Device,
    DeviceStatus,
    Failure,
    GpuPoolError,
    Lease,
    Limit,
    PoolStatus,
    Slice,
    TimedOut,
)

Plain = dict[str, Any]


def plain_device(device: Device) -> Plain:
    """Return a device: what it is."""
    return {**dataclasses.asdict(device), "nvlink": list(device.nvlink)}


def plain_device_status(status: DeviceStatus, leases: tuple[Lease, ...]) -> Plain:
    """Return a device, what is held and free of it, and by whom."""
    return {
        **plain_device(status.device),
        "drained": status.drained,
        "drained_at": status.drained_at,
        "milli": status.milli,
        "held_milli": status.held_milli,
        "free_milli": status.free_milli,
        "held_memory_mib": status.held_memory_mib,
        "free_memory_mib": status.free_memory_mib,
        "held_contexts": status.held_contexts,
        "free_contexts": status.free_contexts,
        "held_by": [
            {"lease": lease.id, "user": lease.holder.user, "kernel": lease.holder.kernel, **_amounts(part)}
            for lease in leases
            for part in lease.slices
            if part.device.uuid == status.device.uuid
        ],
    }


def plain_lease(lease: Lease) -> Plain:
    """Return a lease: who asked for what, and what became of it."""
    return {
        "id": lease.id,
        "request": str(lease.request),
        "state": lease.state.value,
        "position": lease.position,
        "user": lease.holder.user,
        "course": lease.holder.course,
        "kernel": lease.holder.kernel,
        "requested_at": lease.requested_at,
        "held_at": lease.held_at,
        "ended_at": lease.ended_at,
        "end_reason": lease.end_reason.value if lease.end_reason else None,
        "pid": lease.process.pid if lease.process else None,
        "slices": [{"device": part.device.uuid, **_amounts(part)} for part in lease.slices],
        "enforcement": {
            "memory": _limit(lease.enforcement.memory),
            "compute": _limit(lease.enforcement.compute),
        },
        "ends_at": lease.terms.ends_at,
        "simulated": lease.simulated,
        "failure": plain_failure(lease.failure),
    }


def plain_failure(failure: Failure | None) -> Plain | None:
    """Return how a lease's kernel has failed, if one did."""
    return dataclasses.asdict(failure) if failure else None


def plain_devices(status: PoolStatus) -> Plain:
    """Return the pool's devices and who holds what of them."""
    return {
        "url": status.url,
        "simulated": status.simulated,
        "note": status.note,
        "devices": [plain_device_status(device, status.leases) for device in status.devices],
    }


def plain_status(status: PoolStatus) -> Plain:
    """Return the whole snapshot: devices, leases and the line."""
    return {
        **plain_devices(status),
        "leases": [plain_lease(lease) for lease in status.leases],
        "queue": [plain_lease(lease) for lease in status.queue],
    }


def plain_error(error: GpuPoolError) -> Plain:
    """Return an error; ``largest_now`` is there when a smaller request would have been granted."""
    found: Plain = {"code": error.code, "message": error.message, "remedy": error.remedy}
    if isinstance(error, TimedOut):
        found["largest_now"] = error.largest_now
    return {"error": found}


def _amounts(part: Slice) -> Plain:
    return {"milli": part.milli, "memory_mib": part.memory_mib, "contexts": part.contexts}


def _limit(limit: Limit) -> Plain:
    return {"strength": limit.strength.value, "by": limit.by}
