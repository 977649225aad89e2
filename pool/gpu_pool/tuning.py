"""Times, sizes and places that a pool goes by and that no administrator needs to set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: CUDA opens it when it is initialised; NVML alone does not.
CUDA_DEVICE: Final = "/dev/nvidia-uvm"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What ``PoolSettings.tuning`` carries to every part of a pool, so that none of it is a constant there.

    All times are in seconds unless their name says otherwise.
    """

    #: The path of the device by which it is seen that a process has initialised CUDA.
    cuda_device: str = CUDA_DEVICE

    #: Seconds between two passes of what keeps a pool in order where nothing asks for one sooner; None for
    #: passes that are made only when they are asked for.
    passes_every: float | None = 1.0

    # -- The queue
    #: A queue of more leases than this is put in order from time to time only: whenever
    #: ``queue_pause`` times as long has passed as that takes, in seconds of work, and after
    #: ``longest_queue_pause`` at the latest.
    long_queue: int = 200
    queue_pause: float = 20.0
    longest_queue_pause: float = 60.0
    #: How often those who wait, and those who follow a lease that does not, read what has become of it,
    #: although nothing seems to have been decided.
    waiting_read_every: float = 0.1
    held_read_every: float = 1.0

    # -- Moving device memory to host memory
    #: How long the driver may take beside copying.
    driver_within: int = 30
    #: How long what calls the driver stays without having anything to do.
    driver_idle: float = 300.0
    #: Milliseconds in which a process must finish what it has submitted to its device.
    driver_lock_ms: int = 5_000
    #: How long to wait until those who had the memory meanwhile have let go of it.
    memory_free_within: int = 20
    #: From the beginning of a suspension, how long until its lease is parked.
    parked_within: float = 120.0
    #: How long to wait before it is tried again to bring a lease back to a GPU with too little memory.
    restored_every: float = 2.0

    # -- The service
    #: How often the service looks for what has happened by itself, such as the death of a process.
    looked_every: float = 1.0
