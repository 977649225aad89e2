"""What ``doctor`` says of what keeps slices from being enforced, or kernels from sharing a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support import mps_stub, nvml_stub
from support.mps_stub import V100, Stub
from support.terminal import Terminal


@pytest.fixture
def stub(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The stand-ins of NVIDIA's programs and of its library, for one V100."""
    scenario = tmp_path / "scenario.txt"
    scenario.write_text(f"driver 550.54.14\ngpu {V100.uuid} {V100.model}\nmemory 32768 274\n")
    installed = mps_stub.install(tmp_path / "bin", monkeypatch)
    terminal.environment.update(
        PATH=f"{installed.folder}:{terminal.environment['PATH']}",
        LD_LIBRARY_PATH=str(nvml_stub.complete()),
        NVML_STUB_SCENARIO=str(scenario),
        GPU_POOL_DEVICES="",
    )
    yield installed
    installed.kill()


def checks(terminal: Terminal, name: str) -> list[dict[str, str]]:
    found = json.loads(terminal.run("doctor", "--json").stdout)["checks"]
    return [check for check in found if check["name"] == name]


def configure(terminal: Terminal, tier: str) -> None:
    folder = Path(terminal.environment["JUPYTER_CONFIG_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "gpu_pool_config.py").write_text(f'c.PoolSettings.tier = "{tier}"\n')


def test_a_gpu_that_admits_one_process_is_named_with_what_mends_it(terminal: Terminal, stub: Stub) -> None:
    assert checks(terminal, "compute mode") == []
    stub.cards(mode="Exclusive_Process")
    [check] = checks(terminal, "compute mode")
    assert check["state"] == "broken"
    mode = "GPU 0 is Exclusive_Process: it admits one process at a time"
    assert check["text"] == f"{mode}, and kernels cannot share it"
    assert check["remedy"] == f"sudo nvidia-smi -i {V100.uuid} -c DEFAULT"
    configure(terminal, "mps")
    assert checks(terminal, "compute mode") == []


@pytest.mark.long
def test_mig_instances_that_were_made_anew_under_a_lease_are_named(terminal: Terminal, stub: Stub) -> None:
    scenario = Path(terminal.environment["NVML_STUB_SCENARIO"])
    a100 = "driver 550.54.14\ngpu GPU-a NVIDIA A100-SXM4-40GB\nmemory 40960 571\nmig 7\n"
    instance = "instance MIG-{0} NVIDIA A100-SXM4-40GB MIG 1g.5gb\nmemory 4864 0\n"
    scenario.write_text(a100 + "".join(map(instance.format, (1, 2))))
    holding = terminal.start("run", "10%", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600")
    assert holding.stdout is not None
    held = holding.stdout.readline().strip()
    assert checks(terminal, "lost") == []
    draft = scenario.with_suffix(".draft")
    draft.write_text(a100 + "".join(map(instance.format, (3, 4))))
    draft.replace(scenario)
    [check] = checks(terminal, "lost")
    [lease] = json.loads(terminal.run("status", "--json").stdout)["leases"]
    assert check["state"] == "broken"
    assert check["text"].startswith(f"NVIDIA A100-SXM4-40GB MIG 1g.5gb ({held}) of lease {lease['id']}")
    terminal.run(*check["remedy"].rpartition("gpu-pool ")[2].split())
    assert checks(terminal, "lost") == []


def test_mps_that_is_not_the_pools_is_named(terminal: Terminal, stub: Stub, tmp_path: Path) -> None:
    stub.start_elsewhere(tmp_path / "pipes")
    notes = checks(terminal, "mps")
    said = f"of {psutil.Process().username()}: kernels on its GPUs may have limits"
    assert any(said in note["text"] for note in notes)


@pytest.mark.long
def test_programs_of_mps_that_are_missing_are_named_where_they_are_wanted(
    terminal: Terminal, stub: Stub
) -> None:
    configure(terminal, "mps")
    assert [check["text"] for check in checks(terminal, "tier")] == [
        "mps, by gpu-pool serve; seen on an H100 with driver 580.159.04"
    ]
    assert checks(terminal, "mps") == []
    (stub.folder / "nvidia-cuda-mps-control").unlink()
    [check] = checks(terminal, "mps")
    assert (check["state"], check["text"]) == (
        "broken",
        "nvidia-cuda-mps-control was not found on this machine.",
    )
