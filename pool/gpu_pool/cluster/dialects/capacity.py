"""How much of a cluster's GPUs is held, per node, GPU and pod, and what a request is counted as.

A dialect rounds: to whole percents, to units of memory, to replicas of a fixed
size. What is counted, and asked for in the pod, is then the larger slice, so that
capacity, quotas and GPU-hours are those of what is there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpu_pool.cluster.dialects.amounts import cut
from gpu_pool.cluster.dialects.base import Dialect, Gpu, PodHolding, SliceStatement
from gpu_pool.cluster.dialects.objects import Pod
from gpu_pool_client import WHOLE, DeviceStatus, GpuPoolError, SliceRequest, Strength


@dataclass(frozen=True, slots=True)
class PodUse:
    """What one pod holds on its node, one entry per GPU."""

    namespace: str
    name: str
    holds: tuple[PodHolding, ...]

    @property
    def milli(self) -> int:
        """Thousandths of a GPU in all."""
        return sum(hold.milli for hold in self.holds)

    @property
    def memory_mib(self) -> int:
        """MiB in all."""
        return sum(hold.memory_mib for hold in self.holds)


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Allocated of total on one node."""

    name: str
    gpus: tuple[DeviceStatus, ...]
    pods: tuple[PodUse, ...]
    #: Whether the cluster says which GPU a pod has; else pods are laid onto the GPUs in order, as they fit.
    exact: bool

    @property
    def milli(self) -> tuple[int, int]:
        """Thousandths of compute: held, and in all."""
        return sum(pod.milli for pod in self.pods), sum(each.milli for each in self.gpus)

    @property
    def memory_mib(self) -> tuple[int, int]:
        """MiB: held, and in all (0 where the node does not show it)."""
        return sum(pod.memory_mib for pod in self.pods), sum(each.device.memory_mib for each in self.gpus)


def usage(dialect: Dialect, pods: Iterable[Pod | None]) -> tuple[NodeUse, ...]:
    """Return what is held of each node that has GPUs, by these pods of the whole cluster.

    Pods that wait, or have finished (None), hold nothing.
    """
    by_node: dict[str, list[PodUse]] = defaultdict(list)
    gpus: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in dialect.gpus():
        gpus[gpu.node].append(gpu)
    counted: set[tuple[str, str]] = set()
    for pod in pods:
        holds = _once(dialect.holds(pod), counted) if pod is not None and pod.node else ()
        if pod is not None and holds:
            by_node[pod.node].append(PodUse(pod.namespace, pod.name, _bounded(holds, gpus[pod.node])))
    names = sorted({*gpus, *by_node})
    return tuple(_node(name, gpus[name], tuple(by_node[name])) for name in names)


def _bounded(holds: tuple[PodHolding, ...], gpus: Sequence[Gpu]) -> tuple[PodHolding, ...]:
    """Return the holds, none with more memory than programs can have of its GPU."""
    totals = {gpu.device.uuid: gpu.device.memory_mib for gpu in gpus}
    most = max(totals.values(), default=0)
    if not most:
        return holds
    bounds = (totals.get(hold.uuid) or most for hold in holds)
    return tuple(
        replace(hold, memory_mib=min(hold.memory_mib, bound))
        for hold, bound in zip(holds, bounds, strict=True)
    )


def _once(holds: tuple[PodHolding, ...], counted: set[tuple[str, str]]) -> tuple[PodHolding, ...]:
    """Return what of this was not counted with an earlier pod that has it, too; take note of it."""
    new = tuple(hold for hold in holds if not hold.common or (hold.common, hold.uuid) not in counted)
    counted.update((hold.common, hold.uuid) for hold in new if hold.common)
    return new


def _node(name: str, gpus: Sequence[Gpu], pods: tuple[PodUse, ...]) -> NodeUse:
    known = {gpu.device.uuid for gpu in gpus}
    statuses = {
        gpu.device.uuid: DeviceStatus(gpu.device, 0, 0, 0, 0, gpu.device.milli, gpu.drained) for gpu in gpus
    }
    holds = [hold for pod in pods for hold in pod.holds]
    exact = all(hold.uuid in known for hold in holds)
    for hold in sorted(holds, key=lambda hold: hold.uuid not in known):
        status = statuses.get(hold.uuid) or _first_fit(tuple(statuses.values()), hold)
        if status is not None:
            statuses[status.device.uuid] = _with(status, hold)
    return NodeUse(name, tuple(statuses.values()), pods, exact)


def _first_fit(statuses: Sequence[DeviceStatus], hold: PodHolding) -> DeviceStatus | None:
    """Return the first of the smallest GPUs or MIG instances with enough left, else the one with the most."""
    fitting = [status for status in statuses if _has_capacity(status, hold)]
    if fitting:
        return min(fitting, key=lambda status: status.device.milli)
    return max(statuses, key=lambda status: status.unheld_milli, default=None)


def _has_capacity(status: DeviceStatus, hold: PodHolding) -> bool:
    # What runs already may be on a GPU on which nothing more is granted.
    slots = replace(status, drained=False).free_contexts
    memory = not status.device.memory_mib or status.unheld_memory_mib >= hold.memory_mib
    return memory and status.unheld_milli >= hold.milli and (slots is None or slots > 0)


def _with(status: DeviceStatus, hold: PodHolding) -> DeviceStatus:
    return DeviceStatus(
        status.device,
        status.held_milli + hold.milli,
        status.held_memory_mib + hold.memory_mib,
        status.held_contexts + 1,
        status.leases + 1,
        status.milli,
        status.drained,
    )


def counted_as(request: SliceRequest, dialect: Dialect) -> SliceRequest:
    """Return the request that is granted exactly for this one: itself, mostly.

    A share stays a share and memory stays memory. A MIG instance is counted as a
    whole anyway. Raises what ``Dialect.translate`` raises.
    """
    statement = dialect.translate(request).statement
    if statement.counted is not None:
        return statement.counted
    is_mig = statement.enforcement.memory.strength is Strength.HARD and statement.milli != WHOLE
    if request.whole_devices or is_mig:
        return request
    total = _smallest(request, dialect)
    larger = _by_share if request.milli is not None else _by_memory
    for each in larger(request, statement, total):
        if each == request or _grants(each, dialect) <= max(
            _memory_of(each, total), statement.memory_mib or 0
        ):
            return each
    return request


def _smallest(request: SliceRequest, dialect: Dialect) -> int:
    """Return the MiB of the smallest GPU that could hold the request; 0 if they are unknown."""
    try:
        return cut(request, dialect.gpus(), dialect.options, dialect.table.title).smallest_mib
    except GpuPoolError:
        return 0


def _by_share(request: SliceRequest, statement: SliceStatement, total: int) -> Iterator[SliceRequest]:
    asked, memory = request.milli or 0, statement.memory_mib or 0
    share = max(asked, statement.milli or 0)
    if memory > _memory(share, total):
        yield _sized(request, milli=min(WHOLE, max(share, _share(memory, total))))
    yield _sized(request, milli=share)


def _sized(request: SliceRequest, *, milli: int | None = None, memory_mib: int | None = None) -> SliceRequest:
    """Return the request with another guarantee, and with its limit where that is still above."""
    sized = replace(request, milli=milli, memory_mib=memory_mib)
    is_above = (request.limit_milli or request.limit_mib or 0) > (milli or memory_mib or 0)
    return sized if is_above else sized.guarantee


def _by_memory(request: SliceRequest, statement: SliceStatement, total: int) -> Iterator[SliceRequest]:
    memory = max(request.memory_mib or 0, statement.memory_mib or 0)
    if (statement.milli or 0) > _share(memory, total):
        yield _sized(request, memory_mib=max(memory, _memory(statement.milli or 0, total)))
    yield _sized(request, memory_mib=memory)


def _grants(request: SliceRequest, dialect: Dialect) -> float:
    """Return the MiB that the cluster would grant: more than any if it refuses the request."""
    try:
        return dialect.translate(request).statement.memory_mib or 0
    except GpuPoolError:
        return math.inf


def _memory_of(request: SliceRequest, total: int) -> int:
    return request.memory_mib or 0 if request.milli is None else _memory(request.milli, total)


def _share(memory_mib: int, total: int) -> int:
    """Return the thousandths that the pool counts for memory."""
    return -(-memory_mib * WHOLE // total) if total else 0


def _memory(milli: int, total: int) -> int:
    """Return the MiB that the pool counts for a share."""
    return total * milli // WHOLE if total else 0
