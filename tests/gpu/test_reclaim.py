"""Slices and memory come back from processes that end badly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from gpu_pool.enforcement.watchdog import find_unmanaged
from gpu_pool_client import Device, EndReason, Process
from support.gpu import Occupant, SharedDevice, memory_of, run, until, used_mib

pytestmark = pytest.mark.gpu

#: Starts a process of its own session, which holds 512 MiB and ends by itself after a while.
DETACH = """
import subprocess, sys
code = "import torch, time; held = torch.ones(1 << 27, device='cuda'); print(1, flush=True); time.sleep(99)"
child = subprocess.Popen(
    [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
)
assert child.stdout.readline()
answer = child.pid
"""


def ended(shared: SharedDevice, occupant: Occupant) -> Callable[[], bool]:
    def condition() -> bool:
        return occupant.lease.id not in {lease.id for lease in run(shared.pool.status()).leases}

    return condition


def held_milli(shared: SharedDevice) -> int:
    [status] = run(shared.pool.status()).devices
    return status.held_milli


def test_a_killed_process_gives_back_its_slice_and_its_memory(shared: SharedDevice, device: Device) -> None:
    before = used_mib(device)
    occupant = shared.take("10%")
    occupant.child.ask("import torch; held = torch.ones(1 << 28, device='cuda'); torch.cuda.synchronize()")
    until(lambda: used_mib(device) > before + 1024)
    occupant.child.kill()
    until(ended(shared, occupant))
    assert held_milli(shared) == 0
    until(lambda: used_mib(device) < before + 128)
    again = shared.take("1")
    assert again.child.ask("import torch; answer = torch.ones(3, device='cuda').sum().item()") == 3.0


def test_what_a_kernel_leaves_on_the_gpu_is_named_and_the_slice_is_back(
    shared: SharedDevice, device: Device, seen: None
) -> None:
    occupant = shared.take("10%")
    left = Process.of(occupant.child.ask(DETACH))
    assert left is not None
    try:
        occupant.child.kill()
        until(ended(shared, occupant))
        assert run(shared.pool.get_lease(occupant.lease.id)).end_reason is EndReason.PROCESS_GONE
        until(lambda: (memory_of(device, left.pid) or 0) >= 512)
        assert left in [each.process for each in find_unmanaged([device], run(shared.pool.status()).leases)]
    finally:
        os.kill(left.pid, signal.SIGKILL)
    until(lambda: memory_of(device, left.pid) is None)
