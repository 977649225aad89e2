"""Many kernels at once, through the manager that Jupyter Server uses."""

from __future__ import annotations

import asyncio

import pytest
from jupyter_client.multikernelmanager import AsyncMultiKernelManager

from support.jupyter_env import JupyterEnv, answer


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_kernels_started_at_once_all_answer(jupyter_env: JupyterEnv, count: int) -> None:
    kernel = jupyter_env.install("two", ready_timeout=300)
    many = AsyncMultiKernelManager()
    try:
        ids = await asyncio.gather(*(many.start_kernel(kernel_name=kernel) for _ in range(count)))
        managers = [many.get_kernel(kernel_id) for kernel_id in ids]
        assert len(await jupyter_env.leases()) == count
        printed = await asyncio.gather(*(answer(each, "print(6 * 7)", within=300) for each in managers))
        assert printed == ["42\n"] * count
    finally:
        await many.shutdown_all(now=True)
        many.context.destroy(linger=0)
    assert await jupyter_env.is_empty()
