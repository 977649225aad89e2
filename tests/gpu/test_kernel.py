"""A kernel of Jupyter on a slice of a real GPU, through the provisioner."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

FILL = """
import torch
held = []
while True:
    held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
"""


async def run_cells(name: str, *cells: str) -> list[tuple[dict[str, Any], str]]:
    """Run cells in one kernel; return each one's reply and what it printed, errors included."""
    from jupyter_client.manager import start_new_async_kernel

    manager, client = await start_new_async_kernel(kernel_name=name, startup_timeout=120)
    found: list[tuple[dict[str, Any], str]] = []
    try:
        for cell in cells:
            shown: list[str] = []

            def show(message: dict[str, Any], shown: list[str] = shown) -> None:
                content = message["content"]
                shown += [content.get("text", ""), *content.get("traceback", [])]
                shown.append(content.get("data", {}).get("text/plain", ""))

            reply = await client.execute_interactive(cell, output_hook=show, timeout=180)
            found.append((reply["content"], "\n".join(shown)))
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return found


def test_a_cell_past_the_slice_fails_with_a_word_on_it_and_the_kernel_goes_on(
    install: Callable[..., str],
) -> None:
    after = "held.clear(); torch.cuda.empty_cache(); torch.ones(3, device='cuda').sum()"
    failed, magic, last = asyncio.run(run_cells(install("2%"), FILL, "%gpu", after))
    if re.search(r"memory: [^;]*, none \(", magic[1]):
        pytest.skip("nothing holds memory here: this PyTorch takes no cap by environment")
    assert failed[0]["ename"] == "OutOfMemoryError"
    assert "this kernel's slice is 2%" in failed[1]
    assert last[0]["status"] == "ok"
