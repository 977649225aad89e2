"""What is found on real hardware, against nvidia-smi and against CUDA itself."""

import os
import re
import subprocess
import sys

import pytest

from gpu_pool.devices import Inventory, discover

pytestmark = pytest.mark.gpu

#: Prints the bytes of memory of the one device that CUDA sees.
CUDA_MEMORY = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, device, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert count.value == 1, count
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0
print(total.value)
"""


@pytest.fixture(scope="module")
def found() -> Inventory:
    inventory = discover({})
    if not inventory.devices:
        pytest.skip(f"no GPU: {inventory.problems[0]}")
    return inventory


def smi(*arguments: str) -> str:
    return subprocess.check_output(["nvidia-smi", *arguments], text=True)


def test_gpus_are_those_of_nvidia_smi(found: Inventory) -> None:
    fields = "--query-gpu=index,uuid,name,driver_version,mig.mode.current"
    rows = [row.split(", ") for row in smi(fields, "--format=csv,noheader").splitlines()]
    listed = [tuple(told) for *told, mig in rows if mig != "Enabled"]
    gpus = [device for device in found.devices if device.mig_profile is None]
    assert [(str(gpu.index), gpu.uuid, gpu.model, gpu.driver) for gpu in gpus] == listed


def test_mig_instances_are_those_of_nvidia_smi(found: Inventory) -> None:
    listed = re.findall(r"MIG (\S+) .*UUID: (MIG-[^)]+)\)", smi("-L"))
    instances = [device for device in found.devices if device.mig_profile is not None]
    assert [(instance.mig_profile, instance.uuid) for instance in instances] == listed


def test_cuda_finds_each_device_by_its_uuid_with_about_the_memory_told(found: Inventory) -> None:
    for device in found.devices:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid}
        total = int(subprocess.check_output([sys.executable, "-c", CUDA_MEMORY], env=environ))
        assert device.memory_mib == pytest.approx(total / 2**20, abs=64)
