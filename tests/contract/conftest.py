"""Every implementation of the contract, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpu_pool.inventory.simulated import parse_devices
from gpu_pool_client import Device, Pool, connect
from support.hub import ADMIN, Hub, hub, serving_hub
from support.pools import embedded
from support.service import DEVICES, Nursery, nursery, serving

__all__ = ["hub", "nursery"]

_SETTINGS = 'c.PoolSettings.courses = {"cs101": {}}'
#: What a pool promises of processes that it sees: over TCP none (tests/service/test_heartbeats.py).
_OF_PROCESSES_SEEN = {
    "test_the_attached_process_keeps_the_lease",
    "test_a_killed_but_unreaped_process_counts_as_gone",
    "test_attaching_while_waiting_is_legal",
    "test_the_requesters_death_ends_what_nothing_was_attached_to",
    "test_the_kernel_outlives_the_requester",
    "test_grace_lets_the_holder_bring_another_process",
}


@pytest.fixture
def device() -> Device:
    """The pool's one device."""
    (device,) = parse_devices(DEVICES)
    return device


@pytest.fixture(params=["embedded", "unix", "http"])
async def pool(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    device: Device,
    nursery: Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Pool]:
    """An empty pool over one simulated V100 with 32 GiB."""
    if request.param == "http" and request.node.originalname in _OF_PROCESSES_SEEN:
        pytest.skip("over TCP a process is only claimed, and its lease lives by heartbeats")
    async with AsyncExitStack() as stack:
        if request.param == "embedded":
            opened: Pool = embedded(tmp_path / "ledger.db", device, courses={"cs101": {}})
        elif request.param == "http":
            hub: Hub = request.getfixturevalue("hub")
            monkeypatch.setenv("GPU_POOL_TOKEN", await hub.token(ADMIN))
            behind = await stack.enter_async_context(
                serving_hub(nursery, hub, tmp_path / "service", _SETTINGS)
            )
            opened = connect(behind.url)
        else:
            service = await stack.enter_async_context(serving(nursery, tmp_path / "service", _SETTINGS))
            opened = connect(service.url)
        yield await stack.enter_async_context(opened)
