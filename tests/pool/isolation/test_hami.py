"""HAMi-core: what it is told, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.isolation import TierFailed
from gpu_pool.isolation.hami import HamiTier
from gpu_pool_client import Strength
from support.mps_stub import OTHER, V100, lease


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libvgpu.so"
    path.write_text("")
    return path


@pytest.fixture
def tier(tmp_path: Path, library: Path) -> HamiTier:
    return HamiTier(library, tmp_path / "hami", locks=tmp_path / "vgpulock")


def test_memory_and_large_shares_of_compute_are_limited(
    tier: HamiTier, library: Path, tmp_path: Path
) -> None:
    said = tier.describe(lease("a", 250))
    assert said.variables == {
        "LD_PRELOAD": f"{library}",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{tmp_path}/hami/a/shared.cache",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "8123m",
        "CUDA_DEVICE_SM_LIMIT_0": "25",
    }
    assert f"{said.enforcement.memory}; {said.enforcement.compute}" == (
        "cooperative (HAMi-core); cooperative (HAMi-core)"
    )


def test_small_shares_of_compute_are_not_said_to_be_limited(tier: HamiTier) -> None:
    said = tier.describe(lease("a", 20))
    assert "CUDA_DEVICE_SM_LIMIT_0" not in said.variables
    assert said.enforcement.compute.strength is Strength.NONE


def test_several_devices_are_limited_each_by_its_place(tier: HamiTier) -> None:
    limits = {name for name in tier.describe(lease("a", 500, V100, OTHER)).variables if "LIMIT" in name}
    assert limits == {f"CUDA_DEVICE_{what}_LIMIT_{place}" for what in ("MEMORY", "SM") for place in (0, 1)}


def test_a_library_that_is_not_there(tier: HamiTier, library: Path) -> None:
    library.unlink()
    with pytest.raises(TierFailed, match=r"libvgpu.so does not exist.*Install it there"):
        tier.prepare(V100)


def test_locks_that_cannot_be_kept(tier: HamiTier, tmp_path: Path) -> None:
    (tmp_path / "vgpulock").write_text("somebody's file")
    with pytest.raises(TierFailed, match=r"needs .*vgpulock.*chmod 1777"):
        tier.prepare(V100)


def test_a_machine_that_can(tier: HamiTier, tmp_path: Path) -> None:
    tier.prepare(V100)
    assert (tmp_path / "hami").stat().st_mode & 0o777 == 0o711
    assert (tmp_path / "vgpulock").stat().st_mode & 0o7777 == 0o1777
    assert tier.adapt(V100) == V100


@pytest.mark.parametrize("change", [{"simulated": True}, {"mig_profile": "1g.5gb"}])
def test_what_it_does_not_divide(tier: HamiTier, change: dict[str, object]) -> None:
    with pytest.raises(TierFailed, match="divides whole GPUs"):
        tier.prepare(replace(V100, **change))  # type: ignore[arg-type]


def test_files_live_as_long_as_their_leases(tier: HamiTier, tmp_path: Path) -> None:
    tier.prepare(V100)
    files = {name: tmp_path / "hami" / name / "shared.cache" for name in "abc"}
    for name, file in files.items():
        tier.open(lease(name))
        assert file.parent.stat().st_mode & 0o777 == 0o700
        file.write_text("what the processes share")
    tier.open(lease("a"))  # what an earlier slice has left would fix its limits
    assert not files["a"].exists()
    tier.recover([lease("b")])
    assert [name for name, file in files.items() if file.exists()] == ["b"]
    tier.close(lease("b"))
    assert list((tmp_path / "hami").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root serves other users")
def test_the_folder_of_another_users_lease_is_theirs(tier: HamiTier, tmp_path: Path) -> None:
    tier.prepare(V100)
    tier.open(lease("a", user="nobody"))
    assert (tmp_path / "hami" / "a").owner() == "nobody"
