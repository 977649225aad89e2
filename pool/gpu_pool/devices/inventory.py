"""What a look at the machine brings back: which devices there are, and what one was seen to do."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool_client import Device


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices found, where they were found, and what stood in the way."""

    #: In the driver's order; the instances of a partitioned GPU stand in its place.
    devices: tuple[Device, ...]
    #: In words: ``NVML, driver 550.54.14`` or ``simulated (GPU_POOL_DEVICES)``.
    source: str
    #: Sentences for a person, each with what to do about it.
    problems: tuple[str, ...] = ()
    #: Devices of this machine that are not for this process: ``CUDA_VISIBLE_DEVICES`` leaves them out.
    hidden: tuple[Device, ...] = ()
    #: uuids of all GPUs that the driver shows to this process, whether or not they are for it.
    gpus: tuple[str, ...] = ()
    #: Whether the driver is there, and fails for everybody on this machine or in this container.
    is_broken: bool = False
    #: Whether the driver was asked, which may fail later.
    by_driver: bool = False
    #: Whether ``CUDA_VISIBLE_DEVICES`` says which devices are for this process.
    is_limited: bool = False

    @property
    def digest(self) -> str:
        """Which GPUs the driver shows, in a few characters; empty where that is not known."""
        names = "\n".join(sorted(self.gpus))
        return hashlib.sha256(names.encode()).hexdigest()[:16] if names else ""

    def with_unified_memory(self, memory_mib: int) -> Inventory:
        """Return it with so much memory to divide on devices that have none of their own."""
        devices = (replace(each, memory_mib=memory_mib) if each.unified else each for each in self.devices)
        return replace(self, devices=tuple(devices))


#: A context keeps room for the threads of every multiprocessor that it may use. Measured on an
#: H100 with driver 580.159.04, by limiting a process to fewer of them with MPS: 58 MiB with 8
#: multiprocessors, 72 with 12, 145 with 32, 271 with 66, 518 with all 132 and without MPS.
_BASE_MIB: Final = 33
_PER_HUNDRED_MULTIPROCESSORS_MIB: Final = 368

#: CUDA cores in a multiprocessor, by compute capability, from the tables of NVIDIA's CUDA C++
#: Programming Guide; all others have 128.
_CORES: Final = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_USUAL_CORES: Final = 128


def context_mib(cores: int, capability: tuple[int, int]) -> int:
    """Return the MiB of a CUDA context on a card with so many CUDA cores, of that compute capability.

    Cards whose multiprocessors run fewer threads than an H100's may need less.
    """
    multiprocessors = cores // _CORES.get(capability, _USUAL_CORES)
    return _BASE_MIB + -(-multiprocessors * _PER_HUNDRED_MULTIPROCESSORS_MIB // 100)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device does now. None is what it does not tell."""

    #: In bytes, without what the driver keeps for itself.
    memory_used: int | None = None
    #: The part of the last moments (1/6 s to 1 s, by the card) in which anything computed, 0 to 1.
    utilisation: float | None = None
    #: In degrees Celsius.
    temperature: float | None = None
    #: In watts.
    power: float | None = None
