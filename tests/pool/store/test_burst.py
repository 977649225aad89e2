"""Memory on top of guarantees through the pool: who may use what, and when that is taken back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.devices import Inventory
from gpu_pool.embedded.backend import LocalBackend
from gpu_pool.embedded.pool import local_pool
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.store import database
from gpu_pool.tuning import Tuning
from gpu_pool_client import Device, Holder, parse_request
from support.passes import NO_PASSES
from support.pools import V100, device, embedded, eventually, take

SETTINGS = PoolSettings(tuning=NO_PASSES)


class Measured(LocalBackend):
    """A machine on which so much memory is in use by leases with a limit."""

    used: dict[str, dict[str, int]]

    def memory_in_use(self) -> dict[str, dict[str, int]]:
        return self.used


def pool_at(path: Path, *devices: Device) -> GpuPool:
    backend = Measured(path, SETTINGS, lambda: Inventory(devices or (V100,), "test"))
    backend.used = {}
    return GpuPool(PoolCore(path, backend, SETTINGS))


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[GpuPool]:
    """A pool over one GPU, kept in order when it is asked for."""
    pool = pool_at(tmp_path / "store.db")
    yield pool
    await pool.close()


async def bursts(pool: GpuPool) -> list[int]:
    """Keep the pool in order once; return what each lease has on top, the oldest first."""
    await pool.core.reconciler.once()
    return [part.burst_mib for lease in (await pool.status()).leases for part in lease.slices]


async def test_what_nobody_is_granted_may_be_used_up_to_each_limit(pool: GpuPool) -> None:
    first = await take(pool, "2%..10%", "a")
    assert await bursts(pool) == [3276 - 655]
    await take(pool, "2%..100%", "b")
    await take(pool, "2%", "c")
    assert await bursts(pool) == [3276 - 655, 32768 - 3276 - 2 * 655, 0]
    (part,) = (await pool.get_lease(first)).slices
    assert (part.memory_mib, part.limit_mib, part.allowed_mib) == (655, 3276, 3276)


async def test_a_newcomers_guarantee_is_admitted_at_once_and_taken_back_by_the_next_pass(
    pool: GpuPool,
) -> None:
    await take(pool, "50%..100%", "a")
    assert await bursts(pool) == [16384]
    newest = await take(pool, "40%", "b")
    assert (await pool.get_lease(newest)).slices, "it is held, whatever others have on top"
    assert await bursts(pool) == [32768 - 16384 - 13107, 0]
    await take(pool, "10%", "c")
    await bursts(pool)
    await pool.release(newest)
    assert await bursts(pool) == [32768 - 16384 - 3276, 0]


async def test_what_is_parked_has_no_burst_and_others_have_its_memory(pool: GpuPool) -> None:
    await take(pool, "50%..80%", "a")
    other = await take(pool, "50%", "b")
    assert await bursts(pool) == [0, 0]
    await pool.park(other)
    assert await bursts(pool) == [26214 - 16384]
    await pool.resume(other)
    assert await bursts(pool) == [0, 0]


async def test_what_is_in_use_is_taken_back_last(pool: GpuPool) -> None:
    first, _ = await take(pool, "10%..100%", "a"), await take(pool, "10%..100%", "b")
    assert await bursts(pool) == [13108, 13108]
    assert isinstance(pool.core.backend, Measured)
    pool.core.backend.used = {first: {V100.uuid: 3276 + 13000}}
    await take(pool, "35%", "c")
    assert await bursts(pool) == [13000, 32768 - 2 * 3276 - 11468 - 13000, 0]


async def test_a_resize_gives_up_the_burst_until_the_next_pass(pool: GpuPool) -> None:
    lease = await take(pool, "2%..10%", "a")
    await bursts(pool)
    same = await pool.resize(lease, parse_request("2%..10%"))
    assert [part.burst_mib for part in same.slices] == [3276 - 655]
    larger = await pool.resize(lease, parse_request("4%..10%"))
    assert [(part.memory_mib, part.burst_mib) for part in larger.slices] == [(1310, 0)]
    assert await bursts(pool) == [3276 - 1310]
    plain = await pool.resize(lease, parse_request("2%"))
    assert [(part.limit_mib, part.burst_mib) for part in plain.slices] == [(0, 0)]
    assert await bursts(pool) == [0]


async def test_nothing_is_written_while_nothing_changes(
    pool: GpuPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take(pool, "2%..10%", "a")
    await bursts(pool)
    written = count(monkeypatch, "set_burst")
    await bursts(pool)
    assert written == []


async def test_a_pool_without_limits_is_asked_for_nothing(
    pool: GpuPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count(monkeypatch, "held_at_work")
    await take(pool, "2%", "a")
    await bursts(pool)
    await take(pool, "2%", "b")
    assert await bursts(pool) == [0, 0]
    assert asked == []
    await take(pool, "2%..3%", "c")
    await bursts(pool)
    assert asked


def count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list to which each statement of that name is added that the store runs from now on."""
    found: list[str] = []
    run = database.Database.run

    def noted(self: database.Database, statement: str, *values: object) -> object:
        if statement == name:
            found.append(statement)
        return run(self, statement, *values)  # type: ignore[arg-type]

    monkeypatch.setattr(database.Database, "run", noted)
    return found


async def test_of_several_processes_on_one_store_one_decides(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    first, second = pool_at(path), pool_at(path)
    try:
        await take(first, "2%..10%", "a")
        assert await bursts(first) == [2621]
        assert isinstance(second.core.backend, Measured)
        await take(second, "90%", "b")
        await second.core.reconciler.once()
        assert await bursts(first) == [2621, 0]
        await take(second, "5%", "c")
        await second.core.reconciler.once()
        assert await bursts(first) == [32768 - 655 - 29491 - 1638, 0, 0]
    finally:
        await first.close()
        await second.close()


async def test_a_service_that_owns_the_devices_decides_as_well(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store.db", SETTINGS, lambda: Inventory((V100,), "test"), owner=True)
    pool = GpuPool(PoolCore(tmp_path / "store.db", backend, SETTINGS))
    try:
        await pool.core.open()
        await take(pool, "2%..10%", "a")
        assert await bursts(pool) == [2621]
        await take(pool, "95%", "b")
        assert await bursts(pool) == [32768 - 655 - 31129, 0]
    finally:
        await pool.close()


async def test_a_grant_has_the_pool_look_at_once(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", tuning=Tuning(passes_every=3600.0)) as pool:

        async def is_on_top(*mib: int) -> bool:
            return [part.burst_mib for lease in (await pool.status()).leases for part in lease.slices] == [
                *mib
            ]

        await take(pool, "2%..10%", "a")
        await eventually(lambda: is_on_top(2621))
        newcomer = await take(pool, "95%", "b")
        await eventually(lambda: is_on_top(32768 - 655 - 31129, 0))
        await pool.park(newcomer)
        await eventually(lambda: is_on_top(2621))
        await pool.resume(newcomer)
        await eventually(lambda: is_on_top(32768 - 655 - 31129, 0))
        await pool.resize(newcomer, parse_request("50%"))
        await eventually(lambda: is_on_top(2621, 0))


async def test_a_newcomer_that_gives_up_at_once_costs_nobody_a_burst(
    pool: GpuPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take(pool, "2%..10%", "a")
    await bursts(pool)
    written = count(monkeypatch, "set_burst")
    await pool.release(await take(pool, "95%", "b"))
    assert await bursts(pool) == [2621]
    assert written == []


async def test_who_is_granted_between_the_look_and_the_decision_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, loop = tmp_path / "store.db", asyncio.get_running_loop()
    first, second = pool_at(path), pool_at(path)
    allows, has_come = first.backend.allows_burst, threading.Event()

    def meanwhile(device: Device) -> bool:
        """Have somebody granted during the look, which sees the store as it was before."""
        if not has_come.is_set():
            has_come.set()
            asyncio.run_coroutine_threadsafe(take(second, "95%", "b"), loop).result(60)
        return allows(device)

    try:
        await take(first, "2%..10%", "a")
        monkeypatch.setattr(first.backend, "allows_burst", meanwhile)
        assert await bursts(first) == [32768 - 655 - 31129, 0]
        assert has_come.is_set()
    finally:
        await first.close()
        await second.close()


async def test_two_hundred_have_their_share_and_give_it_back_in_one_decision_each(tmp_path: Path) -> None:
    pool = pool_at(tmp_path / "store.db", *(device(number) for number in range(4)))
    try:
        for number in range(200):
            await take(pool, f"1.1%..50% index={number % 4}", f"kernel-{number}", Holder(f"user{number}"))
        on_top = await bursts(pool)
        assert sum(on_top) == 4 * 32768 - 200 * 360
        assert max(on_top) - min(on_top) <= 1, "all have as much"
        for number in range(4):
            await take(pool, f"44% index={number}", f"newcomer-{number}")
        assert await bursts(pool) == [0] * 204
    finally:
        await pool.close()


@pytest.mark.parametrize("jump", [-86_400.0, -60.0, 60.0, 86_400.0])
async def test_a_clock_that_is_set_moves_no_burst(tmp_path: Path, jump: float) -> None:
    ahead = [0.0]
    backend = Measured(tmp_path / "store.db", SETTINGS, lambda: Inventory((V100,), "test"))
    backend.used = {}
    clock = Clock(wall=lambda: time.time() + ahead[0])
    pool = GpuPool(PoolCore(tmp_path / "store.db", backend, SETTINGS, clock))
    try:
        for name in ("a", "b"):
            await take(pool, "10%..100%", name)
        before = await bursts(pool)
        ahead[0] = jump
        assert await bursts(pool) == before
        await take(pool, "40%", "c")
        taken_back = await bursts(pool)
        assert taken_back == [(32768 - 2 * 3276 - 13107) // 2 + 1, (32768 - 2 * 3276 - 13107) // 2, 0]
    finally:
        await pool.close()


@pytest.mark.parametrize("firm", ["one size", "a MIG instance"])
async def test_nothing_is_on_top_where_something_firmer_holds_each_slice(tmp_path: Path, firm: str) -> None:
    facts: dict[str, object] = {"one_size": True} if firm == "one size" else {"mig_profile": "1g.5gb"}
    device = replace(V100, **facts)  # type: ignore[arg-type]
    pool = local_pool(tmp_path / "store.db", SETTINGS, lambda: Inventory((device,), "test"))
    try:
        await pool.request(parse_request("2%..10%"), Holder("ada"), "a")
        assert await bursts(pool) == [0]
    finally:
        await pool.close()
