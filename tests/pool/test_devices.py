"""Which devices a pool has, when the processes that open its ledger do not see the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.embedded import EmbeddedPool
from gpu_pool.inventory import Inventory
from gpu_pool.ledger import asking
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.errors import LedgerUnusable
from gpu_pool_client import Device, LeaseState
from support.pools import device, embedded, take


def real(index: int) -> Device:
    return replace(device(index), simulated=False)


async def devices(path: Path, *seen: Device) -> list[Device]:
    """Return the pool's devices after a process that sees these has opened it."""
    async with embedded(path, *seen) as pool:
        return [each.device for each in (await pool.status()).devices]


async def test_a_process_that_sees_no_device_takes_none_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with embedded(path) as first, EmbeddedPool(path, find_devices=lambda: Inventory((), "")) as second:
        await first.status()
        assert len((await second.status()).devices) == 1
        assert (await second.lease(await take(second, "1", "key"))).state is LeaseState.HELD


async def test_a_device_that_is_gone_is_granted_no_more_and_its_leases_live_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    old, new = real(0), real(1)
    async with embedded(path, old) as pool:
        lease = await take(pool, "50%", "old")
        async with embedded(path, new) as later:
            await later.status()
            waiting = await later.lease(await take(pool, "50% index=1", "new"))
            assert waiting.slices[0].device == new
            assert {each.device.uuid for each in (await pool.status()).devices} == {old.uuid, new.uuid}
            await pool.release(lease)
            assert [each.device for each in (await pool.status()).devices] == [new]


async def test_a_device_whose_facts_change_is_known_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with embedded(path, device(0, driver="550")) as pool:
        await pool.status()
        async with embedded(path, device(0, driver="565")) as later:
            await later.status()
        assert (await pool.status()).devices[0].device.driver == "565"


async def test_a_new_device_serves_the_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with embedded(path, device(0)) as pool:
        await take(pool, "1", "first")
        second = await take(pool, "1", "second")
        async with embedded(path, device(0), device(1)) as later:
            assert (await later.lease(second)).state is LeaseState.HELD


async def test_a_process_that_sees_other_devices_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    assert await devices(path, real(0)) == [real(0)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(asking, "pid_namespace", lambda: "pid:[of another container]")
        assert set(await devices(path, real(1))) == {real(0), real(1)}
    assert await devices(path, real(0)) == [real(0), real(1)], "nor the one here what that one saw"


async def test_simulated_devices_never_replace_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await devices(path, real(0))
    with pytest.raises(LedgerUnusable, match="in use for V100-SXM2-32GB; .* GPU_POOL_URL"):
        await devices(path, device(1))
    assert await devices(path, real(0)) == [real(0)]


async def test_simulated_devices_are_replaced_only_when_nobody_uses_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with embedded(path, device(0)) as pool:
        lease = await take(pool, "2%", "key")
        for other in (device(1), real(2)):
            with pytest.raises(LedgerUnusable, match=r"in use for V100-SXM2-32GB \(simulated\)"):
                await devices(path, other)
        await pool.release(lease)
    assert await devices(path, device(1)) == [device(1)]
    assert await devices(path, real(2)) == [real(2)]


async def test_looking_does_not_wait_for_those_who_write(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await devices(path, device(0))
    database = Database(path)
    with database.transaction():
        assert await devices(path, device(0)) == [device(0)]
    database.close()
