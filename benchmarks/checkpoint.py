"""Parking a kernel that holds device memory, and resuming it, where a process that stays calls the driver.

The yardstick is a process that is started for each parking and for each resumption, right beside it. On
a machine with a GPU that can do it, PyTorch, TensorFlow and JAX hold the memory, as far as the Python of
``--kernels-python`` has them, and so does a program without a framework, for which a plain copy to host
memory is a yardstick too. Anywhere else the driver is a stand-in, which is told how long CUDA takes to start.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.report import Line, Skipped, compared
from benchmarks.sizes import KERNELS_PYTHON, sized
from gpu_pool.devices import discover
from gpu_pool.enforcement.checkpoint import Checkpoint, NotSuspended
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device

sys.path.append(str(Path(__file__).parents[1] / "tests"))

#: MiB on the device beside the CUDA context, in pieces of 256.
SIZES = sized((512, 2048, 8192, 20480), (512,))
ROUNDS = sized(10, 2)
#: Milliseconds that CUDA takes to start: as reported of one GPU and of eight.
STARTS = sized((300, 2700), (300,))
#: Milliseconds that the stand-in takes to copy 512 MiB, at 5 GB/s.
COPY_MS = 107

#: Each makes a piece of 256 MiB that holds nothing but 7, and reads the last number of one.
FRAMEWORKS = {
    "torch": """
import torch
def make(): return torch.full((1 << 26,), 7.0, device="cuda")
def last(piece): return float(piece[-1])
""",
    "tensorflow": """
import os
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
import tensorflow
def make():
    with tensorflow.device("GPU:0"): return tensorflow.fill([1 << 26], 7.0)
def last(piece): return float(piece[-1])
""",
    "jax": """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy
assert jax.default_backend() == "gpu"
def make(): return jax.numpy.full((1 << 26,), 7.0, jax.numpy.float32).block_until_ready()
def last(piece): return float(piece[-1])
""",
}
HOLD = """
import sys
held = [make() for _ in range(int(sys.argv[1]) // 256)]
def say(): print(all(last(each) == 7.0 for each in held), flush=True)
say()
for line in sys.stdin: say()
"""
#: Holds that much, prints the seconds that a plain copy takes, and stays.
HOLD_PLAINLY = """
import ctypes, sys, time
size, cuda = int(sys.argv[1]) << 20, ctypes.CDLL("libcuda.so.1")
context, held, host = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(size)
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(size)) == 0
assert cuda.cuMemsetD8_v2(held, 7, ctypes.c_size_t(size)) == 0
assert cuda.cuMemcpyDtoH_v2(host, held, ctypes.c_size_t(size)) == 0
began = time.monotonic()
assert cuda.cuMemcpyDtoH_v2(host, held, ctypes.c_size_t(size)) == 0
print(time.monotonic() - began, flush=True)
for line in sys.stdin:
    assert cuda.cuMemcpyDtoH_v2(host, held, ctypes.c_size_t(size)) == 0
    print(host.raw[-1] == 7, flush=True)
"""


def run() -> Iterator[Line]:
    """Yield the report. Raises ``Skipped`` where there is neither such a GPU nor a stand-in for one."""
    with parkers() as ways:
        devices = discover({}).devices
        why = ways.staying.unavailable(devices[0], "accounting") if devices else "there is no GPU"
        if not why:
            yield from on_hardware(ways, devices[0])
            return
    print(f"The driver is simulated, since {why}.", file=sys.stderr)
    yield from simulated()


# ---- Two ways ----


@dataclass(frozen=True)
class Ways:
    """What parks with a process that stays, and what parks with one that is started each time."""

    staying: Checkpoint
    starting: Checkpoint

    def round(self, pid: int, device: str) -> list[tuple[float, float]]:
        """Park and resume a process both ways; return the seconds of each, the parkings first."""
        staying = parked_and_resumed(self.staying, pid, device, after=lambda: None)
        starting = parked_and_resumed(self.starting, pid, device, after=self.starting.close)
        return list(zip(staying, starting, strict=True))


@contextmanager
def parkers() -> Iterator[Ways]:
    """Make both."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = (
            Checkpoint(Path(folder) / name, PoolSettings(checkpoint=True)) for name in ("one", "other")
        )
        with closing(one), closing(other):
            yield Ways(one, other)


def parked_and_resumed(
    pool: Checkpoint, pid: int, device: str, after: Callable[[], None]
) -> tuple[float, float]:
    parked = seconds(lambda: pool.suspend("lease", [pid], device))
    after()
    resumed = seconds(lambda: pool.restore("lease"))
    after()
    return parked, resumed


def seconds(job: Callable[[], object]) -> float:
    began = time.monotonic()
    job()
    return time.monotonic() - began


def lines(what: str, rounds: list[list[tuple[float, float]]], about: str) -> Iterator[Line]:
    for name, pairs in zip(("park", "resume"), zip(*rounds, strict=True), strict=True):
        ours = [pair[0] for pair in pairs]
        made_of = f"{about}; {statistics.median(ours):.3f} s, worst {max(ours):.3f}"
        yield compared(f"{name} {what}, to a program started for it", pairs, made_of, unit="s")


# ---- With a stand-in for the driver ----


def simulated() -> Iterator[Line]:
    if importlib.util.find_spec("cuda") is None or shutil.which("gcc") is None:
        raise Skipped("the stand-in for the driver needs cuda-bindings and gcc")
    from support import cuda_stub

    with tempfile.TemporaryDirectory() as folder:
        libraries, state = Path(folder, "libraries"), Path(folder, "driver")
        libraries.mkdir()
        state.mkdir()
        told = {"LD_LIBRARY_PATH": str(cuda_stub.build(libraries)), "DRIVER_STUB": str(state)}
        driver = cuda_stub.Driver(state)
        with patch.dict(os.environ, told), parkers() as ways, driver.process(512) as pid:
            for start in STARTS:
                driver.scenario(f"start {start}", f"copy {COPY_MS}")
                ways.round(pid, "GPU-1")  # the process that stays has started then
                rounds = [ways.round(pid, "GPU-1") for _ in range(ROUNDS)]
                about = f"a simulated driver, in which CUDA takes {start / 1000:g} s to start, at 5 GB/s"
                yield from lines(f"512 MiB, CUDA's start {start / 1000:g} s", rounds, about)


# ---- On a GPU ----


def on_hardware(ways: Ways, device: Device) -> Iterator[Line]:
    python = os.environ.get(KERNELS_PYTHON, sys.executable)
    about = f"{device.model}, driver {device.driver}"
    for mib in SIZES:
        if mib + 2048 > device.memory_mib:
            continue
        for name, code in FRAMEWORKS.items():
            if subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode:
                print(f"{name} was left out: {python} cannot import it.", file=sys.stderr)
                continue
            with holding(python, code + HOLD, mib) as holder:
                rounds = rounds_of(ways, holder, device)
            yield from lines(f"{mib} MiB of {name}", rounds, about)
        with holding(sys.executable, HOLD_PLAINLY, mib) as holder:
            rounds = rounds_of(ways, holder, device)
        yield from lines(f"{mib} MiB of a plain program", rounds, about)
        for what, pairs in zip(("park", "resume"), zip(*rounds, strict=True), strict=True):
            copied = [(pair[0], float(holder.first)) for pair in pairs]
            yield compared(f"{what} {mib} MiB, to a plain copy of it", copied, about, unit="s")


@dataclass(frozen=True)
class Holder:
    """A process that holds device memory."""

    process: subprocess.Popen[str]
    #: The line that it began with.
    first: str

    def is_intact(self) -> bool:
        """Whether what it holds is what it was."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip() == "True"


@contextmanager
def holding(python: str, code: str, mib: int) -> Iterator[Holder]:
    pipe = subprocess.PIPE
    with subprocess.Popen([python, "-c", code, str(mib)], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield Holder(process, process.stdout.readline().strip())
        finally:
            process.kill()


def rounds_of(ways: Ways, holder: Holder, device: Device) -> list[list[tuple[float, float]]]:
    """Return the rounds; none, and say why, where what it holds cannot be moved."""
    rounds = []
    try:
        ways.round(holder.process.pid, device.uuid)  # the process that stays has started then
        for _ in range(ROUNDS):
            rounds.append(ways.round(holder.process.pid, device.uuid))
            assert holder.is_intact(), "what it held is lost"
    except NotSuspended as error:
        print(f"This was left out: {error}", file=sys.stderr)
    return rounds
