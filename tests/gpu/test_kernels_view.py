"""What a process on a slice is told, and what it tells: devices, %gpu, memory in use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gpu_pool_kernels
from gpu_pool_client import Device
from support.gpu import SharedDevice, memory_of, used_mib

pytestmark = pytest.mark.gpu

INKERNEL = Path(gpu_pool_kernels.__file__).parent / "inkernel"

#: Loads the part of the project that runs in kernels as a kernel does: by its path alone.
FACTS = f"""
import runpy, sys
runpy.run_path({str(INKERNEL / "launch.py")!r})["register"](__import__("pathlib").Path({str(INKERNEL)!r}))
from _gpu_pool_inkernel import facts
"""


def test_a_process_sees_the_one_device_of_its_slice(shared: SharedDevice, torch: Mapping[str, Any]) -> None:
    occupant = shared.take("10%")
    seen = occupant.child.ask(
        "import torch; answer = torch.cuda.device_count(), torch.cuda.get_device_name(0)"
    )
    assert seen == [1, torch["name"]]


def test_pytorch_has_about_the_memory_told(device: Device, torch: Mapping[str, Any]) -> None:
    # The driver keeps some for itself: 1.5% of an H100's.
    assert torch["total_mib"] == pytest.approx(device.memory_mib, rel=0.03)


def test_a_context_takes_no_more_than_the_smallest_slice_that_is_granted(
    shared: SharedDevice, device: Device
) -> None:
    occupant = shared.take("10%", caps=False)
    before = used_mib(device)
    occupant.child.ask("import torch; torch.cuda.init(); torch.cuda.synchronize()")
    told = memory_of(device, occupant.child.pid)
    context = used_mib(device) - before if told is None else told
    # Within what the watchdog forgives, and not so much more that memory is left unused.
    assert context - 64 <= device.context_mib <= context * 1.5, (
        f"a context takes {context} MiB here, not {device.context_mib}: see gpu_pool/devices/inventory.py"
    )


def test_gpu_magic_tells_the_memory_that_the_driver_tells(
    shared: SharedDevice, device: Device, seen: None
) -> None:
    occupant = shared.take("10%")
    code = "import torch; held = torch.ones(512 << 18, device='cuda'); torch.cuda.synchronize()"
    used, words = occupant.child.ask(
        f"{FACTS}{code}; answer = facts.Slice().used_mib, facts.Slice().memory()"
    )
    assert used >= 512
    assert used == pytest.approx(memory_of(device, occupant.child.pid), abs=16)
    assert words.endswith("granted")
    assert "not measured" not in words
