"""The arithmetic of a course: how many of each slice fit, and what happens when all come at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_pool.courses.model import CourseFile, SliceOffer
from gpu_pool.policy import placement
from gpu_pool.policy.queue import Policy
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Quota
from gpu_pool.simulation import ORDERS, Arrival, figures, simulate
from gpu_pool.simulation.report import WaitFigures
from gpu_pool_client import Device, Slice, SliceRequest


@dataclass(frozen=True, slots=True)
class Fit:
    """A slice on one model of GPU."""

    gpu: str
    gpus: int
    #: How many of them one such GPU holds; 0 where it cannot hold any.
    each: int
    memory_mib: int
    #: What is left of it for data once CUDA has taken its part; negative where that is more.
    left_mib: int


@dataclass(frozen=True, slots=True)
class SliceFigures:
    """One slice that a course offers, on all GPUs together."""

    name: str
    request: str
    is_default: bool
    fits: tuple[Fit, ...]
    #: How many the GPUs hold at once if there is nothing else on them.
    at_once: int
    #: How many the course's quota allows at once, and how many that of one user; None for no limit.
    quota: int | None
    per_user: int | None


@dataclass(frozen=True, slots=True)
class Rush:
    """All students ask for the default slice at once, and each keeps it equally long. Simulated."""

    students: int
    #: Seconds for which each keeps it.
    stay: float
    #: Those who have a slice at once.
    at_once: int
    #: Those whom a quota turns away.
    refused: int
    #: In seconds, of those who are not turned away.
    waits: WaitFigures


def slice_figures(course: CourseFile, devices: Sequence[Device], rules: Rules) -> tuple[SliceFigures, ...]:
    """Return the figures of every slice that the course offers."""
    return tuple(_of_offer(course, offer, devices, rules) for offer in course.slices)


def _of_offer(course: CourseFile, offer: SliceOffer, devices: Sequence[Device], rules: Rules) -> SliceFigures:
    request = offer.request
    return SliceFigures(
        name=offer.name,
        request=str(request),
        is_default=offer is course.default_slice,
        fits=tuple(_fits(request, devices, rules)),
        at_once=_at_once(request, [_each(request, device, rules) for device in devices]),
        quota=_allowed(course.quota.quota, request, devices, rules),
        per_user=_allowed(course.per_user.quota, request, devices, rules),
    )


def _fits(request: SliceRequest, devices: Sequence[Device], rules: Rules) -> list[Fit]:
    models = {(device.label, device.memory_mib): device for device in reversed(devices)}
    found = []
    for (label, memory_mib), device in reversed(models.items()):
        number = sum((each.label, each.memory_mib) == (label, memory_mib) for each in devices)
        part = placement.cut(request, device, rules)
        left = part.memory_mib - rules.context_on(device)
        found.append(Fit(label, number, _each(request, device, rules), part.memory_mib, left))
    return found


def _each(request: SliceRequest, device: Device, rules: Rules) -> int:
    """Return how many of a request's slices one device holds if it is empty."""
    part = next(placement.candidates(request, [device], rules), None)
    if part is None:
        return 0
    if device.mig_profile is not None:
        return 1
    counts = [rules.device_milli // part.milli, device.memory_mib // part.memory_mib]
    if device.contexts is not None and part.contexts:
        counts.append(device.contexts // part.contexts)
    return min(counts)


def _at_once(request: SliceRequest, each: Sequence[int]) -> int:
    """Return how many requests fit at once on devices that hold so many slices each."""
    most = sum(each) // request.count
    while most and sum(min(number, most) for number in each) < most * request.count:
        most -= 1
    return most


def _allowed(quota: Quota, request: SliceRequest, devices: Sequence[Device], rules: Rules) -> int | None:
    """Return how many of them a quota allows at once; None for no limit, or for what fits nowhere."""
    part: Slice | None = next(placement.candidates(request, devices, rules), None)
    if part is None:
        return None
    limits = (
        (quota.slices, 1),
        (quota.milli, request.count * part.milli),
        (quota.memory_mib, request.count * part.memory_mib),
    )
    return min((limit // amount for limit, amount in limits if limit is not None), default=None)


def rush(
    name: str, course: CourseFile, students: int, stay: float, devices: Sequence[Device], rules: Rules
) -> Rush:
    """Let so many students come at once, and each stay so many seconds or for the longest lease.

    The same code decides as grants real slices. The default slice must fit somewhere.
    """
    request = course.default_slice.request
    limits = course.quota.quota, course.per_user.quota
    of_all, of_each = (_allowed(limit, request, devices, rules) for limit in limits)
    served = students if of_all is None else min(students, of_all)
    if of_each == 0:
        served = 0
    stays = min(stay, course.longest_lease or stay)
    arrivals = [
        Arrival(0.0, f"student-{number}", name, request, stays, course.longest_lease)
        for number in range(1, served + 1)
    ]
    policy = Policy(weights={name: course.weight})
    run = simulate(arrivals, devices, ORDERS["fair"], policy, rules)
    at_once = sum(outcome.wait == 0 for outcome in run.outcomes)
    return Rush(students, stays, at_once, students - served, figures(run).waits)
