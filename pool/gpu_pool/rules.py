"""The settings that admission and placement decide by."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_pool_client import WHOLE, Device


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be granted to one lease, and on one device, as plain integers."""

    #: Memory, in MiB, that CUDA itself takes in a process; no slice may be smaller. 0 for each device's own.
    context_mib: int = 0
    #: Thousandths of compute that may be granted on one device in all.
    device_milli: int = WHOLE
    #: Context slots one lease takes on a device that counts them.
    lease_contexts: int = 2
    #: The largest share of one device that one lease may have, in thousandths.
    max_milli: int = WHOLE
    #: The most memory, in MiB, that one lease may have on one device; 0 for no limit.
    max_memory_mib: int = 0
    #: The most devices that one lease may have; 0 for no limit.
    max_devices: int = 0

    def context_on(self, device: Device) -> int:
        """Return the memory in MiB that CUDA itself takes in a process on the device."""
        return self.context_mib or device.context_mib
