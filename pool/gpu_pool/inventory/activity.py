"""What a process and its descendants do with their devices, as the system and the driver see it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from gpu_pool_client import Activity, Process, Slice

#: CUDA opens it when it is initialised; NVML alone does not.
_CUDA_DEVICE: Final = "/dev/nvidia-uvm"
#: The driver keeps samples of the last seconds only.
_LATELY_SECONDS: Final = 10


def activity_of(process: Process | None, slices: Iterable[Slice], lease_id: str) -> Activity:
    """Return what a lease's process, and whatever it has started, does with these slices' devices."""
    real = [part.device for part in slices if not part.device.simulated]
    alive = process is not None and process.is_alive()
    if process is None or alive is False or not real:
        return Activity(initialised=False, working=False)
    if alive is None:
        return Activity()  # of another pid namespace, where it cannot be looked at
    pids = family(process.pid) | _marked(lease_id)
    opened = {_has_open(pid, _CUDA_DEVICE) for pid in pids}
    if True in opened:
        # Imported here because it costs some 40 ms, which simulated devices need not pay.
        from gpu_pool.inventory.use import memory_of

        working = _is_working(pids, [device.uuid for device in real])
        return Activity(initialised=True, working=working, memory_mib=memory_of(pids, real))
    return Activity() if None in opened else Activity(initialised=False, working=False)


def users_of(process: Process, lease_id: str) -> set[int]:
    """Return the pids of a lease's processes that have, or may have, initialised CUDA.

    Of the same user alone: anybody could mark a process with another's lease.
    """
    owner = _owner(process.pid)
    pids = {pid for pid in family(process.pid) | _marked(lease_id) if _owner(pid) == owner}
    return {pid for pid in pids if _has_open(pid, _CUDA_DEVICE) is not False}


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:  # it has ended
        return None


def family(pid: int) -> set[int]:
    """Return the pids of a process and of its descendants."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return {pid}


def _marked(lease_id: str) -> set[int]:
    """Return the pids of all processes that were started on the lease, detached ones included."""
    mark = f"GPU_POOL_LEASE={lease_id}".encode()
    return {pid for pid in psutil.pids() if mark in _environment(pid)}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def _has_open(pid: int, path: str) -> bool | None:
    """Whether a process has the file open; None where that is not for us to see."""
    try:
        return any(_target(link) == path for link in Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return None
    except OSError:  # it has ended
        return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _is_working(pids: set[int], uuids: Iterable[str]) -> bool | None:
    """Whether a device works for these processes; None where the driver does not say."""
    # Imported here because it costs some 40 ms, which simulated devices need not pay.
    import pynvml

    failures = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
    try:
        pynvml.nvmlInit()
    except failures:
        return None
    try:
        found = [_works_for(pids, uuid) for uuid in uuids]
    except failures:
        return None
    finally:
        pynvml.nvmlShutdown()
    return True if True in found else None if None in found else False


def _works_for(pids: set[int], uuid: str) -> bool | None:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    known = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
    if not known & pids:
        # The driver names processes as the host does: in a container its pids are not ours.
        return None
    since = int((time.time() - _LATELY_SECONDS) * 1e6)
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError_NotFound:  # no process worked in this time
        return False
    return any(sample.pid in pids and sample.smUtil > 0 for sample in samples)
