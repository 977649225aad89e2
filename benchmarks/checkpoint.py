"""Parking a kernel that holds device memory, and resuming it, by size; needs a GPU.

The yardstick is a plain copy of as many bytes from the device to host memory
that is not pinned, by the same process in the same run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Line
from gpu_pool.devices import discover
from gpu_pool.enforcement.checkpoint import Checkpoint
from gpu_pool.settings import PoolSettings

#: MiB on the device beside the CUDA context.
SIZES = (256, 1024, 4096, 16384)
ROUNDS = 5
#: Holds that much, prints the seconds that a plain copy takes, and stays.
HOLD = """
import ctypes, sys, time
size, cuda = int(sys.argv[1]) << 20, ctypes.CDLL("libcuda.so.1")
context, held, host = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(size)
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(size)) == 0
assert cuda.cuMemsetD8_v2(held, 1, ctypes.c_size_t(size)) == 0
assert cuda.cuMemcpyDtoH_v2(host, held, ctypes.c_size_t(size)) == 0
began = time.monotonic()
assert cuda.cuMemcpyDtoH_v2(host, held, ctypes.c_size_t(size)) == 0
print(time.monotonic() - began, flush=True)
del host
sys.stdin.read()
"""


def run() -> Iterator[Line]:
    """Yield the report; without a GPU that can do it, say so and yield nothing."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Checkpoint(Path(folder), PoolSettings(checkpoint=True))
        devices = discover({}).devices
        if why := pool.unavailable(devices[0], "accounting") if devices else "there is no GPU":
            print(f"Suspending kernels was not measured: {why}.")
            return
        for mib in SIZES:
            if mib + 1024 <= devices[0].memory_mib:
                yield from measure(pool, mib)


def measure(pool: Checkpoint, mib: int) -> Iterator[Line]:
    command = [sys.executable, "-c", HOLD, str(mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        copy = float(holder.stdout.readline())
        pairs = [
            (seconds(lambda: pool.suspend("lease", [holder.pid])), seconds(lambda: pool.restore("lease")))
            for _ in range(ROUNDS)
        ]
        holder.kill()
    for what, times in zip(("suspend", "restore"), zip(*pairs, strict=True), strict=True):
        middle = statistics.median(times)
        made_of = f"{middle:.2f} s (worst {max(times):.2f}) to {copy:.3f} s, {ROUNDS} rounds"
        yield Line(f"{what} {mib} MiB, to a plain copy of it", middle / copy, made_of)


def seconds(job: Callable[[], object]) -> float:
    began = time.monotonic()
    job()
    return time.monotonic() - began
