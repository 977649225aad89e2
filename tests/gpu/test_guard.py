"""What a pool measures of processes on a real GPU, and what it does to one that uses too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpu_pool_client import Device, EndReason, Lease, LeaseState
from support.gpu import Occupant, SharedDevice, memory_of, run, until

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seen")]

ALLOCATE = "held = torch.ones({mib} << 18, device='cuda'); torch.cuda.synchronize()"
RESERVED = "answer = torch.cuda.memory_reserved() >> 20"
#: Users are warned at once.
WATCHFUL = {"look_every": 0.1, "watchdog_after": 0.0}
#: What uses too much is interrupted half a second after the warning, and ended a second later.
IMPATIENT = {**WATCHFUL, "watchdog": "end", "interrupt_after": 0.5, "end_after": 1.0}


def lease(shared: SharedDevice, occupant: Occupant) -> Lease:
    return run(shared.pool.get_lease(occupant.lease.id))


def past(shared: SharedDevice, occupant: Occupant) -> Mapping[str, Any]:
    [row] = [row for row in run(shared.pool.history()) if row.id == occupant.lease.id]
    return row


def test_the_peak_in_the_history_is_what_pytorch_reserved_and_its_context(
    share_device: Any, device: Device
) -> None:
    shared: SharedDevice = share_device(look_every=0.1)
    occupant = shared.take("10%", caps=False)
    occupant.child.ask("import torch; small = torch.ones(1, device='cuda'); torch.cuda.synchronize()")
    until(lambda: memory_of(device, occupant.child.pid))
    context = (memory_of(device, occupant.child.pid) or 0) - occupant.child.ask(RESERVED)
    assert context > 0
    reserved = occupant.child.ask(f"{ALLOCATE.format(mib=2048)}; {RESERVED}")
    # The pool looks ten times a second, and writes down what it saw when the lease has ended.
    occupant.child.ask("import time; time.sleep(2)")
    shared.leave(occupant)
    until(lambda: past(shared, occupant).peak_mib is not None)
    assert past(shared, occupant).peak_mib == pytest.approx(reserved + context, rel=0.05)
    assert past(shared, occupant).touched


def test_memory_of_a_child_process_counts_for_the_slice(share_device: Any) -> None:
    shared: SharedDevice = share_device(watchdog="warn", **WATCHFUL)
    occupant = shared.take("2%", caps=False)
    too_much = ALLOCATE.format(mib=occupant.lease.memory_mib + 256)
    occupant.child.ask(
        "import subprocess, sys\n"
        f'code = "import torch, sys; {too_much}; sys.stdin.read()"\n'
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE)"
    )
    until(lambda: lease(shared, occupant).notice, within=120)
    occupant.child.ask("child.stdin.close(); child.wait()")
    until(lambda: not lease(shared, occupant).notice)


def test_a_process_over_its_memory_is_warned_interrupted_and_ended(share_device: Any) -> None:
    shared: SharedDevice = share_device(**IMPATIENT)
    occupant, neighbour = shared.take("2%", caps=False), shared.take("2%")
    neighbour.child.ask("import torch; one = torch.ones(1, device='cuda')")
    occupant.child.ask("import torch")
    occupant.child.ask(ALLOCATE.format(mib=occupant.lease.memory_mib + 256))
    until(lambda: "was granted" in lease(shared, occupant).notice)
    until(lambda: "was interrupted" in lease(shared, occupant).notice)
    until(lambda: not occupant.child.is_alive)
    until(lambda: lease(shared, occupant).state is LeaseState.ENDED)
    assert lease(shared, occupant).end_reason is EndReason.OVER_MEMORY
    assert neighbour.child.ask("answer = one.item()") == 1.0
