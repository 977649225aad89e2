"""What a node agent says of its node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodDeviceUse:
    """What the processes of one pod, or one container of it, use of one device, as its node sees it."""

    #: The uid of its pod; empty where the name of its cgroup does not say it.
    pod: str
    #: The id that the container runtime gave it, without the runtime's name, where the pod is not known; or
    #: which of the pod's containers it is.
    container: str
    #: The device's uuid, as the driver says it.
    device: str
    #: MiB in use by all of these processes together; None where the driver does not say.
    memory_mib: int | None = None
    #: How many they are.
    processes: int = 1
    #: The largest part of the device's multiprocessors that any of them has used in the last seconds, 0 to 1;
    #: None where the driver does not say. That is no share of the device: one small kernel can read 1.
    utilisation: float | None = None
