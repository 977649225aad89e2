"""What ``doctor`` says of moving what idle kernels keep on a GPU to host memory."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint import Checkpoint, folder_beside
from gpu_pool.settings import PoolSettings
from support import nvml_stub
from support.cuda_stub import Driver
from support.terminal import Terminal

GPU = "gpu GPU-{0} NVIDIA H100 80GB HBM3\nmemory 81559 500\ncores 16896 9 0\n"
MIG = GPU.format("b") + "mig 7\ninstance MIG-1 NVIDIA H100 80GB HBM3 MIG 1g.10gb\nmemory 9856 0\n"


@pytest.fixture
def machine(terminal: Terminal, driver: Driver, cuda_libraries: Path) -> nvml_stub.Machine:
    (terminal.folder / "nvml").mkdir()
    found = nvml_stub.Machine(terminal.folder / "nvml")
    terminal.environment.update(found.environment)
    # NVML says what GPUs there are; CUDA is asked whether it can checkpoint.
    terminal.environment["LD_LIBRARY_PATH"] += f":{cuda_libraries}"
    terminal.environment["DRIVER_STUB"] = str(driver.folder)
    return found


def configure(terminal: Terminal, *lines: str) -> None:
    path = terminal.folder / "config/gpu_pool_config.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"c.PoolSettings.{line}\n" for line in lines))


def told(terminal: Terminal) -> list[tuple[str, str, str]]:
    checks = json.loads(terminal.run("doctor", "--json").stdout)["checks"]
    return [(each["state"], each["text"], each["remedy"]) for each in checks if each["name"] == "checkpoint"]


def test_where_it_works_that_is_told(terminal: Terminal, machine: nvml_stub.Machine) -> None:
    machine.show("driver 580.95.05\n" + GPU.format("a") + GPU.format("b"))
    configure(terminal, "checkpoint = 'on'", "checkpoint_host_mib = 2000")
    assert [(state, text) for state, text, _ in told(terminal)] == [
        ("ok", "GPU 0, 1: what idle kernels keep there can be moved to host memory"),
        ("ok", "0 of 2000 MiB of host memory for parked kernels are taken (parked: 0)"),
    ]


def test_how_much_host_memory_is_taken_is_told_and_noted_where_little_is_left(
    terminal: Terminal, machine: nvml_stub.Machine, driver: Driver
) -> None:
    machine.show("driver 580.95.05\n" + GPU.format("a"))
    configure(terminal, "checkpoint = 'on'", "checkpoint_host_mib = 1000")
    store = terminal.folder / "pool/store.db"
    settings = PoolSettings(checkpoint="on", checkpoint_host_mib=1000)
    with driver.process(950) as pid:
        with closing(Checkpoint(folder_beside(store), settings)) as pool:
            pool.suspend("l1", [pid], "GPU-1")
        _, (state, text, remedy) = told(terminal)
        assert (state, text.partition(": idle")[0]) == (
            "note",
            "950 of 1000 MiB of host memory for parked kernels are taken (parked: 1)",
        )
        assert "c.PoolSettings.checkpoint_host_mib" in remedy


def test_each_reason_is_told_with_what_to_do_for_each_kind_of_gpu(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show("driver 565.57.01\n" + GPU.format("a") + MIG)
    configure(terminal, "checkpoint = True", "checkpoint_host_mib = 1", "tier = 'mps'")
    found = told(terminal)
    assert {state for state, _, _ in found} == {"note"}
    assert all(remedy for _, _, remedy in found)
    whole = [text for _, text, _ in found if text.startswith("GPU 0:")]
    for why in ("570 or newer", "1 MiB of host memory", "c.PoolSettings.checkpoint_under_mps"):
        assert any(why in text for text in whole)
    assert any("GPU 1" in text and "MIG instance" in text for _, text, _ in found)


def test_what_the_driver_says_is_told(terminal: Terminal, machine: nvml_stub.Machine, driver: Driver) -> None:
    machine.show("driver 580.95.05\n" + GPU.format("a"))
    driver.scenario("absent")
    configure(terminal, "checkpoint = True")
    ((state, text, _),) = told(terminal)
    assert state == "note"
    assert "not found" in text


def test_what_is_not_known_to_work_is_tried_where_it_is_switched_on(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show("driver 610.43\n" + GPU.format("a"))
    ((state, text, remedy),) = told(terminal)
    assert (state, text.partition(", since ")[0]) == ("note", "GPU 0: an idle kernel keeps its slice")
    assert "c.PoolSettings.checkpoint = 'on'" in remedy
    configure(terminal, "checkpoint = 'on'")
    (ok, *_), (note, text, _), _ = told(terminal)
    assert (ok, note) == ("ok", "note")
    assert "it is tried as is set" in text


def test_that_it_is_off_is_told_where_there_are_gpus(terminal: Terminal, machine: nvml_stub.Machine) -> None:
    machine.show("driver 580.95.05\n" + GPU.format("a"))
    configure(terminal, "checkpoint = False")
    ((state, text, _),) = told(terminal)
    assert state == "ok"
    assert text.startswith("off (c.PoolSettings.checkpoint)")
    terminal.environment["GPU_POOL_DEVICES"] = "v100"
    assert told(terminal) == []
