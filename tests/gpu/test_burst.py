"""Memory on top of a slice of a real GPU: what a kernel may allocate, and what it gives back.

Not seen on hardware yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from jupyter_client.manager import start_new_async_kernel

from gpu_pool_client import Holder, connect, parse_request

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

#: Waits until torch may have more, or less, than so many MiB in all, and says how much it could allocate.
FILL = """
import os, time, torch
torch.ones(1, device="cuda")
while not {wanted}: time.sleep(0.05)
while abs(torch.cuda.get_per_process_memory_fraction() - float(os.environ["GPU_POOL_TORCH_FRACTION"])) > 1e-4:
    time.sleep(0.05)
held = []
try:
    while True:
        held.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    print(len(held) * 32, os.environ["GPU_POOL_MEMORY_MIB"], os.environ["GPU_POOL_LIMIT_MIB"])
del held
"""
ALLOWED = "int(os.environ['GPU_POOL_ALLOWED_MIB'])"
MORE = FILL.format(wanted=f"{ALLOWED} == int(os.environ['GPU_POOL_LIMIT_MIB'])")
#: What it has allocated goes back to torch, and from there to the GPU, by our thread alone.
LESS = FILL.format(wanted=f"{ALLOWED} == int(os.environ['GPU_POOL_MEMORY_MIB'])")


async def cell(client: Any, code: str) -> list[int]:
    shown: list[str] = []

    def show(message: dict[str, Any]) -> None:
        shown.append(message["content"].get("text", ""))

    await client.execute_interactive(code, output_hook=show, timeout=180)
    return [int(word) for word in "".join(shown).split()]


async def allocated(name: str) -> tuple[list[int], list[int], list[int]]:
    """Return what could be allocated with a burst, once it was granted to others, and after that."""
    manager, client = await start_new_async_kernel(kernel_name=name, startup_timeout=120)
    pool = connect()
    try:
        first = await cell(client, MORE)
        running = asyncio.create_task(cell(client, LESS))
        newcomer = await pool.request(parse_request("90%"), Holder("newcomer"), "newcomer")
        second = await running
        await pool.release(newcomer.id)
        return first, second, await cell(client, MORE)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def test_torch_may_allocate_its_burst_and_in_a_cell_that_runs_no_more_once_it_is_granted(
    install: Callable[..., str],
) -> None:
    burst, taken_back, again = asyncio.run(allocated(install("10%..50%")))
    for (found, granted, limit), most in ((burst, burst[2]), (taken_back, taken_back[1]), (again, again[2])):
        assert most * 0.5 < found <= most
        assert granted < limit
