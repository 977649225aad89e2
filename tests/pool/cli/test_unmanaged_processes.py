"""What ``doctor`` says of processes that use a GPU without a lease."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gpu_pool.devices.sampling import FIRST_NAMESPACE
from gpu_pool_client._processes import pid_namespace
from support import nvml_stub
from support.pools import running
from support.terminal import Terminal

pytestmark = pytest.mark.skipif(
    pid_namespace() != FIRST_NAMESPACE, reason="in a container the driver's pids mean nothing"
)


@pytest.fixture
def scenario(terminal: Terminal, tmp_path: Path) -> Path:
    """Let the terminal's programs find one V100, which does what this file says."""
    scenario = tmp_path / "scenario.txt"
    scenario.write_text("driver 550.54.14\ngpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 258\n")
    library = str(nvml_stub.complete())
    terminal.environment.update(
        LD_LIBRARY_PATH=library, NVML_STUB_SCENARIO=str(scenario), GPU_POOL_DEVICES=""
    )
    return scenario


def unmanaged(terminal: Terminal, scenario: Path, using: str) -> list[dict[str, str]]:
    """Return what the doctor says of unmanaged processes when these processes use the GPU, too."""
    draft = scenario.with_suffix(".draft")
    draft.write_text(scenario.read_text() + using)
    draft.replace(scenario)
    checks = json.loads(terminal.run("doctor", "--json").stdout)["checks"]
    return [check for check in checks if check["name"] == "unmanaged processes"]


def test_what_a_command_leaves_on_the_gpu_is_named_and_the_slice_is_back_once(
    terminal: Terminal, scenario: Path
) -> None:
    done = terminal.run("run", "1", "--", "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!")
    left = int(done.stdout)
    try:
        [note] = unmanaged(terminal, scenario, f"process {left} 1024\n")
        assert note["text"].startswith(f"Process {left} (")
        assert terminal.run("run", "1", "--", "echo", "next").stdout == "next\n"
        ended = list(map(json.loads, terminal.run("history", "--json").stdout.splitlines()))
        assert len({each["id"] for each in ended}) == len(ended) == 2
    finally:
        os.kill(left, signal.SIGKILL)


@pytest.mark.long
def test_the_doctor_names_them_and_not_those_on_a_slice(terminal: Terminal, scenario: Path) -> None:
    holding = terminal.start("run", "10%", "--", "sh", "-c", "echo $$; exec sleep 600")
    assert holding.stdout is not None
    mine = int(holding.stdout.readline())
    with running() as process:
        [note] = unmanaged(terminal, scenario, f"process {mine} 300\nprocess {process.pid} 1024\n")
    assert note["text"].startswith(f"Process {process.pid} (")
    assert "uses 1GiB of the memory of GPU 0 and holds no lease there" in note["text"]
    assert "gpu-pool run" in note["remedy"]
