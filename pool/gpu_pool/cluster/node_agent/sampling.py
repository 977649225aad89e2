"""One look at a node's devices: what the processes of each pod use of each of them, and whose these are.

Whose container a process is in, is read from the names of its cgroups (:func:`container_of`, which is pure).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpu_pool.devices.sampling import ProcessSampler, ProcessUse
from gpu_pool_client import Device, PodDeviceUse
from gpu_pool_client import _procfs as procfs

# How a cgroup says whose it is.
#
# The kubelet names the cgroup of a pod, and the container runtime that of a container below it::
#
#     /kubepods/burstable/pod<uid>/<id>
#         with the driver cgroupfs; CRI-O puts crio- before the id
#     /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope
#         with the driver systemd; or crio-<id>.scope, docker-<id>.scope. Dashes in the uid are underscores
#     /kubelet.slice/kubelet-kubepods.slice/…/kubelet-kubepods-burstable-pod<uid>.slice/…
#         with a root of the kubelet's own (--cgroup-root)
#     /system.slice/containerd.service/kubepods-burstable-pod<uid>.slice:cri-containerd:<id>
#         where the kubelet has the driver systemd, and the runtime has not
#     /k8s.io/<id>
#         where pods have no cgroups: which pod it is, is not said
#
# Of a guaranteed pod ``burstable`` is left out. A static pod's uid has no dashes. From within another cgroup
# namespace a name begins with ``/..`` for each cgroup up to what both have above them (cgroup_namespaces(7)).
# Below a container's cgroup may be more: crun's ``container``, systemd's ``init.scope``, or whatever a
# container makes that may; so the outermost name that fits counts, which a container can't choose. CRI-O's
# monitor of a container is beside it, in ``crio-conmon-<id>.scope``.
#
# After the kubelet's ``pkg/kubelet/cm``, the sources of containerd and CRI-O, and paths in public
# repositories. Seen on a kubelet: the last one, of containerd.
_HEX: Final = "[0-9a-f]"
_UID: Final = rf"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
#: The cgroup of a pod, with that of its container where both are one name.
_POD: Final = re.compile(
    rf"(?:[a-z0-9_-]*kubepods[a-z-]*-)?pod({_UID})(?:\.slice)?(?::[a-z-]+:({_HEX}{{64}}))?", re.ASCII
)
_CONTAINER: Final = re.compile(rf"(?:(?:cri-containerd|crio|docker)-)?({_HEX}{{64}})(?:\.scope)?", re.ASCII)


class Container(NamedTuple):
    """A container of a pod; either is empty where the name does not say it."""

    pod: str
    #: As the runtime calls it.
    container: str


def container_of(content: bytes) -> Container | None:
    """Return whose container a process is in, by ``/proc/PID/cgroup``; None for one of the node's own."""
    found = {_read(line.split(b":", 2)[-1].decode(errors="replace")) for line in procfs.lines_of(content)}
    # With cgroup v1 there is a name for each controller, of which some may be the root.
    known = sorted(each for each in found if each is not None)
    return max(known, key=lambda each: (bool(each.pod), bool(each.container)), default=None)


def _read(path: str) -> Container | None:
    pod = ""
    for name in path.split("/"):
        if not pod and (found := _POD.fullmatch(name)):
            pod = found[1].replace("_", "-")
            if found[2]:
                return Container(pod, found[2])
        elif found := _CONTAINER.fullmatch(name):
            return Container(pod, found[1])
    return Container(pod, "") if pod else None


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
