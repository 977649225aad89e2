"""What people read, and what programs do: values as short texts, rows of cells and JSON shapes.

Programs may rely on the JSON shapes: amounts of memory are in MiB, shares in thousandths of a device
(``milli``), times in Unix seconds, and keys are only ever added.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gpu_pool_client import (
    BadRequest,
    Device,
    DeviceStatus,
    Enforcement,
    Failure,
    GpuPoolError,
    Holder,
    Lease,
    LeaseState,
    Limit,
    PoolStatus,
    Slice,
    TimedOut,
    format_duration,
    format_memory,
    format_share,
)
from gpu_pool_client._devices import MEMORY_UNKNOWN
from gpu_pool_client._home import why_homeless
from gpu_pool_client._leases import memory_on_top, why_over

#: Longest text of unknown origin in a cell.
MAX_CELL = 60


def safe(text: str, limit: int = MAX_CELL) -> str:
    """Make text of unknown origin fit for a terminal: printable, one line, not too long."""
    shown = "".join(char if char.isprintable() else "?" for char in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def ordinal(number: int) -> str:
    """Write a position in the queue: ``1st``, ``2nd``, ``11th``."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}" + {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def waiting(lease: Lease, expected: str = "") -> str:
    """Say where a waiting lease stands, and what wait is expected."""
    place = f"{ordinal(lease.position)} in the queue" if lease.position else ""
    where = ", ".join(filter(None, (place, expected)))
    return f"waiting for {lease.request.named}{': ' if where else ''}{where}"


def granted(lease: Lease) -> str:
    """Say what a held lease holds: ``2% of V100-SXM2-32GB (simulated), 655MiB``."""
    labels = " and ".join(dict.fromkeys(part.device.label for part in lease.slices))
    size = f"{lease.request.size} whole" if lease.request.whole_devices else f"{lease.request.size} of"
    each = " each" if len(lease.slices) > 1 else ""
    on_top = memory_on_top(lease.slices, format_memory)
    memory = format_memory(lease.memory_mib) if lease.memory_mib else MEMORY_UNKNOWN
    return f"{size} {safe(labels)}, {memory}{each}{on_top}"


def at_most(lease: Lease, now: float) -> str:
    """Say for how long a lease may still be held at ``now``: ``, for at most 2h``; empty for no limit."""
    ends_at = lease.terms.ends_at
    return "" if ends_at is None else f", for at most {format_duration(max(1.0, ends_at - now))}"


def lease_ends(left: float, why: str) -> str:
    """Warn that a command ends with its longest lease, so many seconds from now."""
    return f"the slice ends in {format_duration(max(1.0, left))}, and the command with it, because {why}"


def lease_over(reason: str, notice: str, grace: float) -> str:
    """Say that a command is ended since its lease is over, with what the pool has to say about it."""
    over = f"the slice has ended: {safe(why_over(reason))}."
    ended = f"The command is being ended: SIGTERM now, SIGKILL in {grace:g} s."
    return " ".join(filter(None, (over, safe(notice, 1_000), ended)))


def holder(who: Holder) -> str:
    """Say who holds: the user, the course if any, and whether it is batch work."""
    facts = ", ".join(filter(None, (who.course, "batch" if who.batch else "")))
    return safe(f"{who.user} ({facts})" if facts else who.user)


def device_row(status: DeviceStatus) -> list[str]:
    """One device as cells under :data:`DEVICE_COLUMNS`; nothing of a drained one is free."""
    contexts = status.free_contexts
    return [
        str(status.device.index),
        safe(status.device.label + (f" on {status.device.node}" if status.device.node else "")),
        _why_closed(status)
        if status.drained
        else f"{format_share(status.free_milli)} of {format_share(status.milli)}",
        _free_memory(status),
        "-" if contexts is None or status.drained else f"{contexts} of {status.device.contexts}",
        str(status.leases),
    ]


def _free_memory(status: DeviceStatus) -> str:
    if status.drained:
        return "-"
    if not status.device.memory_mib:
        return "not known"
    return f"{format_memory(status.free_memory_mib)} of {format_memory(status.device.memory_mib)}"


def _why_closed(status: DeviceStatus) -> str:
    return "not usable" if status.device.fault else "drained"


DEVICE_COLUMNS = ("GPU", "Model", "Free share", "Free memory", "Free contexts", "Leases")


def device_rows(status: PoolStatus) -> list[list[str]]:
    """All devices as cells under :data:`DEVICE_COLUMNS`."""
    return [device_row(device) for device in status.devices]


HOLDING_COLUMNS = ("GPU", "Share", "Memory", "User", "For", "Process", "Held for", "Lease")


def holding_rows(status: PoolStatus, now: float) -> list[list[str]]:
    """Every slice that is held, by device, as cells under :data:`HOLDING_COLUMNS`."""
    return [
        [
            str(device.device.index),
            part.share,
            f"{part.memory_label}{memory_on_top([part], format_memory)}",
            holder(lease.holder),
            safe(lease.holder.kernel or "-"),
            str(lease.process.pid) if lease.process else "-",
            held_for(lease, now),
            safe(lease.id),
        ]
        for device in status.devices
        for lease in status.leases
        for part in lease.slices
        if part.device.uuid == device.device.uuid
    ]


#: Under it stands how firmly memory and compute are held, in that order.
LIMITS = "Limits"
#: Shown where a lease has one.
JOB = "Job"
LEASE_COLUMNS = ("State", "Slice", "GPU", "Memory", LIMITS, "User", "For", "Process", "Since", JOB, "Lease")


def lease_row(lease: Lease, now: float) -> list[str]:
    """One lease as cells under :data:`LEASE_COLUMNS`."""
    is_waiting = lease.state is LeaseState.WAITING
    state = "queued" if lease.is_queued else lease.state.value
    return [
        f"{ordinal(lease.position)} in the queue" if is_waiting and lease.position else state,
        safe(str(lease.request)),
        _devices(lease),
        _lease_memory(lease),
        _limits(lease.enforcement) if lease.slices else "-",
        holder(lease.holder),
        safe(lease.holder.kernel or "-"),
        str(lease.process.pid) if lease.process else "-",
        format_duration(now - lease.requested_at) if is_waiting else held_for(lease, now),
        safe(lease.terms.job) or "-",
        safe(lease.id),
    ]


def _limits(enforcement: Enforcement) -> str:
    return f"{enforcement.memory.strength.value}, {enforcement.compute.strength.value}"


def lease_rows(status: PoolStatus, now: float) -> list[list[str]]:
    """Leases, then the queue, as cells under :data:`LEASE_COLUMNS`."""
    return [lease_row(lease, now) for lease in (*status.leases, *status.queue)]


def _lease_memory(lease: Lease) -> str:
    if not lease.slices:
        return "-"
    if not lease.memory_mib:
        return "not known"
    return f"{format_memory(lease.memory_mib)}{memory_on_top(lease.slices, format_memory)}"


def slice_lines(lease: Lease, used: dict[str, int], now: float) -> list[tuple[str, str]]:
    """Describe one held lease as (label, text); ``used`` is MiB in use by device uuid, where known."""
    return [
        ("Slice", granted(lease)),
        *(("GPU", _memory(part, used)) for part in lease.slices),
        ("Memory limit", str(lease.enforcement.memory)),
        ("Compute limit", str(lease.enforcement.compute)),
        ("Held for", held_for(lease, now)),
        *_ends_in(lease, now),
        ("For", safe(lease.holder.kernel or "-")),
        ("Process", str(lease.process.pid) if lease.process else "none yet"),
        ("Lease", safe(lease.id)),
    ]


def _ends_in(lease: Lease, now: float) -> list[tuple[str, str]]:
    terms, found = lease.terms, list[tuple[str, str]]()
    if terms.ends_at is not None:
        left = format_duration(max(0.0, terms.ends_at - now))
        found.append(("Ends in", f"{left}: {terms.why_it_ends}"))
    if terms.job:
        at = terms.job_ends_at
        ends = "" if at is None else f", which ends in {format_duration(max(0.0, at - now))}"
        found.append(("Job", f"{safe(terms.job)}{ends}"))
    return found


def held_for(lease: Lease, now: float) -> str:
    """Say how long a lease has been held."""
    return "-" if lease.held_at is None else format_duration(now - lease.held_at)


def _memory(part: Slice, used: dict[str, int]) -> str:
    device = part.device
    use = f"{format_memory(used[device.uuid])} used" if device.uuid in used else "use not known"
    granted = f"{part.memory_label} granted{memory_on_top([part], format_memory)}"
    if not device.memory_mib:
        granted = part.memory_label
    return f"{device.index}: {safe(device.label)}, {granted}, {use}"


def _devices(lease: Lease) -> str:
    indexes = sorted(part.device.index for part in lease.slices)
    shown = ",".join(map(str, indexes)) or "-"
    return f"{shown} (simulated)" if lease.simulated else shown


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
        "hibernates": status.hibernates,
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
        "place": dataclasses.asdict(lease.place) if lease.place else None,
        "user": lease.holder.user,
        "course": lease.holder.course,
        "kernel": lease.holder.kernel,
        "batch": lease.holder.batch,
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
        "job": lease.terms.job or None,
        "job_ends_at": lease.terms.job_ends_at,
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
    """Return the whole snapshot: devices, leases and the queue."""
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
    found = {"milli": part.milli, "memory_mib": part.memory_mib, "contexts": part.contexts}
    if part.limit_mib:
        found |= {"limit_mib": part.limit_mib, "burst_mib": part.burst_mib}
    return found


def _limit(limit: Limit) -> Plain:
    return {"strength": limit.strength.value, "by": limit.by}


def no_jupyter_folders() -> BadRequest:
    """Say what is missing where Jupyter has no place for what is a user's own."""
    return BadRequest(
        f"Jupyter has no folder for this user: {why_homeless()}.",
        "Set HOME to a folder that you may write to.",
    )
