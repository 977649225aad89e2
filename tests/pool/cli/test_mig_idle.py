"""A kernel on a MIG instance, of which nobody can see whether it computes, is idle all the same."""

from __future__ import annotations

import pytest

from support import nvml_stub
from support.terminal import Terminal

MIG = """gpu GPU-a NVIDIA A100-SXM4-40GB
memory 40960 571
mig 7
instance MIG-1 NVIDIA A100-SXM4-40GB MIG 1g.5gb
memory 4864 0
"""
#: Starts the kernel of that name, lets it open what stands for CUDA's device, and says how its lease ended.
KERNEL = """
import asyncio, os, sys
from jupyter_client.manager import start_new_async_kernel
from gpu_pool.settings import PoolSettings
from gpu_pool_client import connect

name, cuda = sys.argv[1:]
PoolSettings.tuning.default_kwargs = {"cuda_device": cuda}

async def main():
    manager, client = await start_new_async_kernel(kernel_name=name, startup_timeout=120)
    await client.execute_interactive(f"kept = open({cuda!r})", timeout=120)
    async with connect(os.environ["GPU_POOL_URL"]) as pool:
        while (await pool.status()).leases:
            await asyncio.sleep(0.2)
        print([each.reason for each in await pool.history()])
    client.stop_channels()
    await manager.shutdown_kernel(now=True)

asyncio.run(asyncio.wait_for(main(), 120))
"""


@pytest.mark.long
def test_a_kernel_that_has_used_cuda_on_a_mig_instance_ends_when_nothing_is_submitted(
    terminal: Terminal,
) -> None:
    (terminal.folder / "nvml").mkdir()
    terminal.environment.update(nvml_stub.Machine(terminal.folder / "nvml", MIG).environment)
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir()
    terms = {"idle_limit": "2s", "when_idle": "end", "warn_before": "1s"}
    config.write_text(f"c.PoolSettings.default_course = {terms!r}\n")
    uvm = terminal.folder / "nvidia-uvm"
    uvm.touch()
    assert terminal.run("kernels", "install", "1GiB", "--user").returncode == 0
    name = next((terminal.folder / "data/kernels").iterdir()).name
    done = terminal.call("python", "-c", KERNEL, name, str(uvm))
    assert done.stdout == "['idle']\n", done.stderr
