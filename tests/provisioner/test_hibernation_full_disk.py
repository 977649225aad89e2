"""Kernels that sleep on a disk that is full, or where they may not have more of it, by a real CRIU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import disks
from support.disks import Disk
from support.frontend import frontend, printed
from support.jupyter_env import JupyterEnv, Managers
from support.kernels_on_disk import (
    CRIU,
    NEEDS_CRIU,
    asleep,
    install_keeper,
    notebook,
    sleeper,
    tried_to_sleep,
)

pytestmark = NEEDS_CRIU


@pytest.fixture
def small_disk(jupyter_env: JupyterEnv) -> Iterator[Disk]:
    """Have a disk of its own for kernels that sleep."""
    with disks.small_disk(jupyter_env.folder / "asleep", "400m", inodes=0) as disk:
        yield disk


async def test_a_disk_that_gets_full_meanwhile_leaves_it_awake(
    jupyter_env: JupyterEnv, manager: Managers, small_disk: Disk, tmp_path: Path
) -> None:
    """Somebody else fills a real, small disk just when the first image is written."""
    first = tmp_path / "first"
    filler = tmp_path / "criu"
    filler.write_text(
        f"#!/bin/sh\nif [ $1 = dump ] && [ ! -e {first} ]; then touch {first}; "
        f'head -c 380M /dev/zero > {small_disk.path}/fill; fi\nexec {CRIU} "$@"\n'
    )
    filler.chmod(0o755)
    async with sleeper(jupyter_env, manager, criu=str(filler)) as (km, page):
        await printed(page, "kept = bytes(100_000_000)")
        await tried_to_sleep(km)
        assert first.exists()
        assert "stayed awake: the disk has got full meanwhile" in await printed(page, "print(len(kept))")
        assert not list(small_disk.path.glob("*/image*"))  # those that are being written among them
        small_disk.empty()
        await asleep(km)
        assert await printed(page, "print(len(kept))") == "100000000\n"
    await km.shutdown_kernel(now=True)


async def test_what_all_kernels_may_take_on_disk_keeps_the_next_one_awake(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager, hibernation_mib=400) as (km, page):
        await printed(page, "kept = bytes(range(256)) * 800_000")
        await asleep(km)
        async with sleeper(jupyter_env, manager, name="next", hibernation_mib=400) as (other, its):
            await printed(its, "kept = bytes(range(256)) * 800_000")
            await tried_to_sleep(other)
            said = await printed(its, "print(len(kept))")
            assert "204800000" in said
            assert "of the 400 MiB that kernels may take on disk" in said
        assert await printed(page, "print(len(kept))") == "204800000\n"


# -- Where a kernel that may sleep cannot be launched --------------------------------


async def stays_awake_until_it_is_restarted(
    env: JupyterEnv, manager: Managers, why: str, mend: Callable[[], object]
) -> None:
    kernel = install_keeper(env, hibernate_after=0.3)
    async with notebook(env, manager, kernel) as km, frontend(km) as found:
        told = " ".join((await printed(found, "print(41)")).split())
        assert "41" in told
        assert f"stays awake until it is restarted: {why}" in told
        assert await printed(found, "print(42)") == "42\n"
        assert not km.provisioner.goes_to_disk
        mend()
        await km.restart_kernel()
        assert "awake" not in await printed(found, "kept = 1; print(43)")
        await asleep(km)
        assert await printed(found, "print(kept)") == "1\n"


async def test_on_a_full_disk_a_kernel_starts_that_stays_awake(
    jupyter_env: JupyterEnv, manager: Managers, small_disk: Disk
) -> None:
    small_disk.fill()
    why = f"the disk with {small_disk.path}, where kernels sleep, is full"
    await stays_awake_until_it_is_restarted(jupyter_env, manager, why, small_disk.empty)


async def test_one_that_cannot_be_held_starts_and_stays_awake(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = jupyter_env.folder / "data" / "gpu-pool" / "held"
    held.parent.mkdir(parents=True)
    held.touch()
    why = f"this user's servers could not note in {held} which of them has it (File exists)"
    await stays_awake_until_it_is_restarted(jupyter_env, manager, why, held.unlink)


async def test_one_that_cannot_be_woken_for_want_of_room_says_where_and_what_to_do(
    jupyter_env: JupyterEnv, manager: Managers, small_disk: Disk
) -> None:
    kernel = install_keeper(jupyter_env, hibernate_after=0.3)
    async with notebook(jupyter_env, manager, kernel) as km, frontend(km) as found:
        await printed(found, "kept = 1")
        await asleep(km)
        small_disk.fill()
        told = " ".join((await printed(found, "print(kept)")).split())
        assert f"the disk with {small_disk.path}, where kernels sleep, is full: remove kernels there" in told
        assert "make room. Nothing of it is lost" in told
        small_disk.empty()
        assert await printed(found, "print(kept)") == "1\n"
