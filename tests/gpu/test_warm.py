"""A kernel that is forked from a template with PyTorch is held to its slice as one that has started cold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Device, Lease, Process, connect
from support.gpu import memory_of

Install = Callable[..., str]

#: Allocates memory until there is none left, at the latest at half as much again as was granted.
FILL = """
import json, os, torch
held = []
seen = {{"initialised": torch.cuda.is_initialized(), "error": ""}}
seen["enforced"] = os.environ["GPU_POOL_ENFORCED"]
try:
    while len(held) * 16 < {granted} * 3 // 2:
        held.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as caught:
    seen["error"] = type(caught).__name__
seen["mib"] = len(held) * 16
held.clear()
torch.cuda.empty_cache()
seen["sum"], seen["devices"] = torch.ones(3, device="cuda").sum().item(), torch.cuda.device_count()
print(json.dumps(seen))
"""


@dataclass
class Found:
    """What a cold and a warm kernel have said of themselves, and the warm one once it was restarted."""

    cold: dict[str, Any]
    warm: dict[str, Any]
    restarted: dict[str, Any]
    #: MiB of the slice.
    granted: int
    #: What the template has of the driver, before its kernels use the GPU and while they do.
    before: list[str]
    after: list[str]
    #: MiB of the device that the warm kernel and its template use, where the driver tells.
    used: list[int | None]


@pytest.fixture
def soon(installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let templates start at once, have their time on a busy machine, and end with the test."""
    from gpu_pool_provisioner import templates

    monkeypatch.setattr(templates, "STARTS_AFTER", 0.0)
    monkeypatch.setattr(templates, "PAUSES_WITHIN", 0.0)
    # The process's own and nobody's setting; a template that has CUDA's libraries is slow to be forked.
    monkeypatch.setattr(templates, "_ANSWERS_WITHIN", 20.0)
    yield
    templates.templates().end()


async def fill_cold_and_warm(name: str, device: Device | None = None) -> Found:
    """Have a cold and a warm kernel fill their slices; the leases must be their own."""
    from jupyter_client.manager import AsyncKernelManager

    from support.jupyter_env import answer
    from support.warm_kernels import is_warm, start, until_ready

    cold, warm = AsyncKernelManager(kernel_name=name), AsyncKernelManager(kernel_name=name)
    try:
        template = await until_ready(cold)
        before = driver_in(template.pid)
        assert await start(warm)
        leases = await all_leases()
        assert {lease.process for lease in leases} == {
            Process.of(cold.provisioner.pid),
            Process.of(warm.provisioner.pid),
        }
        granted = leases[0].memory_mib
        code = FILL.format(granted=granted)
        of_cold, of_warm = [last_line(await answer(km, code, within=300)) for km in (cold, warm)]
        pids = (warm.provisioner.pid, template.pid)
        used = [memory_of(device, pid) if device else None for pid in pids]
        after = driver_in(template.pid)
        await warm.restart_kernel()
        assert is_warm(warm)
        restarted = last_line(await answer(warm, code, within=300))
        return Found(of_cold, of_warm, restarted, granted, before, after, used)
    finally:
        for km in (cold, warm):
            if km.has_kernel:
                await km.shutdown_kernel(now=True)


async def all_leases() -> tuple[Lease, ...]:
    async with connect(os.environ["GPU_POOL_URL"]) as pool:
        return (await pool.status()).leases


def last_line(printed: str) -> dict[str, Any]:
    """Return what was printed last; libraries print, too."""
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def driver_in(pid: int) -> list[str]:
    """Return what a process has open or loaded of the GPU's driver."""
    opened = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.append(os.readlink(each))
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [each for each in (*opened, *mapped) if "/dev/nvidia" in each or "/libcuda.so" in each]


@pytest.mark.gpu
@pytest.mark.usefixtures("soon", "torch")
def test_a_warm_kernel_is_held_to_its_slice_as_a_cold_one(install: Install) -> None:
    found = asyncio.run(fill_cold_and_warm(install("2%", preload=["torch"])))
    if re.search(r"memory: [^;]*, none \(", found.cold["enforced"]):
        pytest.skip("nothing holds memory here: this PyTorch takes no cap by environment")
    assert found.warm == found.cold
    assert found.restarted == found.cold
    assert (found.warm["error"], found.warm["initialised"]) == ("OutOfMemoryError", False)
    assert (found.warm["sum"], found.warm["devices"]) == (3.0, 1)
    assert found.granted / 3 < found.warm["mib"] <= found.granted
    assert (found.before, found.after) == ([], []), "CUDA is initialised by kernels alone"


@pytest.mark.gpu
@pytest.mark.usefixtures("soon", "torch", "seen")
def test_the_driver_counts_a_warm_kernel_s_memory_as_its_own(install: Install, device: Device) -> None:
    found = asyncio.run(fill_cold_and_warm(install("2%", preload=["torch"]), device))
    of_kernel, of_template = found.used
    assert of_kernel
    assert of_template is None


#: Stands in for PyTorch: it reads its cap as it is imported, and hands out as much memory as that allows.
STAND_IN = """
import os

class Generator:
    def seed(self): return 0
    def initial_seed(self): return 1 << 52

default_generator, uint8 = Generator(), None
cap = os.environ["PYTORCH_CUDA_ALLOC_CONF"].partition("per_process_memory_fraction:")[2].partition(",")[0]
left = int(float(cap) * (32768 << 20))

class cuda:
    class OutOfMemoryError(MemoryError): pass
    used = False
    is_initialized = classmethod(lambda cls: cls.used)
    device_count = staticmethod(lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    empty_cache = staticmethod(lambda: None)

def empty(size, **options):
    global left
    cuda.used, left = True, left - size
    if left < 0: raise cuda.OutOfMemoryError
    return size

class ones:
    def __init__(self, count, **options): self.count = float(count)
    def sum(self): return self
    def item(self): return self.count
"""


@pytest.mark.long
def test_these_tests_do_what_they_say_with_a_stand_in_for_pytorch(
    install: Install, soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no GPU."""
    modules = tmp_path / "modules"
    (modules / "torch-2.11.0.dist-info").mkdir(parents=True)
    (modules / "torch.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *sys.path]))
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:1")
    found = asyncio.run(fill_cold_and_warm(install("10%", preload=["torch"])))
    assert found.warm == found.cold == found.restarted
    assert (found.warm["error"], found.warm["devices"]) == ("OutOfMemoryError", 1)
    assert found.granted / 3 < found.warm["mib"] <= found.granted
    assert (found.before, found.after) == ([], [])
