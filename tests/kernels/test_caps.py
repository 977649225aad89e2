"""Limits that are set as torch and TensorFlow are imported, in real kernels with stand-ins for the two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpu_pool_kernels.inkernel import caps, extension
from support.frameworks import write_tensorflow, write_torch

from .conftest import SLICE, Kernel, Start

LIMITS = {"GPU_POOL_TORCH_FRACTION": "0.25", "GPU_POOL_TENSORFLOW_MIB": "355"}
FRACTIONS = "torch.cuda.init(); print(torch.cuda.fractions)"
BOTH = "{0: 0.25, 1: 0.25}\n"
#: Rarer ways of importing torch.
IMPORTS = (
    "from torch.cuda import memory",
    "import threading; t = threading.Thread(target=__import__, args=['torch']); t.start(); t.join()",
    "import torch, importlib; importlib.reload(torch); importlib.reload(torch.cuda)",
    "import importlib.util; importlib.util.find_spec('torch.cuda')",
    "import sys, torch; del sys.modules['torch'], sys.modules['torch.cuda'], torch",
)

Begin = Callable[[], Awaitable[Kernel]]


@pytest.fixture
def begin(start: Start, tmp_path: Path) -> Begin:
    """Start a kernel on limits, with the stand-ins, which lie at ``tmp_path``."""
    write_torch(tmp_path)
    write_tensorflow(tmp_path)

    async def begin() -> Kernel:
        return await start(environment={**SLICE, **LIMITS, "PYTHONPATH": str(tmp_path)})

    return begin


async def said(kernel: Kernel, code: str) -> str:
    """Run code that is to write nothing on stderr; return what it prints."""
    outputs = await kernel.run(code)
    assert (outputs.error, outputs.stderr) == (None, "")
    return outputs.stdout


def test_the_limits_are_looked_after_where_any_of_them_is_set() -> None:
    assert set(extension.LIMIT_VARIABLES) == set(caps.VARIABLES.values())


async def test_torch_is_limited_when_it_initialises_cuda_and_not_before(begin: Begin) -> None:
    kernel = await begin()
    assert await said(kernel, "import sys; print('torch' in sys.modules)") == "False\n"
    assert (
        await said(kernel, "import torch; print(torch.cuda.is_initialized(), torch.cuda.fractions)")
        == "False {}\n"
    )
    assert await said(kernel, FRACTIONS) == BOTH
    assert (
        await said(kernel, "print(type(torch.cuda.__loader__), type(torch.cuda.__spec__.loader))")
        == ("<class '_frozen_importlib_external.SourceFileLoader'> " * 2).rstrip() + "\n"
    )


@pytest.mark.parametrize(
    "code",
    ["import torch.nn", *(pytest.param(code, marks=pytest.mark.long) for code in IMPORTS)],
)
async def test_however_torch_is_imported(begin: Begin, code: str) -> None:
    kernel = await begin()
    await said(kernel, code)
    assert await said(kernel, f"import torch; {FRACTIONS}") == BOTH


async def test_an_import_that_fails_is_torchs_own_and_the_next_one_is_limited(
    begin: Begin, tmp_path: Path
) -> None:
    module = tmp_path / "torch/cuda/__init__.py"
    text = module.read_text()
    module.write_text(f"raise OSError('libcudart.so.11.0: cannot open')\n{text}")
    kernel = await begin()
    outputs = await kernel.run("import torch")
    assert (outputs.error, outputs.stderr) == ("OSError", "")
    module.write_text(text)
    assert await said(kernel, f"import torch; {FRACTIONS}") == BOTH


async def test_finders_that_ask_each_other_still_find(begin: Begin) -> None:
    kernel = await begin()
    nosy = (
        "import sys\n"
        "class Nosy:\n"
        "    def find_spec(self, *args):\n"
        "        found = [each.find_spec(*args) for each in sys.meta_path if each is not self]\n"
        "        return next(filter(None, found), None)\n"
        "sys.meta_path.insert(0, Nosy())\n"
    )
    assert await said(kernel, f"{nosy}import torch; {FRACTIONS}") == BOTH


async def test_what_the_user_sets_stands(begin: Begin) -> None:
    kernel = await begin()
    await said(kernel, "import torch; torch.cuda.set_per_process_memory_fraction(0.5, 0)")
    assert await said(kernel, FRACTIONS) == "{0: 0.5, 1: 0.25}\n"


@pytest.mark.parametrize(
    ("gone", "why"),
    [("_lazy_call", "AttributeError: "), ("set_per_process_memory_fraction", "AttributeError: ")],
)
async def test_a_torch_that_cannot_be_limited_works_and_that_is_said_once(
    begin: Begin, tmp_path: Path, gone: str, why: str
) -> None:
    with (tmp_path / "torch/cuda/__init__.py").open("a") as module:
        module.write(f"\ndel {gone}\n")
    kernel = await begin()
    outputs = await kernel.run("import torch; torch.cuda.init(); print(torch.cuda.is_initialized())")
    assert (outputs.error, outputs.stdout) == (None, "True\n")
    (line,) = outputs.stderr.splitlines()
    assert line.startswith(f"gpu-pool: torch gets no memory limit in this kernel ({why}")
    assert line.endswith("Keep it within your slice: others have the rest of this GPU.")
    assert f"No limit  torch: {why}" in (await kernel.run("%gpu")).result["text/plain"]


TF = "import tensorflow as tf; gpus = tf.context.devices; "
USED = "tf.constant(1); print(tf.context.initialised_with)"


async def test_tensorflow_is_limited_when_it_begins_to_use_the_gpu(begin: Begin) -> None:
    kernel = await begin()
    assert await said(kernel, f"{TF}print(tf.context.listed)") == "False\n"
    assert await said(kernel, USED) == "{'GPU:0': [355], 'GPU:1': [355]}\n"
    assert await said(kernel, "print(type(tf.context).ensure_initialized.__qualname__)") == (
        "Context.ensure_initialized\n"
    )


async def test_a_cell_that_lets_memory_grow_may_be_run_again(begin: Begin) -> None:
    kernel = await begin()
    grow = f"{TF}[tf.context.set_memory_growth(gpu, True) for gpu in gpus]; {USED}"
    for _ in range(2):
        assert await said(kernel, grow) == "{'GPU:0': [355], 'GPU:1': [355]}\n"


@pytest.mark.parametrize(
    ("theirs", "limits"),
    [
        ("tf.context.set_logical_device_configuration(gpus[1], [LDC(100), LDC(50)])", [[355], [100, 50]]),
        ("tf.context.fraction = 0.1", [[], []]),
    ],
)
async def test_what_the_user_has_set_for_tensorflow_stands(
    begin: Begin, theirs: str, limits: list[list[int]]
) -> None:
    kernel = await begin()
    await said(kernel, f"{TF}LDC = tf._module.LogicalDeviceConfiguration; {theirs}")
    assert await said(kernel, USED) == f"{ {'GPU:0': limits[0], 'GPU:1': limits[1]} }\n"


async def test_threads_that_use_tensorflow_at_once_set_the_limit_once(begin: Begin) -> None:
    kernel = await begin()
    # The first is held up until the second waits for it.
    at_once = (
        "\nimport sys, threading, time\n"
        "go, listed = threading.Event(), tf.context.get_visible_devices\n"
        "tf.context.get_visible_devices = lambda kind: go.wait() and listed(kind)\n"
        "threads = [threading.Thread(target=tf.constant, args=[1]) for _ in range(2)]\n"
        "for t in threads: t.start()\n"
        "def at(): return [frame.f_code.co_name for frame in sys._current_frames().values()]\n"
        "while 'ensure_initialized' not in at(): time.sleep(0.01)\n"
        "go.set()\n"
        "for t in threads: t.join()\n"
    )
    assert await said(kernel, f"{TF}{at_once}{USED}") == "{'GPU:0': [355], 'GPU:1': [355]}\n"


async def test_a_tensorflow_that_fails_to_initialise_is_limited_at_its_next_try(begin: Begin) -> None:
    kernel = await begin()
    fails = f"{TF}tf.context.visible = None; tf.context.get_visible_devices = lambda kind: gpus"
    await said(kernel, fails)
    assert (await kernel.run(USED)).error == "TypeError"
    assert await said(kernel, f"tf.context.visible = gpus; {USED}") == "{'GPU:0': [355], 'GPU:1': [355]}\n"


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        ("LogicalDeviceConfiguration", "AttributeError: module"),
        ("Context.ensure_initialized", "AttributeError: type object"),
    ],
)
async def test_a_tensorflow_that_cannot_be_limited_works_and_that_is_said_once(
    begin: Begin, tmp_path: Path, gone: str, why: str
) -> None:
    with (tmp_path / "tensorflow/python/eager/context.py").open("a") as module:
        module.write(f"\ndel {gone}\n")
    kernel = await begin()
    outputs = await kernel.run("import tensorflow as tf; getattr(tf.context, 'ensure_initialized', list)()")
    assert outputs.error is None
    (line,) = outputs.stderr.splitlines()
    assert line.startswith(f"gpu-pool: tensorflow gets no memory limit in this kernel ({why}")
