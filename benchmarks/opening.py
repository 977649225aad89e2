"""What opening a slice in the cooperative tiers adds to a kernel's start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Line, interval
from benchmarks.sizes import sized
from gpu_pool.enforcement.hami_core import HamiTier
from gpu_pool_client import Device, Holder, Lease, LeaseState, Slice, parse_request
from gpu_pool_client import _framework_caps as framework_caps
from gpu_pool_provisioner.environment import SliceEnvironment

ROUNDS = sized(40, 3)
V100 = Device("GPU-0", 0, "V100-SXM2-32GB", 32768)
KERNEL = (sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}")
#: In a process of its own, which has imported what every kernel has.
IN_THE_KERNEL = """
import contextlib, os, threading, time, typing
from gpu_pool_kernels.inkernel import extension
os.environ["GPU_POOL_TORCH_FRACTION"] = "0.01083"
began = time.process_time()
extension.limit_frameworks()
print(1000 * (time.process_time() - began))
"""


def lease(number: int) -> Lease:
    """Return a lease of 2% of a V100."""
    holder, request = Holder("nobody"), parse_request("2%")
    parts = (Slice(V100, 20, 655),)
    return Lease(f"{number}-0", "key", request, holder, LeaseState.HELD, 0.0, slices=parts)


def milliseconds(act: Callable[[int], object]) -> list[float]:
    """Return the CPU times of doing it: others may use the machine, too."""
    times = []
    for number in range(ROUNDS):
        began = time.process_time()
        act(number)
        times.append(1000 * (time.process_time() - began))
    return times


def find_caps(_: int) -> None:
    """Look for frameworks as if this environment had not been seen before, and choose the limits."""
    framework_caps._frameworks_in.cache_clear()
    SliceEnvironment(KERNEL, {}, lease(0))


def in_the_kernel() -> list[float]:
    """Return the CPU times that the import hook takes to be there, in milliseconds."""
    command = [sys.executable, "-c", IN_THE_KERNEL]
    return [float(subprocess.check_output(command)) for _ in range(ROUNDS)]


def run() -> Iterator[Line]:
    """Measure each part, and hold their sum to the promise, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libvgpu.so")
        library.touch()
        tier = HamiTier(library, Path(folder, "hami"), locks=Path(folder, "locks"))
        tier.prepare(V100)
        opened = milliseconds(lambda number: tier.open(lease(number)))
    parts = milliseconds(find_caps), in_the_kernel(), opened
    caps, hook, folder_ms = map(statistics.median, parts)
    sums = [sum(each) for each in zip(*parts, strict=True)]
    total, between = statistics.median(sums), interval(sums)
    made_of = (
        f"caps {caps:.2f}, their hook in the kernel {hook:.2f}, HAMi-core's folder {folder_ms:.2f} ms; "
        f"95% interval {between[0]:.2f} to {between[1]:.2f}, of {ROUNDS}"
    )
    what = "opening a slice in the cooperative tiers"
    yield Line(what, total, made_of, 5, ours=total, unit="ms", interval=between)
