"""What the dialog says when a kernel is started and the pool's store cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool_client import PoolUnreachable
from support.disks import Disk, small_disk
from support.jupyter_env import JupyterEnv, Managers
from support.pools import embedded


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (Disk.fill, "it is full. Free 20 MiB there"),
        (Disk.take_all_inodes, "no inodes). Remove some files"),
        (Disk.write_protect, "is read-only. Mount it writable"),
    ],
)
async def test_a_kernel_is_refused_with_what_to_do(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path, trouble: object, words: str
) -> None:
    assert callable(trouble)
    with small_disk(tmp_path / "pool") as disk:
        async with embedded(disk.path / "store.db") as pool:
            await pool.status()
        trouble(disk)
        with pytest.raises(PoolUnreachable) as refused:
            await manager(jupyter_env.install("two")).start_kernel()
        assert words in " ".join(str(refused.value).split())
        await jupyter_env.pool.close()
