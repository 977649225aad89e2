"""One look at a node's devices: what the processes of each pod use of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_pool.cluster.node_agent.cgroups import Container, container_of
from gpu_pool.devices.sampling import ProcessSampler, ProcessUse
from gpu_pool_client import Device, PodDeviceUse

#: Seconds in which a device has worked for a process lately: the driver keeps samples of the last ones only.
LATELY: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodeSample:
    """What was seen, as :meth:`gpu_pool_client.Pool.report_use` takes it."""

    devices: tuple[str, ...] = ()
    uses: tuple[PodDeviceUse, ...] = ()
    #: Whether all devices were looked at.
    complete: bool = False
    #: Sentences for a person.
    problems: tuple[str, ...] = ()


def container_on_this_node(pid: int) -> Container | None:
    """Return whose container a process is in; None for one of the node's own, and for one that has ended."""
    try:
        return container_of(Path(f"/proc/{pid}/cgroup").read_bytes())
    except OSError:
        return None


def sample_node(
    sampler: ProcessSampler,
    devices: Iterable[Device],
    container: Callable[[int], Container | None] = container_on_this_node,
) -> NodeSample:
    """Look once at all of these devices."""
    real = [device for device in devices if not device.simulated]
    sample = sampler.sample(real)
    uses: list[PodDeviceUse] = []
    for device in real:
        on_device = sample.uses.get(device.uuid, ())
        busy = sampler.utilisation(device, LATELY) if on_device else {}
        uses += _by_pod(device.uuid, on_device, busy, container)
    seen = tuple(device.uuid for device in real if device.uuid in sample.uses)
    return NodeSample(seen, tuple(uses), bool(real) and len(seen) == len(real), sample.problems)


def _by_pod(
    device: str,
    uses: Iterable[ProcessUse],
    busy: Mapping[int, float] | None,
    container: Callable[[int], Container | None],
) -> list[PodDeviceUse]:
    found: dict[Container, list[ProcessUse]] = {}
    for use in uses:
        whose = container(use.pid)
        if whose is not None:  # which of a pod's containers it is, nobody needs to know
            found.setdefault(Container(whose.pod, "") if whose.pod else whose, []).append(use)
    return [
        PodDeviceUse(
            whose.pod,
            whose.container,
            device,
            _total(each.memory_mib for each in theirs),
            len(theirs),
            None if busy is None else max(busy.get(each.pid, 0.0) for each in theirs),
        )
        for whose, theirs in sorted(found.items())
    ]


def _total(amounts: Iterable[int | None]) -> int | None:
    known = list(amounts)
    return None if None in known else sum(each or 0 for each in known)
