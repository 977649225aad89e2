"""Processes on slices of a real GPU, for tests and for benchmarks.

PyTorch is used by child processes alone, each of which is launched on its
lease as a kernel is. Nothing but PyTorch and this project's own needs has to
be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from gpu_pool.devices import Inventory
from gpu_pool.devices.sampling import FIRST_NAMESPACE, ProcessSample, ProcessSampler, ProcessUse
from gpu_pool.embedded.pool import local_pool
from gpu_pool.enforcement import Isolation, Tier, TierFailed
from gpu_pool.enforcement.hami_core import HamiTier
from gpu_pool.enforcement.mps import MpsTier
from gpu_pool.enforcement.mps.daemon import TOOL, mps_processes
from gpu_pool.enforcement.mps_namespaces import CgroupTier
from gpu_pool.enforcement.privileged import Privileged
from gpu_pool.enforcement.tiers import Accounting
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, GpuPoolError, Holder, Lease, LeaseState, Process, parse_request
from gpu_pool_client._framework_caps import slice_environment
from gpu_pool_client._processes import pid_namespace

from .gpu_child import Child

T = TypeVar("T")

#: Set to 1 where tests and benchmarks may change settings of the GPU, and put them back, as the
#: pool does: its compute mode, and the memory limits of control groups.
SETTINGS_VARIABLE: Final = "GPU_POOL_TEST_SETTINGS"
#: The ways to enforce slices; with the first, nothing but the frameworks themselves does.
TIERS: Final = ("framework caps", "mps", "cgroups", "hami")
#: Where an administrator installs HAMi-core.
HAMI: Final = Path("/usr/local/vgpu/libvgpu.so")

#: Prints what PyTorch says.
_FACTS: Final = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "available": there,
    "name": torch.cuda.get_device_name(0) if there else "",
    "total_mib": torch.cuda.get_device_properties(0).total_memory >> 20 if there else 0,
}))
"""


class Full(Exception):
    """The pool has no such slice free."""


#: What :meth:`SharedDevice.take` may raise.
NOT_GIVEN: Final = (Full, GpuPoolError, TierFailed)


@dataclass(frozen=True)
class Occupant:
    """A process on its slice. ``environ`` is what it was launched with."""

    child: Child
    lease: Lease
    environ: Mapping[str, str]

    @property
    def enforced(self) -> str:
        """The truth about its limits, as ``%gpu`` says it."""
        return self.environ["GPU_POOL_ENFORCED"]


class SharedDevice:
    """One device, divided by a pool with a store of its own in ``folder``; ``settings`` are the pool's."""

    def __init__(self, folder: Path, device: Device, tier: Tier | None = None, **settings: Any) -> None:
        self.device = device
        self.tier = tier or Accounting()
        self.settings = PoolSettings(**settings)
        self.store = folder / "store.db"
        self._is_open = False
        isolation = Isolation(lambda _: (self.tier,))
        found = Inventory((device,), "for tests")
        self.pool = local_pool(self.store, self.settings, lambda: found, isolation)
        self._occupants: list[Occupant] = []

    def take(self, size: str, *, caps: bool = True) -> Occupant:
        """Start a process on a slice, with a kernel's framework caps or without. Raises ``NOT_GIVEN``."""
        lease = run(self.pool.request(parse_request(size), Holder("a student"), uuid.uuid4().hex))
        self._is_open = True
        if lease.state is not LeaseState.HELD:
            run(self.pool.release(lease.id))
            raise Full(size)
        inherited = {name: each for name, each in os.environ.items() if not name.startswith("GPU_POOL_")}
        ours = slice_environment(lease, sys.executable, inherited) if caps else lease.environment
        occupant = Occupant(Child({**inherited, **ours}), lease, ours)
        self._occupants.append(occupant)
        process = Process.of(occupant.child.pid)
        assert process is not None, "it ended at once"
        run(self.pool.attach(lease.id, process))
        return occupant

    def leave(self, occupant: Occupant) -> None:
        """End a process and give its slice back."""
        self._occupants.remove(occupant)
        occupant.child.close()
        run(self.pool.release(occupant.lease.id))

    def close(self) -> None:
        """End all processes; the tier may then be stopped."""
        for occupant in self._occupants:
            occupant.child.dismiss()
        for occupant in list(self._occupants):
            self.leave(occupant)
        if self._is_open:
            run(self.pool.status())
        run(self.pool.close())


def run(doing: Coroutine[Any, Any, T]) -> T:
    """Wait for what a pool does."""
    return asyncio.run(doing)


def until(condition: Callable[[], object], within: float = 30.0) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@functools.cache
def torch_facts(visible: str = "") -> Mapping[str, Any]:
    """Return what PyTorch says of itself and of the device ``visible``; empty where it is not installed."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible} if visible else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FACTS], env=environ, capture_output=True, check=False
    )
    facts: dict[str, Any] = {} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return facts


def hidden_processes(device: Device) -> str:
    """Say why the driver does not tell here which processes use the device; empty where it does."""
    if pid_namespace() != FIRST_NAMESPACE:
        return "this is a container: the driver names processes as the machine outside does"
    sample = _sample(device)
    return " ".join(sample.problems)


def memory_of(device: Device, pid: int) -> int | None:
    """Return the MiB that a process uses of the device; None where the driver does not tell."""
    uses = _sample(device).uses.get(device.uuid, ())
    return next((use.memory_mib for use in uses if use.pid == pid), None)


def used_mib(device: Device) -> int:
    """Return the MiB in use on the device, by whomever."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) >> 20
    finally:
        pynvml.nvmlShutdown()


def why_not(tier: str, device: Device) -> str:
    """Say why one of ``TIERS`` cannot be used on this device now, through no fault of ours; or nothing."""
    if tier == "framework caps":
        return ""
    if device.simulated:
        return "the device is simulated"
    if tier == "hami":
        return "" if HAMI.is_file() else f"HAMi-core is not installed: there is no {HAMI}"
    if shutil.which(TOOL) is None:
        return f"MPS is not installed: {TOOL} was not found"
    if tier == "cgroups" and _branch(device) < 615:
        return f"driver {device.driver} is older than R615"
    if tier == "cgroups" and not may_change_settings():
        return f"limits of control groups are set only where {SETTINGS_VARIABLE}=1"
    if mps_processes():
        return "MPS runs here already"
    others = _others(device)
    return f"other processes use the device, such as {others[0].pid}" if others else ""


@contextlib.contextmanager
def opened(tier: str) -> Iterator[Tier]:
    """Make one of ``TIERS``; in the end the devices are as they were found."""
    privileged = None if may_change_settings() else Privileged(program=Path("/nonexistent"), root=False)
    # Not a test's own folder: the paths of the sockets of MPS would be too long.
    with tempfile.TemporaryDirectory(prefix="gpu-pool-") as name:
        folder = Path(name)
        make: dict[str, Callable[[], Tier]] = {
            "framework caps": Accounting,
            "mps": lambda: MpsTier(folder, privileged=privileged, timeout=120.0),
            "cgroups": lambda: CgroupTier(folder, privileged=privileged, timeout=120.0),
            "hami": lambda: HamiTier(HAMI, folder),
        }
        made = make[tier]()
        try:
            yield made
        finally:
            made.stop()


def may_change_settings() -> bool:
    """Whether settings of the GPU may be changed, and put back."""
    return os.environ.get(SETTINGS_VARIABLE) == "1"


def _others(device: Device, within: float = 10.0) -> Sequence[ProcessUse]:
    """Return who uses the device, once those had time to go who have just ended."""
    end = time.monotonic() + within
    while (found := _sample(device).uses.get(device.uuid, ())) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _branch(device: Device) -> int:
    number = device.driver.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _sample(device: Device) -> ProcessSample:
    sampler = ProcessSampler()
    try:
        return sampler.sample([device])
    finally:
        sampler.close()
