"""The arithmetic of slices: how many fit, how many are free, and what happens when all come at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu_pool.courses.model import CourseFile, SliceOffer
from gpu_pool.policy import placement
from gpu_pool.policy.queue import Policy
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Quota
from gpu_pool.simulation import ORDERS, Arrival, SimulatedRun, Simulation, figures
from gpu_pool.simulation.report import WaitFigures
from gpu_pool_client import Device, DeviceStatus, Slice, SliceRequest, format_duration, parse_request
from gpu_pool_client._free import free_slices, whole_requests


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
    #: How much of the GPU's memory it may use while nobody else holds that; 0 where that is ``memory_mib``.
    limit_mib: int = 0
    #: Why a limit that it asks for changes nothing there; empty where it does, or where none is asked for.
    no_limit: str = ""


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
        at_once=whole_requests([_each(request, device, rules) for device in devices], request.count),
        quota=_allowed(course.quota.quota, request, devices, rules),
        per_user=_allowed(course.per_user.quota, request, devices, rules),
    )


def _fits(request: SliceRequest, devices: Sequence[Device], rules: Rules) -> list[Fit]:
    models = {(device.label, device.memory_mib): device for device in reversed(devices)}
    found = []
    for (label, memory_mib), device in reversed(models.items()):
        number = sum((each.label, each.memory_mib) == (label, memory_mib) for each in devices)
        part = placement.cut(request, device, rules)
        left = part.memory_mib - (rules.context_mib or device.context_mib)
        each, why = _each(request, device, rules), _no_limit(request, part)
        found.append(Fit(label, number, each, part.memory_mib, left, part.limit_mib, why))
    return found


def _no_limit(request: SliceRequest, part: Slice) -> str:
    if not request.has_limit or part.limit_mib:
        return ""
    if part.device.mig_profile is not None:
        return "a MIG instance has the size that it has"
    if part.device.one_size:
        return "MPS gives all slices of the GPU one size"
    return "nobody may have more of it than that"


def _each(request: SliceRequest, device: Device, rules: Rules) -> int:
    """Return how many of a request's slices one device holds if it is empty."""
    part = next(placement.candidates(request, [device], rules), None)
    if part is None:
        return 0
    if device.mig_profile is not None:
        return max(1, device.contexts or 1)
    empty = DeviceStatus(device, 0, 0, 0, 0, rules.device_milli)
    return free_slices(empty, part.milli, part.memory_mib, part.contexts)


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


class RushGivenUp(Exception):
    """A simulation that was ended before its end. Its text says why, where that is known."""


def rush(
    name: str,
    course: CourseFile,
    students: int,
    stay: float,
    devices: Sequence[Device],
    rules: Rules,
    goes_on: Callable[[], bool] = lambda: True,
) -> Rush:
    """Let so many students come at once, and each stay so many seconds or for the longest lease.

    The same code decides as grants real slices. The default slice must fit somewhere. ``goes_on`` is
    asked before each decision; where it says no, ``RushGivenUp`` is raised.
    """
    request = course.default_slice.request
    limits = course.quota.quota, course.per_user.quota
    of_all, of_each = (_allowed(limit, request, devices, rules) for limit in limits)
    served = students if of_all is None else min(students, of_all)
    if of_each == 0:
        served = 0
    longest = request.at_most(course.longest_lease)
    stays = min(stay, longest or stay)
    arrivals = [
        Arrival(0.0, f"student-{number}", name, request, stays, longest) for number in range(1, served + 1)
    ]
    policy = Policy(weights={name: course.weight})
    run = _simulated(Simulation(arrivals, devices, ORDERS["fair"], policy, rules), devices, goes_on)
    at_once = sum(outcome.wait == 0 for outcome in run.outcomes)
    return Rush(students, stays, at_once, students - served, figures(run).waits)


def _simulated(
    simulation: Simulation, devices: Sequence[Device], goes_on: Callable[[], bool]
) -> SimulatedRun:
    moments = simulation.moments()
    while goes_on():
        if next(moments, None) is None:
            return SimulatedRun(tuple(devices), tuple(simulation.outcomes))
    raise RushGivenUp


def rush_text(rush: Rush, course: CourseFile) -> str:
    """Say what happens when all come at once."""
    stays = f"each keeps {course.default_slice.name} for {format_duration(rush.stay)}"
    said = [
        f"If {rush.students} come at once ({stays}; simulated): "
        f"{rush.at_once} ({rush.at_once / rush.students:.0%}) have a slice at once."
    ]
    waiting = rush.waits.count - rush.at_once
    if waiting:
        waits = rush.waits
        median, p95, worst = map(format_duration, (waits.median, waits.p95, waits.worst))
        said.append(f"{waiting} wait. Waits of all: median {median}, 95th percentile {p95}, worst {worst}.")
    if rush.refused:
        said.append(f"{rush.refused} are refused by a quota.")
    return " ".join(said)


def at_once_text(each: SliceFigures) -> str:
    """Say how many of a slice there are at once in all: ``50``, or ``10 by quota, of 50``."""
    if each.quota is not None and each.quota < each.at_once:
        return f"{each.quota} by quota, of {each.at_once}"
    return str(each.at_once)


def memory_text(fit: Fit, write: Callable[[int], str]) -> str:
    """Say how much memory a slice has, and up to how much it may use: ``655MiB, up to 3276MiB``."""
    limit = f", up to {write(fit.limit_mib)}" if fit.limit_mib else ""
    return f"{write(fit.memory_mib) if fit.memory_mib else '0'}{limit}"


def limit_notes(each: SliceFigures) -> Iterator[str]:
    """Yield what a slice's limit means, and where it changes nothing; nothing of one that has none."""
    request = parse_request(each.request)
    if not request.has_limit:
        return
    size = request.guarantee.size
    yield (
        f"{each.name}: {size} is certain: that is what is counted, here and by quotas. Up to {request.limit} "
        f"of the GPU's memory can be used while nobody else holds it. Compute above {size} is not set aside. "
        "On Kubernetes KAI's NvFractions has such a limit, and so has the dialect shared while agents of its "
        "nodes report what is used: without them the limit changes nothing. Elsewhere there the request is "
        "refused."
    )
    for fit in each.fits:
        if fit.no_limit and fit.each:
            yield f"{each.name}: on {fit.gpus} x {fit.gpu} the limit changes nothing: {fit.no_limit}."


def prepared_note(course: CourseFile) -> str:
    """Say what a course's prepared pods may request of the cluster; empty where it has none."""
    said = course.kubernetes
    if not said.prepared_pods:
        return ""
    cores, memory = said.kernel_cpu or said.cpu, said.kernel_memory or said.memory
    cpu = (
        f"{cores * said.prepared_pods:g} CPU cores"
        if cores
        else "as many times the CPU of c.KubernetesSettings"
    )
    mib = f"{memory * said.prepared_pods} MiB" if memory else "as many times its memory_mib"
    return (
        f"Up to {said.prepared_pods} prepared pods wait beside its kernels. Together they request {cpu} and "
        f"{mib} of memory, no GPU, and count so in a ResourceQuota. Only with the dialect shared."
    )


def job_note(course: CourseFile) -> str:
    """Say with what the jobs of a course's kernels are submitted on Slurm; empty where it says nothing."""
    options = " ".join(f"--{name}={value}" for name, value in course.slurm.options.items())
    first = "; ".join(course.slurm.prologue or ())
    said = [f"with {options}" if options else "", f"and runs first: {first}" if first else ""]
    return f"On Slurm each kernel is a job {' '.join(filter(None, said))}." if any(said) else ""


def slice_notes(each: SliceFigures) -> Iterator[str]:
    """Yield why nobody can have a slice, if that is so."""
    if not each.at_once:
        yield f"{each.name} fits on no GPU here."
    if each.per_user == 0:
        yield f"Nobody can have {each.name}: it is more than per_user allows."
    if each.quota == 0:
        yield f"Nobody can have {each.name}: it is more than the quota allows."
