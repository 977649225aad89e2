"""HAMi-core: what it is told, and what is said of it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement import TierFailed
from gpu_pool.enforcement.hami_core import HamiTier
from gpu_pool_client import Strength
from support.mps_stub import OTHER, V100, lease

#: A user who holds nothing here, and has no name.
THEIRS = 64_997
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what is another user's")


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


def test_ones_own_file_in_the_place_of_the_locks(tier: HamiTier, tmp_path: Path) -> None:
    locks = tmp_path / "vgpulock"
    locks.write_text("ours")
    with pytest.raises(TierFailed, match=rf"the folder {locks}, and a file of .* sudo rm {locks}"):
        tier.prepare(V100)
    assert locks.read_text() == "ours"


def test_ones_own_link_may_lead_to_the_folder(tier: HamiTier, tmp_path: Path) -> None:
    locks = tmp_path / "vgpulock"
    locks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierFailed, match="symbolic link to .*elsewhere, which does not exist, of "):
        tier.prepare(V100)
    (tmp_path / "elsewhere").mkdir()
    tier.prepare(V100)
    assert locks.is_symlink()


def _make(path: Path, what: str) -> None:
    """Put something of another user's where the folder belongs."""
    if what == "folder":
        path.mkdir(mode=0o700)
        (path / "lock").touch()
    elif what == "file":
        path.write_text("theirs")
    else:
        path.symlink_to({"dangling": path.parent / "absent", "link": path.parent}[what])
    os.chown(path, THEIRS, THEIRS, follow_symlinks=False)


@only_root
@pytest.mark.parametrize("what", ["folder", "file", "dangling", "link"])
def test_nobody_keeps_root_from_it_by_being_first(
    tier: HamiTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    locks = tmp_path / "vgpulock"
    _make(locks, what)
    tier.prepare(V100)
    found = locks.lstat()
    assert (stat.S_ISDIR(found.st_mode), found.st_uid, found.st_mode & 0o7777) == (True, 0, 0o1777)
    aside = [path for path in tmp_path.iterdir() if path.name.startswith("vgpulock.")]
    if what == "folder":
        assert (aside, (locks / "lock").exists()) == ([], True), "what is in it is in use"
    else:
        assert [path.lstat().st_uid for path in aside] == [THEIRS], "nothing of theirs is lost"
        assert f"of {THEIRS} was in the place of {locks}" in caplog.text


@only_root
@pytest.mark.parametrize("what", ["folder", "link", "nothing"])
def test_what_its_owner_puts_there_meanwhile_stays_whose_it_was(
    tier: HamiTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    locks, private, opened = tmp_path / "vgpulock", tmp_path / "private", os.open
    _make(locks, "folder")
    private.mkdir(mode=0o700)
    number = private.stat().st_ino

    def open_after_the_swap(path: str, flags: int, *rest: int, **more: int) -> int:
        """Open, after the owner has come between the look at the folder and this."""
        if path == locks and not (tmp_path / "aside").exists():
            locks.rename(tmp_path / "aside")
            if what == "folder":
                private.rename(locks)
            elif what == "link":
                locks.symlink_to(private)
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr("os.open", open_after_the_swap)
    tier.prepare(V100)
    kept = next(path for path in (locks, private) if path.exists() and path.stat().st_ino == number)
    assert kept.stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "aside").stat().st_uid == THEIRS


@only_root
@pytest.mark.parametrize("what", ["file", "dangling", "link"])
def test_who_is_not_root_is_told_whose_it_is(
    tier: HamiTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _make(tmp_path / "vgpulock", what)
    monkeypatch.setattr("os.geteuid", lambda: THEIRS + 1)
    with pytest.raises(TierFailed, match=rf"and a (file|symbolic link.*) of {THEIRS} is in its place.*rm"):
        tier.prepare(V100)


def test_a_folder_that_cannot_be_written_to(
    tier: HamiTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vgpulock").mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)  # nothing is closed to root
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


@only_root
def test_the_folder_of_another_users_lease_is_theirs(tier: HamiTier, tmp_path: Path) -> None:
    tier.prepare(V100)
    tier.open(lease("a", user="nobody"))
    assert (tmp_path / "hami" / "a").owner() == "nobody"
