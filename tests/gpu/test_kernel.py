"""A kernel of Jupyter on a slice of a real GPU, through the provisioner."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

FILL = """
import torch
held = []
while True:
    held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a kernel with 2% of the GPU, for this test alone."""
    missing = [name for name in ("jupyter_client", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not entry_points(group="jupyter_client.kernel_provisioners", name="gpu-pool"):
        pytest.skip("jupyter-gpu-pool runs from its sources: Jupyter finds no provisioner of that name")
    spec = tmp_path / "kernels" / "small"
    spec.mkdir(parents=True)
    provisioner = {"provisioner_name": "gpu-pool", "config": {"slice": "2%"}}
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    facts = {"argv": argv, "display_name": "small", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps({**facts, "metadata": {"kernel_provisioner": provisioner}}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("GPU_POOL_URL", f"embedded:{tmp_path}/store.db")


async def run_cells(*cells: str) -> list[tuple[dict[str, Any], str]]:
    """Run cells in one kernel; return each one's reply and what it printed, errors included."""
    from jupyter_client.manager import start_new_async_kernel

    manager, client = await start_new_async_kernel(kernel_name="small", startup_timeout=120)
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


def test_a_cell_past_the_slice_fails_with_a_word_on_it_and_the_kernel_goes_on(kernels: None) -> None:
    failed, magic, after = asyncio.run(
        run_cells(FILL, "%gpu", "held.clear(); torch.cuda.empty_cache(); torch.ones(3, device='cuda').sum()")
    )
    if re.search(r"memory: [^;]*, none \(", magic[1]):
        pytest.skip("nothing holds memory here: this PyTorch takes no cap by environment")
    assert failed[0]["ename"] == "OutOfMemoryError"
    assert "this kernel's slice is 2%" in failed[1]
    assert after[0]["status"] == "ok"
