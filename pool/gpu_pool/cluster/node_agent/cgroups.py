"""Whose container a process is in, by the names of its cgroups. Pure.

The kubelet names the cgroup of a pod, and the container runtime that of a container below it::

    /kubepods/burstable/pod<uid>/<id>
        with the driver cgroupfs; CRI-O puts crio- before the id
    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope
        with the driver systemd; or crio-<id>.scope, docker-<id>.scope. Dashes in the uid are underscores
    /kubelet.slice/kubelet-kubepods.slice/…/kubelet-kubepods-burstable-pod<uid>.slice/…
        with a root of the kubelet's own (--cgroup-root)
    /system.slice/containerd.service/kubepods-burstable-pod<uid>.slice:cri-containerd:<id>
        where the kubelet has the driver systemd, and the runtime has not
    /k8s.io/<id>
        where pods have no cgroups: which pod it is, is not said

Of a guaranteed pod ``burstable`` is left out. A static pod's uid has no dashes. From within another cgroup
namespace a name begins with ``/..`` for each cgroup up to what both have above them (cgroup_namespaces(7)).
Below a container's cgroup may be more: crun's ``container``, systemd's ``init.scope``, or whatever a
container makes that may; so the outermost name that fits counts, which a container can't choose. CRI-O's
monitor of a container is beside it, in ``crio-conmon-<id>.scope``.

After the kubelet's ``pkg/kubelet/cm``, the sources of containerd and CRI-O, and paths in public repositories.
Seen on a kubelet: the last one, of containerd.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gpu_pool_client import _procfs as procfs

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
