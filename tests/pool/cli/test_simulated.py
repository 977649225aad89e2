"""Simulated GPUs in a terminal: how they are told, and how they go."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support import nvml_stub
from support.terminal import Terminal

NO_VARIABLE = {"GPU_POOL_DEVICES": ""}


@pytest.fixture
def with_gpu(tmp_path: Path) -> dict[str, str]:
    """Return what lets a program find a real GPU, unless GPU_POOL_DEVICES says otherwise."""
    scenario = tmp_path / "scenario.txt"
    scenario.write_text("driver 550.54.14\ngpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 258\n")
    return {"LD_LIBRARY_PATH": str(nvml_stub.complete()), "NVML_STUB_SCENARIO": str(scenario)}


def checks(terminal: Terminal, name: str, **environment: str) -> list[dict[str, str]]:
    found = json.loads(terminal.run("doctor", "--json", env=environment).stdout)["checks"]
    return [check for check in found if check["name"] == name]


def running(terminal: Terminal) -> subprocess.Popen[str]:
    """Start a command that holds a simulated slice until its standard input closes."""
    program = terminal.start("run", "-q", "10%", "--", "sh", "-c", "echo ready; cat")
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    return program


def test_without_the_variable_they_last_for_as_long_as_somebody_uses_them(terminal: Terminal) -> None:
    program = running(terminal)
    assert "(simulated)" in terminal.run("list", env=NO_VARIABLE).stdout
    note = checks(terminal, "devices", **NO_VARIABLE)[1]
    assert "still run, or by leases (gpu-pool status). Once those have ended" in note["remedy"]
    program.communicate()
    assert "This pool has no GPU" in terminal.run("list", env=NO_VARIABLE).stdout
    assert "released" in terminal.run("history", env=NO_VARIABLE).stdout


def test_the_doctor_tells_whose_they_are_and_of_real_ones_behind_them(
    terminal: Terminal, with_gpu: dict[str, str]
) -> None:
    [_, note] = checks(terminal, "devices")
    assert note["remedy"].startswith("To use real GPUs, unset GPU_POOL_DEVICES here and wherever Jupyter")
    [_, hidden] = checks(terminal, "gpus", **with_gpu)
    assert hidden["text"].endswith("but not used: Tesla V100-SXM2-32GB")
    assert hidden["remedy"] == "To use the real GPUs, unset GPU_POOL_DEVICES."


def test_a_real_gpu_takes_their_place_once_nothing_holds_them(
    terminal: Terminal, with_gpu: dict[str, str]
) -> None:
    program = running(terminal)
    now = {**with_gpu, **NO_VARIABLE}
    listed = terminal.run("list", "-d", env=now)
    assert (listed.returncode, "sh" in listed.stdout) == (0, True), "what holds them can be found"
    assert "in use for V100-SXM2-32GB (simulated) (1 lease)" in listed.stderr
    refused = terminal.run("run", "2%", "--", "true", env=now)
    assert refused.returncode == 7
    assert "Simulated and real GPUs are never in one pool" in refused.stderr
    [broken] = checks(terminal, "pool", **now)
    assert (broken["state"], "gpu-pool release ID" in broken["text"]) == ("broken", True)
    program.communicate()
    done = terminal.run("run", "2%", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", env=now)
    assert done.stdout == "GPU-0\n"
    assert "simulated" not in terminal.run("list", env=now).stdout
    assert terminal.run("list").returncode == 7, "nor do simulated ones replace real ones"
