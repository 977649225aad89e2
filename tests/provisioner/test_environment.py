from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_pool_client import (
    Device,
    Enforcement,
    Holder,
    Lease,
    LeaseState,
    Limit,
    Slice,
    Strength,
    parse_request,
)
from gpu_pool_provisioner.environment import (
    LAUNCHERS,
    SliceEnvironment,
    kernel_command,
    launcher,
)
from support.jupyter_env import JupyterEnv, Managers, answer, started_kernel

GPU = Device("GPU-1", 0, "Tesla V100-SXM2-32GB", 32768)


def lease(**fields: object) -> Lease:
    held = {"slices": (Slice(GPU, 20, 655),), "enforcement": Enforcement(), **fields}
    return Lease("id", "key", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0, **held)  # type: ignore[arg-type]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Make an environment with an interpreter that is never started, and torch beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.12").write_text("#!/bin/false")
    (tmp_path / "bin" / "python3.12").chmod(0o755)
    (tmp_path / "lib/python3.12/site-packages/torch-2.11.0.dist-info").mkdir(parents=True)
    return str(tmp_path / "bin" / "python3.12")


def test_caps_of_the_kernels_own_frameworks_are_set_and_stated(python: str) -> None:
    found = SliceEnvironment([python], {}, lease()).variables
    assert "per_process_memory_fraction" in found["PYTORCH_CUDA_ALLOC_CONF"]
    assert "memory: 655 MiB, cooperative (framework caps: torch)" in found["GPU_POOL_ENFORCED"]


def test_a_kernel_without_frameworks_has_nothing_enforced() -> None:
    found = SliceEnvironment(["/usr/bin/R"], {}, lease()).variables
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found
    assert "memory: 655 MiB, none (accounting only)" in found["GPU_POOL_ENFORCED"]


def test_what_a_hook_limits_is_stated_for_kernels_that_load_it(python: str, tmp_path: Path) -> None:
    (tmp_path / "lib/python3.12/site-packages/torch-2.11.0.dist-info").rename(
        tmp_path / "lib/python3.12/site-packages/torch-2.9.1.dist-info"
    )
    kernel = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    found = SliceEnvironment(kernel, {}, lease()).variables
    assert found["GPU_POOL_TORCH_FRACTION"] == "0.00698"
    assert "cooperative (framework caps: torch only in the kernel itself)" in found["GPU_POOL_ENFORCED"]
    found = SliceEnvironment([python, "-m", "another_kernel"], {}, lease()).variables
    assert "GPU_POOL_TORCH_FRACTION" not in found
    assert "memory: 655 MiB, none (accounting only)" in found["GPU_POOL_ENFORCED"]


def test_the_caps_suit_every_device_of_the_lease(python: str) -> None:
    small, large = Device("GPU-2", 1, "V100-16", 16384), GPU
    parts = (Slice(small, 250, 4096), Slice(large, 125, 4096))
    found = SliceEnvironment([python], {}, lease(slices=parts)).variables["PYTORCH_CUDA_ALLOC_CONF"]
    assert 0 < float(found.rpartition(":")[2]) * 32768 <= 4096


def test_a_firmer_limit_is_not_called_cooperative(python: str) -> None:
    firm = Enforcement(memory=Limit(Strength.HARD, "MIG"))
    assert (
        "hard (MIG)" in SliceEnvironment([python], {}, lease(enforcement=firm)).variables["GPU_POOL_ENFORCED"]
    )


def test_what_the_user_has_set_is_kept(python: str) -> None:
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = SliceEnvironment([python], theirs, lease()).variables
    assert found["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:True,")


def test_the_command_goes_through_what_is_installed_for_ipython_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "some_launcher-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-launcher\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{LAUNCHERS}]\nipykernel = some_launcher:prepare\n")
    (tmp_path / "some_launcher.py").write_text(
        "def prepare(argv, installed): return [*argv, '--ext', 'mine']"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launcher.cache_clear()
    assert kernel_command(["python", "-m", "ipykernel"]) == ["python", "-m", "ipykernel", "--ext", "mine"]
    launcher.cache_clear()


async def test_a_kernel_reads_what_is_enforced(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    printed = await answer(km, "import json, os; print(json.dumps(dict(os.environ)))")
    assert json.loads(printed)["GPU_POOL_ENFORCED"].startswith("memory: 655 MiB")
