"""Whether what processes keep on a device can be moved to host memory, and why not.

Decided from facts alone; then how these are read of processes, of the driver and of the host memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from gpu_pool.devices.activity import environment_of
from gpu_pool.enforcement.checkpoint.driver_worker import DriverWorkers, in_words
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device
from gpu_pool_client import _procfs as procfs

#: The first driver that can do it to a PyTorch process, and has it in its library.
_FIRST_DRIVER: Final = 570
#: The drivers under which it is known to work: it was seen with 580, and is not reported to fail below 610,
#: which has crashed a process by locking it (https://github.com/NVIDIA/cuda-checkpoint/issues/58).
_PROVEN_DRIVERS: Final = range(580, 610)
#: The architecture as Linux names it; NVIDIA's notes list no other.
_MACHINE: Final = "x86_64"
#: The tiers whose processes reach their device through MPS.
BY_MPS: Final = ("mps", "cgroups")
_TRY: Final = "Try make test-gpu on a GPU that nobody uses; if that works: c.PoolSettings.checkpoint = 'on'"


@dataclass(frozen=True, slots=True)
class Hindrance:
    """One reason why processes on a device are not moved."""

    #: A clause that can follow "since".
    why: str
    #: What an administrator can do, in a sentence.
    remedy: str
    #: Whether they are kept for it. Otherwise it is not known to work, and the administrator has it tried.
    decisive: bool = True


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a device and its machine."""

    device: Device
    #: The name of the tier that enforces its slices.
    tier: str
    #: The architecture of the machine, as ``uname -m`` has it.
    machine: str
    #: Whether NVIDIA's cuda-bindings are installed.
    has_bindings: bool
    #: Host memory in MiB that one parked kernel may have now.
    host_mib: int


def hindrances(facts: CheckpointFacts, *, insisted: bool, under_mps: bool) -> list[Hindrance]:
    """Return all that keeps processes on a device from being moved, what is decisive first.

    Parameters
    ----------
    facts:
        What is known. What only the driver knows is not among it.
    insisted:
        Whether the administrator has it tried where it is not known to work.
    under_mps:
        Whether the administrator has seen it work under MPS.
    """
    found = [*_of_device(facts.device), *_of_machine(facts)]
    if facts.tier in BY_MPS and not under_mps:
        found.append(
            Hindrance(
                "it is not proven on devices shared by MPS (c.PoolSettings.checkpoint_under_mps)",
                "Set c.PoolSettings.checkpoint_under_mps = True once you have seen that the driver does it.",
            )
        )
    if not insisted:
        return [replace(each, decisive=True) for each in found]
    return sorted(found, key=lambda each: not each.decisive)


def _of_device(device: Device) -> Iterator[Hindrance]:
    if device.simulated:
        yield Hindrance("the device is simulated", "Use a real GPU.")
    if device.mig_profile is not None:
        yield Hindrance(
            "the device is a MIG instance, for which NVIDIA does not support it",
            "Divide whole GPUs, without MIG, for courses whose kernels are to lend their slice.",
        )
    if device.unified:
        yield Hindrance(
            "the device has no memory of its own, so nothing would become free", "There is nothing to do."
        )
    yield from _of_driver(device.driver)


def _of_driver(driver: str) -> Iterator[Hindrance]:
    major = driver.partition(".")[0]
    number = int(major) if major.isascii() and major.isdigit() else None
    if number is None:
        yield Hindrance("the version of its driver is not known", _TRY, decisive=False)
    elif number < _FIRST_DRIVER:
        yield Hindrance(
            f"it needs driver {_FIRST_DRIVER} or newer, and this is {driver}",
            f"Install driver {_PROVEN_DRIVERS.start} of NVIDIA, or a newer one of its kind.",
        )
    elif number not in _PROVEN_DRIVERS:
        yield Hindrance(
            f"it is known to work with drivers from {_PROVEN_DRIVERS.start} to below {_PROVEN_DRIVERS.stop}, "
            f"and this is {driver}",
            _TRY,
            decisive=False,
        )


def _of_machine(facts: CheckpointFacts) -> Iterator[Hindrance]:
    if not facts.has_bindings:
        yield Hindrance(
            "cuda-bindings is missing",
            "pip install 'jupyter-gpu-pool[checkpoint]'",
        )
    if facts.host_mib < facts.device.context_mib:
        yield Hindrance(
            f"{facts.host_mib} MiB of host memory are left for parked kernels, "
            f"and CUDA alone takes {facts.device.context_mib}",
            "Raise c.PoolSettings.checkpoint_host_mib, or see what takes the machine's memory.",
        )
    if facts.machine != _MACHINE:
        yield Hindrance(
            f"NVIDIA names no architecture but {_MACHINE} for it, and this is {facts.machine}",
            _TRY,
            decisive=False,
        )


#: Libraries of RAPIDS, whose memory pools are often of managed memory.
_MANAGING: Final = re.compile(rb"/lib(rmm|cudf|cuml|cugraph)[^/\n]*\.so")
#: With it TensorFlow and JAX use managed memory.
_TOLD: Final = b"TF_FORCE_UNIFIED_MEMORY=1"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What is known of a process that has a GPU open, or may have."""

    pid: int
    #: Whether NVML lists it among those that compute on a GPU.
    computes: bool
    #: By what it is likely to have managed memory (UVM); empty where nothing says so.
    managed_by: str = ""


def facts_of(pid: int, computing: Collection[int]) -> ProcessFacts:
    """Look at a process; ``computing`` are those that compute on a GPU."""
    return ProcessFacts(pid, pid in computing, _managed_by(pid))


def _managed_by(pid: int) -> str:
    if _TOLD in environment_of(pid):
        return _TOLD.decode()
    with contextlib.suppress(OSError):  # it has ended, or hides what it has loaded
        if found := _MANAGING.search(Path(f"/proc/{pid}/maps").read_bytes()):
            return f"lib{found[1].decode()}"
    return ""


def why_kept(processes: Sequence[ProcessFacts], *, insisted: bool) -> str:
    """Return why these processes of one lease are not to be moved; empty where it may be tried.

    ``insisted`` says that the administrator has it tried where it is not known to work.
    """
    forked = [each.pid for each in processes if not each.computes]
    if forked:
        return (
            f"process {forked[0]} has the GPU open, or may have, and computes nothing there, like one that "
            "was forked after CUDA was used, such as a DataLoader's worker: the driver cannot move that"
        )
    if insisted:
        return ""
    if len(processes) > 1:
        pids = ", ".join(str(each.pid) for each in processes)
        return f"several of its processes ({pids}) compute on the GPU, and may share memory there"
    managed = [f"process {each.pid} uses {each.managed_by}" for each in processes if each.managed_by]
    return f"{managed[0]}, and may have managed memory (UVM)" if managed else ""


_REMEDY: Final = "Where the driver does not permit it: sudo nvidia-smi -pm 1. Then ask again: gpu-pool doctor"


class CheckpointProbe:
    """Finds out what keeps processes on a device from being moved to host memory."""

    def __init__(self, settings: PoolSettings, workers: DriverWorkers) -> None:
        self._settings = settings
        self._workers = workers
        #: Why the driver would do it to no process, empty if it would; None until it was asked.
        self._refusal: str | None = None

    def hindrances(self, device: Device, tier: str) -> list[Hindrance]:
        """Return all that stands in the way on a device that this tier enforces, what is decisive first.

        The driver is asked where nothing else is decisive, once: that takes a second.
        """
        found = hindrances(
            self._facts(device, tier),
            insisted=self._settings.checkpoint == "on",
            under_mps=self._settings.checkpoint_under_mps,
        )
        if not any(each.decisive for each in found) and (refusal := self._refused(device)):
            found.insert(0, Hindrance(refusal, _REMEDY))
        return found

    def _facts(self, device: Device, tier: str) -> CheckpointFacts:
        budget = budget_mib(self._settings.checkpoint_host_mib)
        return CheckpointFacts(
            device=device,
            tier=tier,
            machine=platform.machine(),
            has_bindings=_has_bindings(),
            host_mib=min(budget, available_mib([os.getpid()])),
        )

    def _refused(self, device: Device) -> str:
        """Return why the driver would do it to no process; empty if it would."""
        if self._refusal is None:
            worker = self._workers.of(device.uuid)
            self._refusal = in_words(worker.ask("probe", limit=self._settings.tuning.driver_within).problem)
        return self._refusal


def _has_bindings() -> bool:
    # Other packages, too, have modules under that name.
    return (
        importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
    )


_MIB: Final = 1 << 20
#: The part of the memory that is used if the administrator names no other.
_PART: Final = 4
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory of all suspended leases of a pool."""

    leases: int
    taken_mib: int
    budget_mib: int

    def why_refused(self, need_mib: int, available_mib: int) -> str:
        """Return why one more lease cannot have so much, a clause after its name; empty if it can.

        ``available_mib`` is what its processes could take, whatever is left of the budget.
        """
        left = max(self.budget_mib - self.taken_mib, 0)
        if need_mib > left:
            return (
                f"holds {need_mib} MiB on its GPU, and {left} of the {self.budget_mib} MiB of host memory "
                f"for parked kernels are left (parked: {self.leases}; c.PoolSettings.checkpoint_host_mib)"
            )
        if need_mib > available_mib:
            available = max(available_mib, 0)
            return f"holds {need_mib} MiB on its GPU, and {available} MiB of host memory are available to it"
        return ""


def budget_mib(setting: int, cgroups: Path = _CGROUPS) -> int:
    """Return the MiB that all suspended processes may take together.

    ``setting`` 0 is a quarter of the machine's memory or, where that is less, of the limit of this process's
    own cgroup.
    """
    limits = [int(psutil.virtual_memory().total)]
    limits += [limit for group in _groups(os.getpid(), cgroups) if (limit := _limit(group)) is not None]
    return setting or min(limits) // _PART // _MIB


def available_mib(pids: Collection[int], cgroups: Path = _CGROUPS) -> int:
    """Return the MiB that are available to each of these processes: on the machine, and in its cgroup.

    What a process has on its GPU becomes its own host memory, so a limit on its
    cgroup counts (v2 only). One that goes over it is ended by the kernel.
    """
    found = [int(psutil.virtual_memory().available)]
    for pid in pids:
        limits = ((group, _limit(group)) for group in _groups(pid, cgroups))
        found += [limit - _taken(group) for group, limit in limits if limit is not None]
    return max(min(found), 0) // _MIB


def _groups(pid: int, cgroups: Path) -> Iterator[Path]:
    """Yield the cgroup of a process and those around it."""
    with contextlib.suppress(OSError):
        for line in procfs.lines_of(Path(f"/proc/{pid}/cgroup").read_bytes()):
            # Whoever may make groups names them.
            if line.startswith(b"0::/") and b".." not in line:
                group = cgroups / os.fsdecode(line.removeprefix(b"0::/"))
                yield from (each for each in (group, *group.parents) if each.is_relative_to(cgroups))


def _limit(group: Path) -> int | None:
    """Return the bytes that a cgroup may have; None where nothing limits it."""
    try:
        limit = (group / "memory.max").read_text().strip()
    except OSError:  # the root, or one without this controller
        return None
    return None if limit == "max" else int(limit)


def _taken(group: Path) -> int:
    fields = (line.split() for line in procfs.lines_of((group / "memory.stat").read_bytes()))
    # Files that were read lately are let go of when memory is needed.
    cached = sum(int(value) for name, value in fields if name == b"inactive_file")
    return int((group / "memory.current").read_text()) - cached
