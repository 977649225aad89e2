"""GPUs whose compute mode admits one process, or none: who waits reads it, and what puts it right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import nvml_stub
from support.terminal import Terminal, eventually

GPU = "gpu GPU-{0} NVIDIA A100-SXM4-40GB\nmemory 40960 500\ncores 6912 8 0\n"
EXCLUSIVE, PROHIBITED = "mode 3\n", "mode 2\n"


@pytest.fixture
def machine(terminal: Terminal) -> nvml_stub.Machine:
    (terminal.folder / "nvml").mkdir()
    found = nvml_stub.Machine(terminal.folder / "nvml")
    # No nvidia-smi: the driver's library knows the modes, too.
    terminal.environment.update(found.environment)
    return found


def waiting(terminal: Terminal) -> list[Any]:
    queue = json.loads(terminal.run("status", "--json").stdout)["queue"]
    assert isinstance(queue, list)
    return queue


def said(terminal: Terminal, verb: str) -> str:
    return " ".join(terminal.run(verb).stdout.split())


def test_a_gpu_that_admits_one_process_has_one_slice_at_a_time_and_the_next_reads_why(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show(GPU.format("a") + EXCLUSIVE)
    first = terminal.start("run", "10%", "--", "sh", "-c", "echo it runs; read x")
    assert first.stdout is not None
    assert first.stdout.readline() == "it runs\n"
    second = terminal.start("run", "10%", "--", "echo", "it runs, too")
    eventually(lambda: bool(waiting(terminal)))
    assert (
        "GPU 0 is in compute mode Exclusive_Process, which admits one process at a time, and another has it. "
        "The administrator can let kernels share it: sudo nvidia-smi -i GPU-a -c DEFAULT"
    ) in said(terminal, "why")
    told, _ = first.communicate("\n", timeout=120)
    assert (told, first.returncode) == ("", 0)
    assert second.communicate(timeout=120)[0] == "it runs, too\n"


@pytest.mark.long
def test_with_room_on_another_gpu_nobody_waits_for_one_that_admits_one_process(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show(GPU.format("a") + EXCLUSIVE + GPU.format("b"))
    assert terminal.run("request", "10% index=0").returncode == 0
    held = json.loads(terminal.run("request", "10%", "--json").stdout)
    assert [part["device"] for part in held["slices"]] == ["GPU-b"]


@pytest.mark.long
def test_the_doctor_names_a_gpu_that_admits_one_process_with_the_command(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show(GPU.format("a") + EXCLUSIVE + GPU.format("b"))
    found = said(terminal, "doctor")
    assert (
        "broken compute mode: GPU 0 is Exclusive_Process: it admits one process at a time, and kernels "
        "cannot share it -> sudo nvidia-smi -i GPU-a -c DEFAULT"
    ) in found
    assert "compute mode: GPU 1" not in found


def test_a_gpu_that_admits_nobody_is_left_out_with_the_command(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    sentence = (
        "GPU 0 is left out: its compute mode is Prohibited, so nothing may use it. "
        "Allow it: sudo nvidia-smi -i GPU-a -c DEFAULT"
    )
    machine.show(GPU.format("a") + PROHIBITED + GPU.format("b"))
    assert f"note gpus: {sentence}" in said(terminal, "doctor")
    devices = json.loads(terminal.run("list", "--json").stdout)["devices"]
    assert [device["uuid"] for device in devices] == ["GPU-b"]
    assert terminal.run("request", "10% index=0").returncode == 3


def test_a_machine_whose_only_gpu_admits_nobody_says_so(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show(GPU.format("a") + PROHIBITED)
    assert "its compute mode is Prohibited, so nothing may use it." in said(terminal, "doctor")
    refused = terminal.run("run", "10%", "--", "true")
    assert refused.returncode == 3
    assert "Allow it: sudo nvidia-smi -i GPU-a -c DEFAULT" in " ".join(refused.stderr.split())
