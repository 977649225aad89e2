"""What a slice's process may allocate, and what its neighbours notice of one that wants more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from gpu_pool.enforcement.watchdog.escalation import Tolerance
from gpu_pool_client import Device
from gpu_pool_client._framework_caps import installed_frameworks, usable_mib
from support.gpu import Occupant, SharedDevice, memory_of, until

pytestmark = pytest.mark.gpu

#: Allocates pieces of PIECE MiB until memory runs out, at the latest at LIMIT MiB.
FILL = """
import torch
held, error = [], ""
try:
    while len(held) * PIECE < LIMIT:
        held.append(torch.empty(PIECE << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as caught:
    error = type(caught).__name__
answer = {"mib": len(held) * PIECE, "error": error}
"""

RECOVER = """
held.clear()
torch.cuda.empty_cache()
answer = torch.full((1000,), 2.0, device="cuda").sum().item()
"""

#: Multiplies matrices in a thread for as long as the process lives, and checks every product.
COMPUTE = """
import threading, torch
rounds, wrong, failure, stop = 0, 0, "", threading.Event()

def work():
    global rounds, wrong, failure
    try:
        one = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).cuda()
        expected = one @ one
        while not stop.is_set():
            wrong += not torch.allclose(one @ one, expected, rtol=1e-3, atol=1e-2)
            rounds += 1
    except Exception as error:
        failure = repr(error)

worker = threading.Thread(target=work, daemon=True)
worker.start()
"""


def fill(occupant: Occupant) -> Mapping[str, Any]:
    """Have a process allocate all it can, up to half as much again as was granted to it."""
    granted = occupant.lease.memory_mib
    sizes = f"PIECE, LIMIT = {max(16, granted // 64)}, {granted * 3 // 2}\n"
    found: Mapping[str, Any] = occupant.child.ask(sizes + FILL)
    return found


def rounds(occupant: Occupant) -> int:
    """Return how often a process has computed; fail if a product was wrong or it could not go on."""
    count, wrong, failure = occupant.child.ask("answer = rounds, wrong, failure")
    assert (wrong, failure) == (0, "")
    return int(count)


def held_to_its_memory(occupant: Occupant, torch: Mapping[str, Any]) -> Occupant:
    """Return the process, if anything at all is to hold it to its memory."""
    if re.search(r"memory: [^;]*, none \(", occupant.enforced):
        pytest.skip(f"nothing holds memory here: PyTorch {torch['torch']} takes no cap by environment")
    return occupant


@pytest.mark.parametrize("size", ["2%", "10%", "50%"])
def test_a_process_past_its_slice_runs_out_of_memory_and_its_neighbour_goes_on(
    tiered: SharedDevice, torch: Mapping[str, Any], size: str
) -> None:
    neighbour, greedy = tiered.take(size), held_to_its_memory(tiered.take(size), torch)
    neighbour.child.ask(COMPUTE)
    until(lambda: rounds(neighbour) > 10, within=120)
    found = fill(greedy)
    assert found["error"] == "OutOfMemoryError"
    assert greedy.lease.memory_mib / 3 < found["mib"] <= greedy.lease.memory_mib
    before = rounds(neighbour)
    until(lambda: rounds(neighbour) > before + 10)
    assert greedy.child.ask(RECOVER) == 2000.0
    neighbour.child.ask("stop.set(); worker.join()")


def test_the_caps_of_the_installed_pytorch_are_set_stated_and_understood(
    shared: SharedDevice, torch: Mapping[str, Any]
) -> None:
    occupant = shared.take("10%")
    major, minor = (int(part) for part in torch["torch"].split(".")[:2])
    if (major, minor) < (2, 10):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in occupant.environ
        assert "none (accounting only)" in occupant.enforced
    else:
        assert "per_process_memory_fraction" in occupant.environ["PYTORCH_CUDA_ALLOC_CONF"]
        assert "cooperative (framework caps: torch" in occupant.enforced
    assert occupant.child.ask("import torch; answer = torch.ones(3, device='cuda').sum().item()") == 3.0


def test_the_version_of_pytorch_is_told_without_importing_it(
    torch: Mapping[str, Any], shared: SharedDevice
) -> None:
    occupant = shared.take("2%")
    python = occupant.child.ask("import sys; answer = sys.executable")
    # PyTorch's own word may have a local part, such as +cu130, that its package has not.
    assert installed_frameworks(python)["torch"].partition("+")[0] == torch["torch"].partition("+")[0]


def test_the_caps_leave_all_of_the_slice_but_the_context(
    shared: SharedDevice, torch: Mapping[str, Any]
) -> None:
    occupant = held_to_its_memory(shared.take("10%"), torch)
    assert fill(occupant)["mib"] == pytest.approx(usable_mib(occupant.lease.slices[0]), rel=0.05)


def test_who_fills_a_slice_up_to_its_caps_and_computes_on_it_stays_within_it(
    shared: SharedDevice, torch: Mapping[str, Any], device: Device, seen: None
) -> None:
    occupant = held_to_its_memory(shared.take("2%"), torch)
    # Matrices and a convolution first: their libraries take memory that PyTorch's cap does not count.
    occupant.child.ask(
        "import torch\n"
        "one = torch.randn(512, 512, device='cuda'); one = one @ one\n"
        "image = torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64, device='cuda'), "
        "torch.randn(16, 3, 3, 3, device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    assert fill(occupant)["error"] == "OutOfMemoryError"
    used = memory_of(device, occupant.child.pid)
    assert used is not None
    assert Tolerance().allows(used, occupant.lease.memory_mib)


def test_a_process_that_drops_its_variables_is_held_by_mps_all_the_same(tiered: SharedDevice) -> None:
    if tiered.tier.name not in ("mps", "cgroups"):
        pytest.skip("these limits can be dropped; that is why they are called cooperative")
    occupant = tiered.take("10%", caps=False)
    # Before CUDA is initialised, as a terminal would before it starts Python.
    occupant.child.ask(
        "import os\n"
        "for name in ('CUDA_MPS_PINNED_DEVICE_MEM_LIMIT', 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'):\n"
        "    os.environ.pop(name, None)"
    )
    assert fill(occupant)["error"] == "OutOfMemoryError"
