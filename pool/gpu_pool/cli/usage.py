"""GPU memory that a lease's processes use, as the driver counts it."""

from __future__ import annotations

import contextlib

from gpu_pool_client import Lease
from gpu_pool_client.processes import family

_BYTES_PER_MIB = 1024 * 1024


def memory_used(lease: Lease) -> dict[str, int]:
    """Return MiB in use by the lease's process and its descendants, by device uuid.

    A device is left out where this is not known: a simulated one, one whose
    driver does not say, or processes that cannot be seen from here.
    """
    real = [part.device.uuid for part in lease.slices if not part.device.simulated]
    if not real or lease.process is None or not lease.process.is_alive():
        return {}
    # Imported here because it costs some 40 ms, which simulated devices need not pay.
    import pynvml

    failures = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
    pids = family(lease.process.pid)
    used: dict[str, int] = {}
    try:
        pynvml.nvmlInit()
    except failures:
        return {}
    try:
        for uuid in real:
            with contextlib.suppress(*failures, TypeError):  # TypeError: an amount is not known
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                running = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
                used[uuid] = sum(each.usedGpuMemory for each in running if each.pid in pids) // _BYTES_PER_MIB
    finally:
        pynvml.nvmlShutdown()
    return used
