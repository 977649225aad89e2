"""What a pool says of its devices: what they are, what is held of them, and how firmly. All are immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gpu_pool_client._requests import WHOLE, format_memory, format_share

#: Written beside every device, slice and figure that no hardware stands behind.
SIMULATED: Final = "simulated"
#: What CUDA takes in a process where the card is not known, in MiB: with PyTorch 250 to 430
#: (pytorch#86509, #20532), and slices below about 350 were found unusable (HAMi#1370).
CONTEXT_MIB: Final = 350
#: Shown where nobody knows how much memory a device has.
MEMORY_UNKNOWN: Final = "memory not known"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG instance."""

    uuid: str
    #: The driver's index of the GPU (of the parent GPU for a MIG instance).
    index: int
    #: The model's name as the driver gives it, such as ``Tesla V100-SXM2-32GB``.
    model: str
    #: 0 where it is not known, as of types of GPUs in a cluster whose scheduler does not say it.
    memory_mib: int
    #: CUDA contexts that fit at once; None where nothing limits them.
    contexts: int | None = None
    #: Thousandths of a whole GPU's compute that it has. A MIG instance has fewer, and is granted as a whole,
    #: or in as many equal parts as it has contexts.
    milli: int = WHOLE
    driver: str = ""
    #: Name of the MIG profile (``1g.5gb``), None for a whole GPU.
    mig_profile: str | None = None
    #: The NUMA node it is attached to, None if unknown.
    numa_node: int | None = None
    #: uuids of the devices it has an NVLink to.
    nvlink: tuple[str, ...] = ()
    simulated: bool = False
    #: Memory in MiB that CUDA itself takes in each process on it.
    context_mib: int = CONTEXT_MIB
    #: Whether all slices that are held of it at once have one size, as a hard limit by
    #: classic MPS needs: its memory limit belongs to the device's daemon.
    one_size: bool = False
    #: The machine that it is in, where a pool has several; all devices of a slice are in one.
    node: str = ""
    #: Whether it stands for all GPUs of its kind in a cluster that has a queue of its own: the
    #: pool grants of it without end, and the cluster says which GPU it is, and when.
    unbounded: bool = False
    #: Why nothing new can run on it now, and what to do, in sentences; empty where nothing is wrong.
    fault: str = ""
    #: Whether the driver lets one process at a time use it, unless they share it by MPS.
    exclusive: bool = False
    #: Whether it has no memory of its own: its memory here is the machine's, which all programs share.
    unified: bool = False
    #: Its number in ``CUDA_VISIBLE_DEVICES`` where ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; None where
    #: that is not certain, and of MIG instances, which have none.
    cuda_index: int | None = None

    @property
    def name(self) -> str:
        """The model, and which part of it a MIG instance is."""
        return f"{self.model} MIG {self.mig_profile}" if self.mig_profile else self.model

    @property
    def label(self) -> str:
        """The name to show to a person; says so when the device is simulated."""
        return f"{self.name} ({SIMULATED})" if self.simulated else self.name

    @property
    def memory_label(self) -> str:
        """Its memory to show to a person: ``32GiB``; says so where that is not known."""
        return format_memory(self.memory_mib) if self.memory_mib else MEMORY_UNKNOWN


@dataclass(frozen=True, slots=True)
class Slice:
    """A share of one device, in integers."""

    device: Device
    #: Thousandths of the device's compute.
    milli: int
    memory_mib: int
    #: CUDA context slots taken (0 where they are not limited).
    contexts: int = 0
    #: The most of the device's memory that its process may ever use, in MiB; 0 where that is ``memory_mib``.
    limit_mib: int = 0
    #: What it may use now on top of ``memory_mib``, in MiB, until somebody else is granted that memory.
    burst_mib: int = 0

    @property
    def allowed_mib(self) -> int:
        """How much of the device's memory its process may use now, in MiB."""
        return self.memory_mib + self.burst_mib

    @property
    def memory_label(self) -> str:
        """The memory that is granted to show to a person: ``655MiB``; says so where that is not known."""
        return format_memory(self.memory_mib) if self.device.memory_mib else MEMORY_UNKNOWN

    @property
    def share(self) -> str:
        """The share of compute as a percentage: ``2%``."""
        return format_share(self.milli)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device and what is held of it. Free amounts are never negative."""

    device: Device
    held_milli: int
    held_memory_mib: int
    held_contexts: int
    leases: int
    #: Thousandths of compute that may be granted in all (more than 1000 when over-granting is on).
    milli: int = WHOLE
    #: Whether its leases may end and nothing more is granted on it: nothing of it is free then.
    drained: bool = False
    #: Since when an administrator has it drained, in Unix seconds; None where it is not, where something
    #: else keeps it closed, such as a cluster, or where it is not known.
    drained_at: float | None = None
    #: Whether it is drained so that the kernels on it go to disk; None where the pool is of a release that
    #: cannot do that.
    hibernates: bool | None = None

    @property
    def free_milli(self) -> int:
        """Thousandths of compute that can still be granted."""
        return self.unheld_milli * (not self.drained)

    @property
    def free_memory_mib(self) -> int:
        """Memory that can still be granted, in MiB."""
        return self.unheld_memory_mib * (not self.drained)

    @property
    def free_contexts(self) -> int | None:
        """Context slots that can still be granted; None where nothing limits them."""
        if self.device.contexts is None:
            return None
        return max(0, self.device.contexts - self.held_contexts) * (not self.drained)

    @property
    def unheld_milli(self) -> int:
        """Thousandths of compute that nobody holds, whether they can be granted or not."""
        return self.milli if self.device.unbounded else max(0, self.milli - self.held_milli)

    @property
    def unheld_memory_mib(self) -> int:
        """Memory that nobody holds, whether it can be granted or not, in MiB."""
        held = 0 if self.device.unbounded else self.held_memory_mib
        return max(0, self.device.memory_mib - held)


class Strength(str, Enum):
    """How firmly a limit is held."""

    HARD = "hard"
    """The process cannot exceed it, whatever it does."""
    COOPERATIVE = "cooperative"
    """A process that does not try to evade it stays within it."""
    NONE = "none"
    """It is only counted."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds one resource of a slice within its size, and how firmly."""

    strength: Strength = Strength.NONE
    #: What enforces it, for people to read: ``accounting only``, ``MPS``.
    by: str = "accounting only"

    def __str__(self) -> str:
        return f"{self.strength.value} ({self.by})"


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The truth about a lease's limits: enforced, or only nominal."""

    memory: Limit = field(default_factory=Limit)
    compute: Limit = field(default_factory=Limit)
