"""Memory on top of a slice, its burst, followed by real kernels, with a stand-in for torch, in cells."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frameworks import write_torch

from .conftest import SLICE, Kernel, Start

#: 2% of a V100, without a burst, with what a kernel may ever have.
NO_BURST = {
    **SLICE,
    "GPU_POOL_SLICE": "2%..10%",
    "GPU_POOL_TORCH_FRACTION": "0.007",
    "GPU_POOL_ALLOWED_MIB": "655",
    "GPU_POOL_LIMIT_MIB": "3276",
}
#: Waits until torch has another limit on its first device than this, and tells those of all.
AWAIT = "import time\nwhile torch.cuda.fractions[0] == {}: time.sleep(0.01)\nprint(torch.cuda.fractions)"


class Pipe:
    """What a kernel's launcher writes to it."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "changes")
        self.environment = {**NO_BURST, "GPU_POOL_RESIZE_DIR": str(folder), "PYTHONPATH": str(folder)}
        self._pipe = os.open(folder / "changes", os.O_RDWR | os.O_NONBLOCK)

    def write(self, line: bytes) -> None:
        os.write(self._pipe, line)

    def change(self, before: str, now: str, allowed: int) -> None:
        changed = {
            "GPU_POOL_TORCH_FRACTION": [before, now],
            "GPU_POOL_ALLOWED_MIB": ["", str(allowed)],
        }
        self.write(json.dumps(changed).encode() + b"\n")

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    write_torch(tmp_path)
    pipe = Pipe(tmp_path)
    yield pipe
    pipe.close()


async def said(kernel: Kernel, code: str) -> str:
    outputs = await kernel.run(code)
    assert (outputs.error, outputs.stderr) == (None, "")
    return outputs.stdout


async def test_torchs_limit_is_raised_and_lowered_while_a_cell_runs(start: Start, pipe: Pipe) -> None:
    kernel = await start(environment=pipe.environment)
    assert (
        await said(kernel, "import torch; torch.cuda.init(); print(torch.cuda.fractions)")
        == "{0: 0.007, 1: 0.007}\n"
    )
    # Told as the cell begins, or before: it waits for it in the middle.
    pipe.change("0.007", "0.05", 2048)
    assert await said(kernel, AWAIT.format(0.007)) == "{0: 0.05, 1: 0.05}\n"
    told = (await kernel.run("%gpu")).result["text/plain"]
    assert "Slice     2%, up to 10%\n" in told
    assert "655 MiB granted, now up to 2 GiB" in told
    pipe.change("0.05", "0.007", 655)
    assert await said(kernel, AWAIT.format(0.05)) == "{0: 0.007, 1: 0.007}\n"


async def test_a_torch_that_has_not_begun_begins_with_what_it_may_use_then(start: Start, pipe: Pipe) -> None:
    kernel = await start(environment=pipe.environment)
    await said(kernel, "import os, time, torch")
    pipe.change("0.007", "0.05", 2048)
    waits = "while os.environ['GPU_POOL_ALLOWED_MIB'] != '2048': time.sleep(0.01)\n"
    assert (
        await said(
            kernel, f"{waits}print(torch.cuda.fractions); torch.cuda.init(); print(torch.cuda.fractions)"
        )
        == "{}\n{0: 0.05, 1: 0.05}\n"
    )


async def test_a_limit_of_the_users_own_stands_where_torch_tells_it(
    start: Start, pipe: Pipe, tmp_path: Path
) -> None:
    with (tmp_path / "torch/cuda/__init__.py").open("a") as module:
        module.write("\ndef get_per_process_memory_fraction(device): return fractions[device]\n")
    kernel = await start(environment=pipe.environment)
    await said(kernel, "import torch; torch.cuda.set_per_process_memory_fraction(0.001, 1)")
    pipe.change("0.007", "0.05", 2048)
    assert await said(kernel, AWAIT.format(0.007)) == "{0: 0.05, 1: 0.001}\n"


async def test_what_torch_keeps_beyond_its_new_limit_for_later_is_let_go(
    start: Start, pipe: Pipe, tmp_path: Path
) -> None:
    with (tmp_path / "torch/cuda/__init__.py").open("a") as module:
        module.write(
            "\nimport types\nkept = [1000, 0]\n"
            "def memory_reserved(device): return kept[device]\n"
            "def get_device_properties(device): return types.SimpleNamespace(total_memory=32768)\n"
            "def empty_cache(): kept[:] = [100, 0]\n"
        )
    kernel = await start(environment=pipe.environment)
    await said(kernel, "import time, torch; torch.cuda.init()")
    pipe.change("0.007", "0.004", 600)
    assert await said(kernel, "while torch.cuda.kept[0] == 1000: time.sleep(0.01)\nprint('let go')")


async def test_memory_that_runs_out_at_the_lowered_limit_says_why_and_what_to_do(
    start: Start, pipe: Pipe
) -> None:
    kernel = await start(environment=pipe.environment)
    await said(
        kernel,
        "import torch\n"
        "class OutOfMemoryError(RuntimeError): __module__ = 'torch.cuda'\n"
        "def full(): raise OutOfMemoryError('CUDA out of memory.')",
    )
    told = (await kernel.run("full()")).stderr
    assert (
        "slice is 2%..10%, with 655 MiB of memory. It may use up to 3.2 GiB while nobody else needs" in told
    )
    assert "and 655 MiB now. Delete what you do not need (in PyTorch, then torch.cuda.empty_cache())" in told
    pipe.change("0.007", "0.1", 3276)
    await said(
        kernel, "import os, time\nwhile os.environ['GPU_POOL_ALLOWED_MIB'] != '3276': time.sleep(0.01)"
    )
    assert "It may use up to 3.2 GiB now, and never more." in (await kernel.run("full()")).stderr


async def test_what_is_no_message_and_a_launcher_that_ends_do_no_harm(start: Start, pipe: Pipe) -> None:
    kernel = await start(environment=pipe.environment)
    threads = (
        "import threading, time\n"
        "while 'gpu-pool-burst' in [t.name for t in threading.enumerate()]: time.sleep(0.01)\n"
        "print('alone')"
    )
    pipe.write(b"{\n")
    assert await said(kernel, threads) == "alone\n"


async def test_a_kernel_whose_slice_has_no_limit_has_no_thread_of_ours(start: Start) -> None:
    kernel = await start()
    code = "import sys, threading; print([t.name for t in threading.enumerate() if 'gpu-pool' in t.name])"
    assert await said(kernel, code) == "[]\n"
    assert await said(kernel, "print('_gpu_pool_inkernel.burst' in sys.modules)") == "False\n"
