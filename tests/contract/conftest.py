"""Every implementation of the contract, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpu_pool.inventory.simulated import parse_devices
from gpu_pool_client import Device, Pool, connect
from support.pools import embedded
from support.service import DEVICES, Nursery, nursery, serving

__all__ = ["nursery"]


@pytest.fixture
def device() -> Device:
    """The pool's one device."""
    (device,) = parse_devices(DEVICES)
    return device


@pytest.fixture(params=["embedded", "unix"])
async def pool(
    request: pytest.FixtureRequest, tmp_path: Path, device: Device, nursery: Nursery
) -> AsyncIterator[Pool]:
    """An empty pool over one simulated V100 with 32 GiB."""
    async with AsyncExitStack() as stack:
        if request.param == "embedded":
            opened: Pool = embedded(tmp_path / "ledger.db", device, courses={"cs101": {}})
        else:
            settings = 'c.PoolSettings.courses = {"cs101": {}}'
            service = await stack.enter_async_context(serving(nursery, tmp_path / "service", settings))
            opened = connect(service.url)
        yield await stack.enter_async_context(opened)
