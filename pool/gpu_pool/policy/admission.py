"""Who may have what: pure checks that refuse at once what could only wait in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import (
    WHOLE,
    BadRequest,
    Device,
    DeviceStatus,
    NeverFits,
    NotAllowed,
    OverQuota,
    SliceRequest,
    format_memory,
    format_share,
)
from gpu_pool_client._free import accepts, ask_about, say_drained
from gpu_pool_client._requests import memory_in_words

#: GPUs of which a message says how much is free.
_MOST_NAMED = 8


def check_rules(request: SliceRequest, rules: Rules) -> None:
    """Refuse, with ``NotAllowed``, what the rules forbid on any device."""
    if rules.max_devices and request.count > rules.max_devices:
        raise NotAllowed(
            f"You asked for {request}, that is {request.count} GPUs; "
            f"this pool gives at most {rules.max_devices} to one lease.",
            f"Ask for {rules.max_devices} or less, or ask the administrator.",
        )
    too_large = (request.milli or 0) > rules.max_milli
    if too_large or (rules.max_memory_mib and (request.memory_mib or 0) > rules.max_memory_mib):
        raise _forbidden(request, rules)


def check_waiting(request: SliceRequest, waiting: int, most: int) -> None:
    """Refuse, with ``OverQuota``, one more in the queue of a user who has so many waiting; 0 is no limit."""
    if most and waiting >= most:
        raise OverQuota(
            f"You asked for {request}, and you wait for {waiting} slices already; "
            f"{most} is the most that one user may wait for at once.",
            "Wait until one of them is granted, or withdraw what you do not need: gpu-pool release ID "
            '("gpu-pool list" shows the ids).',
        )


def check(request: SliceRequest, devices: Sequence[Device], rules: Rules) -> None:
    """Refuse a request that these devices can never grant.

    Raises ``NeverFits`` with the arithmetic and the largest that would fit, and
    ``NotAllowed`` where only the rules stand in the way.
    """
    if not devices:
        raise NeverFits(
            f"You asked for {request.named}; this pool has no GPU.",
            'Run "gpu-pool doctor" to see why. To try things out without one, '
            'set GPU_POOL_DEVICES="V100-SXM2-32GB:1" for a simulated GPU.',
        )
    if request.count > len(devices) == 1:
        raise NeverFits(
            f"You asked for {request}, that is {_each_of(request)}; this pool has one: {_listing(devices)}.",
            f"Ask for at most {replace(request, count=1).size}.",
        )
    accepted = _accepted(request, devices)
    able = list(placement.candidates(request, accepted, rules))
    if not able:
        unlimited = replace(rules, max_milli=WHOLE, max_memory_mib=0)
        if any(placement.candidates(request, accepted, unlimited)):
            raise _forbidden(request, rules)
        raise _too_large_or_small(request, accepted, rules)
    most = placement.most_together(able)
    if most < request.count:
        together = " of one machine" if most < len(able) else ""
        raise NeverFits(
            f"You asked for {request}, that is {_each_of(request)}; "
            f"{most}{together} here could take part: {_listing([part.device for part in able])}.",
            f"Ask for at most {replace(request, count=most).size}.",
        )


def _accepted(request: SliceRequest, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that the request's filters accept. Raises ``NeverFits`` where these cannot do."""
    accepted = [device for device in devices if accepts(request.filters, device)]
    if not accepted:
        raise NeverFits(
            f"You asked for {request.named}; no GPU here matches that. There is: {_listing(devices)}.",
            "Ask for one of these, or leave the filter out.",
        )
    by_mps = [d for d in accepted if d.contexts is not None and not d.node and not d.exclusive]
    if request.count > 1 and len(by_mps) == len(accepted):
        raise NeverFits(
            f"You asked for {request}, that is {_each_of(request)}; here each GPU is shared by MPS, "
            "and a process can use one of them.",
            "Ask for one GPU, or ask the administrator.",
        )
    return accepted


def find_device(name: str, devices: Sequence[Device]) -> Device:
    """Return the one device with that uuid or index. Raises ``BadRequest`` that lists what there is."""
    found = [device for device in devices if name in (device.uuid, str(device.index))]
    if len(found) == 1:
        return found[0]
    problem = "is not a GPU of this pool" if not found else "means several; name one by its uuid"
    there_is = ", ".join(f"{device.index} ({device.uuid})" for device in devices[:16]) or "none"
    raise BadRequest(f"{name[:64]!a} {problem}.", f"There is: {there_is}.")


def shortage(
    request: SliceRequest,
    statuses: Sequence[DeviceStatus],
    ahead: int,
    rules: Rules,
    drained: Sequence[DeviceStatus] = (),
) -> tuple[str, str, str | None]:
    """Say why a request that could fit does not fit now.

    ``statuses`` are of the devices on which something may be granted, ``drained`` of the others.
    Returns (message, remedy, largest request that would start now or None).
    """
    drained = [status for status in drained if accepts(request.filters, status.device)]
    milli = 0 if ahead else placement.largest(statuses, rules)
    largest = SliceRequest(milli=milli).size if milli else None
    freest = sorted(statuses, key=lambda status: -status.free_milli)[:_MOST_NAMED]
    many = f"The freest of {len(statuses)} GPUs: " if len(statuses) > _MOST_NAMED else ""
    held = many + "; ".join(_occupancy(status) for status in (freest if many else statuses))
    line = f"{ahead} waiting before you." if ahead else ""
    parts = f"{_not_free(request)} now.", f"{held}." if statuses else "", say_drained(drained)
    message = " ".join(filter(None, (*parts, line)))
    if largest:
        remedy = f"Free at this moment: up to {up_to(milli)}. Choose a smaller slice, or try again later."
    elif drained and not any(status.leases for status in statuses):
        # Nobody's end would make room.
        remedy = ask_about(drained) or "Try again once that is mended."
    else:
        remedy = "Try again when somebody has finished."
    return message, remedy, largest


def _not_free(request: SliceRequest) -> str:
    if not request.whole_devices:
        return f"No GPU slice of {request} is free"
    if request.count == 1:
        return f"No {request.named.removeprefix('a ')} is free"
    return f"{request.named} are not free together"


def up_to(milli: int) -> str:
    """Say how much of one GPU that is: ``15% of one GPU``, ``a whole GPU``."""
    return "a whole GPU" if milli == WHOLE else f"{format_share(milli)} of one GPU"


def _forbidden(request: SliceRequest, rules: Rules) -> NotAllowed:
    share = f"{format_share(rules.max_milli)} of a GPU" if rules.max_milli < WHOLE else ""
    memory = f"{format_memory(rules.max_memory_mib)} on one GPU" if rules.max_memory_mib else ""
    most = " and ".join(filter(None, (share, memory)))
    return NotAllowed(
        f"You asked for {request.named}; the most this pool gives to one lease is {most}.",
        "Ask for less, or ask the administrator.",
    )


def _too_large_or_small(request: SliceRequest, devices: Sequence[Device], rules: Rules) -> NeverFits:
    """Explain why no device could hold one part of the request, by the largest device."""
    device = max(devices, key=lambda each: each.memory_mib)
    part = placement.cut(request, device, rules)
    if part.memory_mib > device.memory_mib:
        return NeverFits(
            f"You asked for {request.named}; the largest GPU here, {device.label}, "
            f"has {format_memory(device.memory_mib)}.",
            f"Ask for at most {format_memory(device.memory_mib)}.",
        )
    if part.milli > device.milli:
        return NeverFits(
            f"You asked for {request.named}; the largest MIG instance here, {device.label}, "
            f"is {format_share(device.milli)} of its GPU.",
            f"Ask for at most {format_share(device.milli)}.",
        )
    context = rules.context_mib or device.context_mib
    if part.memory_mib >= context:
        return NeverFits(
            f"You asked for {request.named}; {device.label} has {device.contexts} CUDA context slots, "
            f"and each kernel needs {part.contexts}.",
            "Ask the administrator.",
        )
    size, memory = request.guarantee.size, format_memory(device.memory_mib)
    least = -(-context * WHOLE // device.memory_mib)
    return NeverFits(
        f"{size} of {device.label} ({memory}) is {part.memory_mib} MiB. "
        f"CUDA itself takes about {context} MiB before the first tensor, so nothing would be left.",
        f"Ask for at least {format_share(least)} here.",
    )


def _each_of(request: SliceRequest) -> str:
    """Say how many GPUs are asked for, and how much of each: ``2 GPUs``, ``50% of each of 2 GPUs``."""
    gpus = f"{request.count} GPUs"
    return gpus if request.whole_devices else f"{replace(request.guarantee, count=1).size} of each of {gpus}"


def _listing(devices: Sequence[Device]) -> str:
    return ", ".join(f"{d.index}: {d.label}, {d.memory_label}" for d in devices[:16])


def _occupancy(status: DeviceStatus) -> str:
    if status.device.exclusive and status.leases:
        label = status.device.label
        return f"{label}: in use, and its compute mode, Exclusive_Process, admits one process at a time"
    return (
        f"{status.device.label}: {format_share(status.free_milli)} and "
        f"{memory_in_words(status.free_memory_mib)} free, {status.leases} in use"
    )
