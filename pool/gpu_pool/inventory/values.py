"""What a look at the machine brings back."""

from __future__ import annotations

from dataclasses import dataclass

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
