"""Modules that ask for GPUs as they are imported, and kernels that are warm all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.devices.activity import environment_of
from support.compiled import shared_library
from support.jupyter_env import Managers, answer
from support.warm_kernels import Spec, start, the_template, until_ready

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("soon")]

#: Opens a file for as long as anybody needs it, as NVML does the driver's.
NVML = """
#include <fcntl.h>
#include <unistd.h>
static int users, file;
int nvmlInit_v2(void) { if (!users++) file = open("/dev/null", O_RDONLY); return 0; }
int nvmlShutdown(void) { if (!users) return 1; if (!--users) close(file); return 0; }
"""
#: What PyTorch is asked by modules as they are imported.
TORCH = """
import ctypes, os
class default_generator:
    seed = staticmethod(lambda: None)
    initial_seed = staticmethod(lambda: 1 << 60)
def is_available():
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
        return ctypes.CDLL("{folder}/libnvidia-ml.so.1").nvmlInit_v2() == 0
    global driver
    driver = os.open("/dev/null", os.O_RDWR)
"""
ASKING = "import torch\nfound = torch.is_available(), torch.is_available()\n"
PYNVML = "import ctypes\n_nvmlLib_refcount = 1\nctypes.CDLL('{folder}/libnvidia-ml.so.1').nvmlInit_v2()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "nvml.c"
    source.write_text(NVML)
    return shared_library(tmp_path, "libnvidia-ml.so.1", source)


async def test_a_module_that_asks_pytorch_for_gpus_asks_nvml_which_is_closed_again(
    spec: Spec, manager: Managers, folder: Path
) -> None:
    name = spec("asking", asking=ASKING, torch=TORCH.format(folder=folder))
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    code = (
        "import asking, ctypes, os\n"
        f"nvml = ctypes.CDLL('{folder}/libnvidia-ml.so.1')\n"
        "print(asking.found, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))\n"
        "print(nvml.nvmlShutdown(), nvml.nvmlInit_v2(), nvml.nvmlShutdown())\n"
    )
    assert await answer(km, code) == "(True, True) None\n1 0 0\n"
    shown = environment_of(km.provisioner.pid)
    assert not [each for each in shown if each.startswith(b"PYTORCH")]


async def test_nvml_is_left_to_a_module_that_uses_it_itself(
    spec: Spec, manager: Managers, folder: Path
) -> None:
    name = spec("torch", "pynvml", torch=TORCH.format(folder=folder), pynvml=PYNVML.format(folder=folder))
    assert not await start(manager(name))
    template = await the_template()
    assert "have opened /dev/null (first seen when pynvml was imported)" in template.refusal


async def test_another_module_of_pytorch_s_name_is_a_doubt_and_no_end_of_the_template(
    spec: Spec, manager: Managers
) -> None:
    assert not await start(manager(spec("torch", torch="pi = 3\n")))
    template = await the_template()
    assert "not known if the preloaded modules have given PyTorch a seed" in template.refusal
