"""A GPU without memory of its own, such as a GB10's: what is divided, and where that is said."""

from __future__ import annotations

import json
import os
from typing import Any

from support import nvml_stub
from support.terminal import Terminal

MACHINE_MIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def device(terminal: Terminal) -> dict[str, Any]:
    done = terminal.run("list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)["devices"]
    assert isinstance(found, dict)
    return found


def test_the_machines_memory_is_divided_or_as_much_of_it_as_is_set(terminal: Terminal) -> None:
    (terminal.folder / "nvml").mkdir()
    machine = nvml_stub.Machine(terminal.folder / "nvml", "gpu GPU-a NVIDIA GB10\ncores 6144 12 1\n")
    terminal.environment.update(machine.environment)
    found = device(terminal)
    assert (found["model"], found["memory_mib"], found["unified"]) == ("NVIDIA GB10", MACHINE_MIB, True)
    said = " ".join(terminal.run("doctor").stdout.split())
    assert f"it shares the machine's {MACHINE_MIB} MiB with all programs" in said
    assert "c.PoolSettings.unified_memory_mib sets how much of it the pool divides" in said

    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir()
    config.write_text("c.PoolSettings.unified_memory_mib = 1024\n")
    assert device(terminal)["memory_mib"] == 1024
    granted = terminal.run("run", "50%", "--", "sh", "-c", "echo $GPU_POOL_MEMORY_MIB")
    assert granted.stdout == "512\n"
    refused = terminal.run("run", "2GiB", "--", "true")
    assert refused.returncode == 3
    assert "1GiB" in refused.stderr
