"""What the tests and benchmarks on a GPU stand on; needs no GPU itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_client import Device
from support import entry_points
from support.gpu import TIERS, Full, SharedDevice, opened, run, torch_facts, why_not
from support.gpu_child import Child, Failed

ROOT = Path(__file__).parents[2]
SIMULATED = Device("SIM-1", 0, "H100-SXM5-80GB", 81920, driver="580.159.04", simulated=True)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(os.environ)
    yield child
    child.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedDevice]:
    shared = SharedDevice(tmp_path, SIMULATED)
    yield shared
    shared.close()


def test_a_child_keeps_its_variables_and_outlives_its_errors(child: Child) -> None:
    child.ask("number = 20")
    with pytest.raises(Failed, match="ZeroDivisionError") as caught:
        child.ask("number / 0")
    assert caught.value.kind == "ZeroDivisionError"
    assert child.ask("print('not an answer'); answer = number + 1") == 21


def test_a_child_outlives_interrupts_and_tells_of_its_end(child: Child) -> None:
    child.ask("import os, signal, time")
    os.kill(child.pid, signal.SIGINT)
    with pytest.raises(Failed, match="KeyboardInterrupt"):
        child.ask("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)")
    assert child.ask("answer = 1") == 1
    child.tell("import sys; print('the reason', file=sys.stderr, flush=True); import os; os._exit(7)")
    with pytest.raises(Failed, match="status 7.*\n?.*the reason"):
        child.hear()


def test_a_child_that_does_not_answer_is_not_waited_for(child: Child) -> None:
    with pytest.raises(Failed, match="NoAnswer"):
        child.ask("import time; time.sleep(10)", within=0.1)
    child.kill()


def test_processes_take_slices_until_the_device_is_full_and_give_them_back(shared: SharedDevice) -> None:
    occupants = [shared.take("50%"), shared.take("50%")]
    assert occupants[0].child.ask("import os; answer = os.environ['GPU_POOL_SLICE']") == "50%"
    with pytest.raises(Full):
        shared.take("50%")
    shared.leave(occupants[0])
    assert run(shared.pool.status()).devices[0].leases == 1
    shared.take("50%")


def test_a_tier_that_cannot_be_used_says_why() -> None:
    assert why_not("framework caps", SIMULATED) == ""
    assert {why_not(tier, SIMULATED) for tier in TIERS[1:]} == {"the device is simulated"}
    with opened("framework caps") as tier:
        assert tier.adapt(SIMULATED) == SIMULATED


def test_entry_points_of_the_sources_are_those_of_an_installation(tmp_path: Path) -> None:
    entry_points.write(tmp_path)
    (written,) = importlib.metadata.distributions(path=[str(tmp_path)])
    found = {(each.group, each.name): each.value for each in written.entry_points}
    assert found["gpu_pool.kernel_launchers", "template"] == "gpu_pool_kernels.launching:template_argv"
    assert written.name == "jupyter-gpu-pool"
    if entry_points.are_there():
        of_it = importlib.metadata.distribution(written.name).entry_points
        installed = {(each.group, each.name): each.value for each in of_it}
        assert (
            found.items()
            == {key: value for key, value in installed.items() if "scripts" not in key[0]}.items()
        )


def benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks as a person does: at the root of the sources."""
    folders = (ROOT / name for name in ("kernels", "pool", "pool_client", "provisioner", "spawner"))
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_benchmarks_say_plainly_that_there_is_no_gpu(tmp_path: Path) -> None:
    hidden = benchmark(tmp_path) if not Path("/dev/nvidiactl").exists() else None
    if hidden is None:
        pytest.skip("this machine has a GPU")
    assert hidden.returncode == 1
    assert hidden.stderr.startswith("No GPU to measure. ")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_dry_run_of_the_benchmarks_writes_both_files(tmp_path: Path) -> None:
    if not torch_facts():
        pytest.skip("PyTorch is not installed")
    done = benchmark(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["finished"]
    assert [row["size"] for row in result["training"]] == ["100%", "10%", "5%", "2%"]
    assert [row["processes"] for row in result["density"]] == [1, 2]
    assert "# Dry run: nothing here was measured on a GPU" in (tmp_path / "gpu.md").read_text()
