"""What the Hub learns from a pool, and what it does where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool_client import Holder, connect, parse_request
from gpu_pool_spawner.supply import PoolView


@pytest.mark.parametrize("url", ["unix:{}/nobody.sock", "nonsense:"])
async def test_a_pool_that_cannot_be_asked_is_none(tmp_path: Path, url: str) -> None:
    assert await PoolView(url.format(tmp_path)).look() is None


async def test_everybody_gets_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:1")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    url = f"embedded:{tmp_path}/ledger.db"
    async with connect(url) as pool:
        for number in range(6):
            await pool.release((await pool.request(parse_request("2%"), Holder("ada"), f"{number}")).id)
        for key in ("held", "waits"):
            await pool.request(parse_request("60%"), Holder("ada"), key)
        view = PoolView(url)
        supply = await view.look()
        assert supply is not None
        assert [status.free_milli for status in supply.devices] == [400]
        assert (supply.waiting, supply.simulated) == (1, True)
        (words,) = supply.waits.values()
        assert words.startswith("at most about")
        assert await view.look() is supply
