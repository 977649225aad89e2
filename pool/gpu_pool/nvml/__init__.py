"""nvidia-ml-py's module ``pynvml``, to be imported from here alone; and which processes compute on a device.

This imports hardly anything of this project: the
program that suspends processes needs it, and has to start fast (``enforcement.checkpoint.program``).

Other packages bring a module of that name. Where one of them is found in its place, importing this
module raises :class:`gpu_pool.nvml.shadowed.NvmlShadowed`, which says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

__all__ = ["computing", "larger", "optional", "pynvml"]

#: A name that no other package's module has, nor that of nvidia-ml-py in versions that are too old.
_MARK: Final = "NVMLLibraryMismatchError"

try:
    import pynvml
except ImportError as error:
    # Imported here, as below, because it costs some 50 ms, which programs that start often need not pay.
    from gpu_pool.nvml.shadowed import missing

    raise missing() from error
if not hasattr(pynvml, _MARK):
    from gpu_pool.nvml.shadowed import shadowed

    raise shadowed(pynvml.__file__)


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
