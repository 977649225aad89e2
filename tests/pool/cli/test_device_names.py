"""``device_names = "index"``: kernels and commands that read integers from ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.cli.child import DockerContainer
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.machine import with_indices
from gpu_pool.enforcement.mps.classic import MpsTier
from gpu_pool.enforcement.tiers import Accounting
from gpu_pool_client import Holder, Process
from support import nvml_stub
from support.mps_stub import OTHER, V100, lease
from support.terminal import Terminal

A100 = "gpu GPU-{0} NVIDIA A100-SXM4-40GB\nmemory 40960 500\ncores 6912 8 0\n"
MIG = A100.format("b") + "mig 7\n"
INSTANCE = "instance MIG-{0} NVIDIA A100-SXM4-40GB MIG 1g.5gb\nmemory 4864 0\n"
ASK = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"
#: Starts the kernel of that name, and prints what a cell of it prints.
KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name=sys.argv[1], startup_timeout=120)
said = []
def hear(message):
    if message["header"]["msg_type"] == "stream":
        said.append(message["content"]["text"])
client.execute_interactive(sys.argv[2], output_hook=hear, timeout=120)
client.stop_channels()
manager.shutdown_kernel()
print("".join(said), end="")
"""


@pytest.fixture
def machine(terminal: Terminal) -> nvml_stub.Machine:
    """Three GPUs, in a pool that names them by number."""
    (terminal.folder / "nvml").mkdir()
    found = nvml_stub.Machine(terminal.folder / "nvml", "".join(A100.format(n) for n in "abc"))
    terminal.environment.update(found.environment)
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir()
    config.write_text("c.PoolSettings.device_names = 'index'\n")
    return found


def asked(terminal: Terminal, request: str) -> str:
    done = terminal.run("run", request, "--", "sh", "-c", ASK, env={"CUDA_DEVICE_ORDER": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_commands_and_kernels_get_numbers(terminal: Terminal, machine: nvml_stub.Machine) -> None:
    assert asked(terminal, "10% index=1") == "1 PCI_BUS_ID"
    assert asked(terminal, "2x50%") == "0,1 PCI_BUS_ID"
    assert terminal.run("kernels", "install", "10% index=2", "--user").returncode == 0
    listed = terminal.run("kernels", "list", "--json").stdout
    name = next(word.strip('",') for word in listed.split() if "python3-gpu" in word and "/" not in word)
    cell = "import os; print([int(each) for each in os.environ['CUDA_VISIBLE_DEVICES'].split(',')])"
    done = terminal.call("python", "-c", KERNEL, name, f"{cell}; print(os.environ['CUDA_DEVICE_ORDER'])")
    assert done.stdout == "[2]\nPCI_BUS_ID\n", done.stderr
    assert "device names" not in terminal.run("doctor").stdout


def test_numbers_are_the_machines_where_a_process_was_given_some_of_its_gpus(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    terminal.environment["CUDA_VISIBLE_DEVICES"] = "1,2"
    assert asked(terminal, "2x100%") == "1,2 PCI_BUS_ID"


def test_mig_instances_keep_their_uuid_and_the_doctor_says_why(
    terminal: Terminal, machine: nvml_stub.Machine
) -> None:
    machine.show(A100.format("a") + MIG + INSTANCE.format(1))
    assert asked(terminal, "1GiB index=1") == "MIG-1"
    assert asked(terminal, "20GiB") == "GPU-a", "CUDA counts an instance, or several, before or after it"
    found = " ".join(terminal.run("doctor").stdout.split())
    assert (
        "note device names: programs find GPU 1 (NVIDIA A100-SXM4-40GB MIG 1g.5gb) by uuid, and not by "
        "number: CUDA has no numbers for MIG instances"
    ) in found
    assert "GPU 0 (NVIDIA A100-SXM4-40GB) by uuid, and not by number: its number is not certain" in found


def test_uuids_are_what_is_given_where_nothing_is_set(terminal: Terminal, machine: nvml_stub.Machine) -> None:
    (terminal.folder / "config/gpu_pool_config.py").unlink()
    assert asked(terminal, "10%") == "GPU-a"


def test_a_number_is_for_whoever_sees_the_same_gpus(tmp_path: Path) -> None:
    """Not in containers, which number what they were given, nor where it is not known who asks."""
    here = Process.current()
    held = lease("a", 100, replace(V100, cuda_index=0), replace(OTHER, cuda_index=1))
    counted, mps = (
        Isolation(lambda _, tier=tier: (tier,), tier) for tier in (Accounting(), MpsTier(tmp_path))
    )
    uuids = held.environment["CUDA_VISIBLE_DEVICES"]
    for process, isolation, names in [
        (here, counted, "0,1"),
        (here, mps, uuids),
        (None, counted, uuids),
        (replace(here, namespace="pid:[1]"), counted, uuids),
    ]:
        named = with_indices(replace(held, holder=Holder("ada", process=process)), isolation)
        assert named.environment["CUDA_VISIBLE_DEVICES"] == names
        assert ("CUDA_DEVICE_ORDER" in named.environment) == (names == "0,1")
        assert "CUDA_DEVICE_ORDER" not in DockerContainer(named).command(())
        assert named.named_by_uuid().environment == held.environment
