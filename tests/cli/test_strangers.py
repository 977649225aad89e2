"""What ``doctor`` says of processes that use a GPU without a lease."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_pool.inventory.use import FIRST_NAMESPACE
from gpu_pool_client.processes import pid_namespace
from support import nvml_stub
from support.pools import running
from support.terminal import Terminal


@pytest.mark.skipif(
    pid_namespace() != FIRST_NAMESPACE, reason="in a container the driver's pids mean nothing"
)
def test_the_doctor_names_them_and_not_those_on_a_slice(terminal: Terminal, tmp_path: Path) -> None:
    nvml_stub.build(tmp_path)
    scenario = tmp_path / "scenario.txt"
    scenario.write_text("driver 550.54.14\ngpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 258\n")
    stub = {"LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB_SCENARIO": str(scenario), "GPU_POOL_DEVICES": ""}
    terminal.environment.update(stub)
    holding = terminal.start("run", "10%", "--", "sh", "-c", "echo $$; exec sleep 600")
    assert holding.stdout is not None
    mine = int(holding.stdout.readline())
    with running() as stranger:
        draft = tmp_path / "draft.txt"
        draft.write_text(f"{scenario.read_text()}process {mine} 300\nprocess {stranger.pid} 1024\n")
        draft.replace(scenario)
        checks = json.loads(terminal.run("doctor", "--json").stdout)["checks"]
    [note] = [check for check in checks if check["name"] == "strangers"]
    assert note["text"].startswith(f"Process {stranger.pid} (")
    assert "uses 1GiB of the memory of GPU 0 and holds no lease there" in note["text"]
    assert "gpu-pool run" in note["mend"]
