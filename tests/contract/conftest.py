"""Every implementation of the contract, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool_client import Pool
from support.pools import embedded


@pytest.fixture(params=["embedded"])
async def pool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pool]:
    """An empty pool over one simulated V100 with 32 GiB."""
    async with embedded(tmp_path / "ledger.db", courses={"cs101": {}}) as opened:
        yield opened
