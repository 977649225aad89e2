"""A process with 1 GiB on a GPU lends its memory and gets it back, with what was in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pynvml
import pytest
from benchmarks.checkpoint import FRAMEWORKS, HOLD
from benchmarks.checkpoint import holding as holding_floats

from gpu_pool.enforcement.checkpoint import Broken, Checkpoint, NotSuspended, program
from gpu_pool.nvml import computing
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, LeaseState
from gpu_pool_client._processes import family

pytestmark = pytest.mark.gpu

GIB = 1 << 30
#: Each holds 1 GiB on the GPU, says so, and then answers every line with what it finds there.
TORCH = """
import sys, torch
held = torch.arange(1 << 28, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    print(int(held[12345]), int(held[-1]), bool((held[1:] > held[:-1]).all()), flush=True)
"""
DRIVER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, held, found = ctypes.c_void_p(), ctypes.c_uint64(), (ctypes.c_uint32 * 2)()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(1 << 30)) == 0
assert cuda.cuMemsetD32_v2(held, 12345, ctypes.c_size_t(1 << 28)) == 0
assert cuda.cuCtxSynchronize() == 0
print("ready", flush=True)
for line in sys.stdin:
    last = ctypes.c_uint64(held.value + (1 << 30) - 4)
    assert cuda.cuMemcpyDtoH_v2(ctypes.byref(found), held, ctypes.c_size_t(4)) == 0
    assert cuda.cuMemcpyDtoH_v2(ctypes.byref(found, 4), last, ctypes.c_size_t(4)) == 0
    print(*found, flush=True)
"""


#: As a node's agent does it for the pod of one process: FOLDER VERB PID DEVICE.
MOVE = """
import sys
from pathlib import Path
from gpu_pool.cluster.node_agent.sampling import Container
from gpu_pool.cluster.node_agent.suspending import PodSuspender
from gpu_pool.settings import PoolSettings
from gpu_pool_client import MemoryMove, MoveVerb
folder, verb, pid, device = sys.argv[1:]
suspender = PodSuspender(Path(folder), PoolSettings(checkpoint="on"), {int(pid): Container("uid", "")}.get)
result = suspender.move(MemoryMove("1", MoveVerb(verb), "uid", (), device))
suspender.close()
print(result.outcome.value, result.why)
"""
#: The rights of an agent in its pod, of root's; and a process in namespaces of its own, as a container is.
AGENT = ["setpriv", "--bounding-set=-all,+dac_read_search,+sys_ptrace", "--no-new-privs"]
IN_POD = ["unshare", "--pid", "--mount-proc", "--ipc", "--uts", "--fork"]


@pytest.fixture
def pool(device: Device, seen: None, tmp_path: Path) -> Iterator[Checkpoint]:
    with closing(Checkpoint(tmp_path, PoolSettings(checkpoint=True))) as pool:
        if why := pool.unavailable(device, "accounting"):
            pytest.skip(f"CUDA checkpoint is not to be had here: {why}")
        yield pool


@contextmanager
def holding(code: str, *within: str) -> Iterator[subprocess.Popen[str]]:
    pipe, command = subprocess.PIPE, [*within, sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert said(process) == "ready"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def asked(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return said(process)


def free() -> int:
    """Return the bytes that are free on all GPUs together."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).free for handle in handles)
    finally:
        pynvml.nvmlShutdown()


@pytest.mark.parametrize("kind", ["torch", "driver"])
def test_memory_is_free_for_another_and_comes_back(kind: str, pool: Checkpoint, device: Device) -> None:
    if kind == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    code = TORCH if kind == "torch" else DRIVER
    with holding(code) as process:
        before, held = asked(process), free()
        assert pool.suspend("lease", [process.pid], device.uuid) >= 1024
        assert free() - held >= GIB
        with holding(code) as another:
            assert asked(another) == before
        pool.restore("lease")
        assert asked(process) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="an agent that suspends is root")
@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("unshare")), reason="needs util-linux")
@pytest.mark.usefixtures("pool")
def test_an_agent_with_two_capabilities_moves_what_a_process_in_a_pod_keeps(
    device: Device, tmp_path: Path
) -> None:
    """The driver does it across namespaces, and for no more rights than the agent of a node has."""
    with holding(DRIVER, *IN_POD) as outer:
        (kernel,) = psutil.Process(outer.pid).children(recursive=True)

        def moved(verb: str) -> str:
            words = [*AGENT, sys.executable, "-c", MOVE, str(tmp_path / "node"), verb]
            done = subprocess.run([*words, str(kernel.pid), device.uuid], capture_output=True, text=True)
            return (done.stdout or done.stderr).strip()

        before, held = asked(outer), free()
        try:
            assert moved("suspend") == "done"
            assert free() - held >= GIB
            assert moved("restore") == "done"
            assert asked(outer) == before
        finally:
            kernel.kill()


def workers() -> list[int]:
    """Return the processes of this one that call the driver."""
    children = psutil.Process().children()
    return [child.pid for child in children if child.cmdline()[1:2] == [program.__file__]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_finds_what_it_had_time_after_time(
    framework: str, pool: Checkpoint, device: Device
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    with holding_floats(sys.executable, FRAMEWORKS[framework] + HOLD, 512) as holder:
        if holder.first != "True":
            pytest.skip(f"{framework} cannot use this GPU")
        for _ in range(10):
            assert pool.suspend("lease", [holder.process.pid], device.uuid) >= 512
            pool.restore("lease")
            assert holder.is_intact()


def test_the_process_that_calls_the_driver_stays_and_holds_no_device_memory(
    pool: Checkpoint, device: Device
) -> None:
    for _ in range(20):
        with holding(DRIVER) as process:
            before = asked(process)
            pool.suspend("lease", [process.pid], device.uuid)
            pool.restore("lease")
            assert asked(process) == before
    (worker,) = workers()
    pynvml.nvmlInit()
    try:
        assert worker not in computing(pynvml.nvmlDeviceGetHandleByUUID(device.uuid))
    finally:
        pynvml.nvmlShutdown()
    with_it = free()
    pool.close()
    assert not psutil.pid_exists(worker)
    assert free() - with_it < 64 << 20


def test_what_was_forked_after_cuda_was_used_is_found_before_it_is_tried(
    pool: Checkpoint, device: Device
) -> None:
    """A worker of a DataLoader is such a process: it has the GPU open, and computes nothing there."""
    fork = "if os.fork() == 0:\n    time.sleep(600)\nprint"
    forking = DRIVER.replace("print", fork, 1).replace("import ctypes, sys", "import ctypes, os, sys, time")
    with holding(forking) as process:
        before, users = asked(process), family(process.pid)
        try:
            assert len(users) == 2
            with pytest.raises(NotSuspended, match="forked after CUDA was used"):
                pool.suspend("lease", users, device.uuid)
            assert asked(process) == before
        finally:
            for pid in users:
                os.kill(pid, signal.SIGKILL)


def test_several_processes_are_moved_together_or_none_of_them(pool: Checkpoint, device: Device) -> None:
    with holding(DRIVER) as one, holding(DRIVER) as other:
        before = asked(one), asked(other)
        try:
            pool.suspend("lease", [one.pid, other.pid], device.uuid)
            pool.restore("lease")
        except NotSuspended:
            pass
        assert (asked(one), asked(other)) == before


def test_by_itself_one_process_is_moved_and_several_are_not(
    pool: Checkpoint, device: Device, tmp_path: Path
) -> None:
    with closing(Checkpoint(tmp_path, PoolSettings())) as by_itself, holding(DRIVER) as one:
        if why := by_itself.unavailable(device, "accounting"):
            pytest.skip(f"it is not done by itself here: {why}")
        before = asked(one)
        with holding(DRIVER) as other, pytest.raises(NotSuspended, match="may share memory"):
            by_itself.suspend("lease", [one.pid, other.pid], device.uuid)
        by_itself.suspend("lease", [one.pid], device.uuid)
        by_itself.restore("lease")
        assert asked(one) == before


def test_a_suspended_process_can_be_killed(pool: Checkpoint, device: Device) -> None:
    with holding(DRIVER) as process:
        pool.suspend("lease", [process.pid], device.uuid)
        process.kill()
        process.wait(30)
    assert pool.recover({"lease": LeaseState.PARKED}) == {}
    assert pool.suspended() == []


def test_managed_memory_is_never_silently_broken(pool: Checkpoint, device: Device) -> None:
    """The driver may refuse it, break the process, or be new enough to do it: each is told truly."""
    managed = DRIVER.replace(
        "cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(1 << 30))",
        "cuMemAllocManaged(ctypes.byref(held), ctypes.c_size_t(1 << 30), 1)",
    )
    broken: frozenset[int] = frozenset()
    with holding(managed) as process:
        before = asked(process)
        try:
            pool.suspend("lease", [process.pid], device.uuid)
            pool.restore("lease")
        except NotSuspended:
            pass
        except Broken as error:
            broken = error.pids
        assert broken == {process.pid} or asked(process) == before
