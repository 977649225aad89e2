"""What a pool of Slurm knows of its nodes, while the controller does not say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_pool.pool.core import PoolCore
from gpu_pool.slurm.backend import SlurmBackend
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool_client import PoolUnreachable

_SINFO = """#!/bin/sh
{fault}
echo "n1|n1|gpu:v100_32gb:4|gpu*"
"""
_STANDBY = 'echo "slurm_load_node error: Slurm backup controller in standby mode" >&2; exit 1'
_AWAY = 'echo "Unable to contact slurm controller" >&2; exit 1'


@pytest.mark.parametrize("fault", [_STANDBY, _AWAY], ids=["standby", "away"])
async def test_what_was_known_last_is_used_whatever_the_controller_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(fault: str) -> None:
        for name, text in (("sinfo", _SINFO.format(fault=fault)), ("scontrol", "#!/bin/sh\n")):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)

    write(fault)
    backend = SlurmBackend(tmp_path / "slurm.db", SlurmSettings(), known_for=-1.0)
    core = PoolCore(tmp_path / "slurm.db", backend)
    with pytest.raises(PoolUnreachable, match="standby mode|does not answer"):
        await backend.devices(0.0)
    write("")
    known = (await backend.devices(0.0)).inventory.devices
    assert len(known) == 4
    write(fault)
    assert (await backend.devices(0.0)).inventory.devices == known
    await core.close()
