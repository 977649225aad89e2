"""What a process and its descendants do with their devices, as the system and the driver see it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from gpu_pool.tuning import CUDA_DEVICE
from gpu_pool_client import Activity, Process, Slice
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import family, owner_of

T = TypeVar("T")

_DEVICES: Final = Path("/proc/devices")
#: The driver keeps samples of the last seconds only.
_LATELY_SECONDS: Final = 10


def activity_of(
    process: Process | None,
    slices: Iterable[Slice],
    lease_id: str,
    keeper: Process | None = None,
    cuda: str = CUDA_DEVICE,
) -> Activity:
    """Return what a lease's process, and whatever it has started, does with these slices' devices.

    While nothing is attached, that is its ``keeper``, and what was started on
    the lease: the keeper may be a server whose other children have nothing to
    do with the lease. ``cuda`` is the path of the device that CUDA opens.
    """
    real = [part.device for part in slices if not part.device.simulated]
    root = process or keeper
    alive = root is not None and root.is_alive()
    if root is None or alive is False or not real:
        return Activity(initialised=False, working=False)
    # NVML has no figures of processes for MIG instances, by whatever namespace they are asked for.
    unmeasured = any(device.mig_profile is not None for device in real)
    if alive is None:  # of another pid namespace, where it cannot be looked at
        hidden = Activity(unmeasured=unmeasured)
        return hidden if process else Activity(initialised=False, working=False)
    pids = (family(root.pid) if process else {root.pid}) | marked(lease_id, owner_of(root.pid))
    opened = _have_open(pids, cuda)
    if opened:
        # Imported here because it costs some 40 ms, which simulated devices need not pay.
        from gpu_pool.devices.sampling import memory_of

        working, untold = _is_working(pids, [device.uuid for device in real])
        unmeasured = working is None and (unmeasured or untold)
        return Activity(True, working, memory_mib=memory_of(pids, real), unmeasured=unmeasured)
    return Activity(unmeasured=unmeasured) if opened is None else Activity(initialised=False, working=False)


def uses_cuda(process: Process | None, lease_id: str, cuda: str = CUDA_DEVICE) -> bool | None:
    """Whether a lease's process, or what it has started, has initialised CUDA; None: unknown."""
    alive = False if process is None else process.is_alive()
    if process is None or not alive:
        return alive
    return _have_open(family(process.pid) | marked(lease_id, owner_of(process.pid)), cuda)


def _have_open(pids: Iterable[int], cuda: str) -> bool | None:
    """Whether any of these has CUDA's device open; None where that is not for us to see."""
    opened = {has_open(pid, cuda) for pid in pids}
    return True if True in opened else None if None in opened else False


def users_of(process: Process, lease_id: str, cuda: str = CUDA_DEVICE) -> set[int]:
    """Return the pids of a lease's processes that have, or may have, initialised CUDA.

    Of the same user alone: anybody could mark a process with another's lease.
    """
    owner = owner_of(process.pid)
    own = {pid for pid in family(process.pid) if owner_of(pid) == owner}
    return {pid for pid in own | marked(lease_id, owner) if has_open(pid, cuda) is not False}


def marked(lease_id: str, owner: int | None) -> set[int]:
    """Return the pids of the user's processes that were started on the lease, detached ones included."""
    if owner is None:
        return set()
    mark = f"GPU_POOL_LEASE={lease_id}".encode()
    own = (pid for pid in procfs.pids() if owner_of(pid) == owner)
    return {pid for pid in own if mark in environment_of(pid)}


async def in_own_thread(look: Callable[..., T], *args: object) -> T:
    """Call a function that looks at many processes, in a thread of those that do nothing else.

    That takes long on a machine with many, and whatever else needs a thread is not to wait for it.
    """
    call = functools.partial(contextvars.copy_context().run, look, *args)
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), call)


@functools.cache
def _threads(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked child has none of its parent's threads
    return ThreadPoolExecutor(2, "gpu-pool-activity")


def environment_of(pid: int) -> list[bytes]:
    """Return the environment with which a process was started, ``NAME=value`` each; none if it is hidden."""
    # That of the process is gone when its first thread has ended, or hidden from all but root; the others
    # still have it.
    for path in chain([Path(f"/proc/{pid}/environ")], _of_threads(pid, "environ")):
        if content := _read(path):
            return content.split(b"\0")
    return []


def _read(path: Path) -> bytes | None:
    """Read a file of ``/proc``; empty for what has ended, None where it is hidden."""
    try:
        return path.read_bytes()
    except PermissionError:
        return None
    except OSError:
        return b""


def _of_threads(pid: int, name: str) -> Iterator[Path]:
    """Yield that file of every thread of a process."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield thread / name


def has_open(pid: int, cuda: str) -> bool | None:
    """Whether a process has CUDA's device open; None where that is not for us to see."""
    number = device_number(cuda)
    found: set[bool | None] = set()
    # A thread may have open files of its own, and has them still when the first one has ended.
    for folder in chain([Path(f"/proc/{pid}/fd")], _of_threads(pid, "fd")):
        found.add(_holds(folder, cuda, number))
        if True in found:
            return True
    return None if None in found else False


def _holds(folder: Path, cuda: str, number: int | None) -> bool | None:
    """Whether CUDA's device is among the open files in that folder of ``/proc``; None where it is hidden."""
    try:
        return any(_is_device(link, cuda, number) for link in folder.iterdir())
    except PermissionError:
        return None
    except OSError:  # it has ended
        return False


def _is_device(link: Path, cuda: str, number: int | None) -> bool:
    """Whether an open file is CUDA's device, by its name or, whatever its name, by its number."""
    try:
        target = os.readlink(link)
        if target == cuda:
            return True
        # Another mount namespace, such as a container's, may give it any name, but a path.
        if number is None or not target.startswith("/"):
            return False
        found = link.stat()
    except OSError:  # closed meanwhile
        return False
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == number


def device_number(path: str) -> int | None:
    """Return the number of the device at a path; None where there is only some other file of its name.

    Where there is none, the number under which a driver has registered one of that name, or None.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return _registered_number(Path(path).name)
    return found.st_rdev if stat.S_ISCHR(found.st_mode) else None


def _registered_number(name: str) -> int | None:
    """Return the number under which a driver has registered a character device (proc(5): /proc/devices)."""
    with contextlib.suppress(OSError):
        for line in procfs.lines_of(_DEVICES.read_bytes()):
            if line.split()[1:] == [name.encode()]:
                return os.makedev(int(line.split()[0]), 0)
    return None


def _is_working(pids: set[int], uuids: Iterable[str]) -> tuple[bool | None, bool]:
    """Return whether a device works for these processes, None where the driver does not say.

    And whether it never does, of one of these devices.
    """
    # Imported here because it costs some 40 ms, which simulated devices need not pay.
    from gpu_pool.nvml import pynvml

    failures = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
    try:
        pynvml.nvmlInit()
    except failures:
        return None, False
    untold = False
    found: set[bool | None] = set()
    try:
        for uuid in uuids:
            try:
                found.add(_works_for(pids, uuid))
            except pynvml.NVMLError_NotSupported:  # noqa: PERF203 - the others are asked all the same
                untold = True
    except failures:
        return None, False
    finally:
        pynvml.nvmlShutdown()
    return True if True in found else None if untold or None in found else False, untold


def _works_for(pids: set[int], uuid: str) -> bool | None:
    from gpu_pool.nvml import computing, pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    if not computing(handle).keys() & pids:
        # The driver names processes as the host does: in a container its pids are not ours.
        return None
    since = int((time.time() - _LATELY_SECONDS) * 1e6)
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError_NotFound:  # no process worked in this time
        return False
    return any(sample.pid in pids and sample.smUtil > 0 for sample in samples)
