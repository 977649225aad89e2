"""Which processes compute on a device, and how much of its memory each has, as NVML lists them.

A module of its own, which imports hardly anything of this project: the program that suspends
processes needs it, and has to start fast (``enforcement.checkpoint.program``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpu_pool.nvml import pynvml


def computing(handle: Any) -> dict[int, int | None]:
    """Return the bytes that each process uses which computes on a device; None where that is not told.

    Those that compute through MPS are in a list of their own. Raises what NVML fails with.
    """
    found = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
    for each in optional(pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle):
        found[each.pid] = larger(found.get(each.pid), each.usedGpuMemory)
    return found


def optional(query: Callable[[Any], Iterable[Any]], handle: Any) -> Iterator[Any]:
    """Yield what a list holds that not every card and driver has."""
    try:
        yield from query(handle)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return


def larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two amounts of one process's memory, of which any may be unknown."""
    return max((each for each in (one, other) if each is not None), default=None)
