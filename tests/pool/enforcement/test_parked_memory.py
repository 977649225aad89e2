"""A pool that moves what parked leases keep on their GPU, against a stand-in for the driver."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from gpu_pool_client import (
    Device,
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Pool,
    PoolUnreachable,
    Process,
    parse_request,
)
from support.cuda_stub import Driver
from support.pools import ME, eventually

H100 = Device("GPU-1", 0, "NVIDIA H100", 81559, driver="580.95.05")
ANOTHER = replace(H100, uuid="GPU-2", index=1)
WHOLE = parse_request("1")


@pytest.fixture
def pid(driver: Driver) -> Iterator[int]:
    """A process that has initialised CUDA."""
    with driver.process() as pid:
        yield pid


def open_pool(
    folder: Path, driver: Driver, devices: tuple[Device, ...] = (H100,), **settings: object
) -> GpuPool:
    inventory = Inventory(devices, "test")
    tuning = Tuning(cuda_device=str(driver.uvm), memory_free_within=0, restored_every=0.0)
    return local_pool(folder / "store.db", PoolSettings(tuning=tuning, **settings), lambda: inventory)


@pytest.fixture
async def pool(tmp_path: Path, driver: Driver) -> AsyncIterator[Pool]:
    async with open_pool(tmp_path, driver, checkpoint=True) as opened:
        yield opened


async def held(pool: Pool, pid: int | None = None) -> Lease:
    lease = await pool.request(WHOLE, ME, uuid.uuid4().hex)
    return lease if pid is None else await pool.attach(lease.id, identity(pid))


def identity(pid: int) -> Process:
    found = Process.of(pid)
    assert found is not None
    return found


async def test_what_it_keeps_is_moved_away_and_back(pool: Pool, driver: Driver, pid: int) -> None:
    lease = await held(pool, pid)
    assert (await pool.activity(lease.id)).movable
    await pool.park(lease.id)
    assert driver.state(pid) == "checkpointed"
    other = await held(pool)
    assert (await pool.resume(lease.id)).state is LeaseState.WAITING
    assert driver.state(pid) == "checkpointed"
    await pool.release(other.id)
    assert (await pool.wait(lease.id)).state is LeaseState.HELD
    assert driver.state(pid) == "running"


async def test_a_slice_that_is_free_is_back_at_once(pool: Pool, driver: Driver, pid: int) -> None:
    lease = await held(pool, pid)
    await pool.park(lease.id)
    assert (await pool.resume(lease.id)).state is LeaseState.HELD
    assert driver.state(pid) == "running"


async def test_it_is_moved_back_where_whoever_it_gave_way_to_goes_meanwhile(
    pool: Pool, driver: Driver, pid: int
) -> None:
    lease = await held(pool, pid)
    await pool.report_busy(lease.id, (), gives_way_since=time.time() - 3_600.0)
    waits = await pool.request(WHOLE, Holder("bob", yields=True), uuid.uuid4().hex)
    assert (await pool.get_lease(lease.id)).asked_back is EndReason.YIELDED
    driver.scenario(f"hold lock {pid}")
    going = asyncio.ensure_future(pool.park(lease.id, yields=True))
    await eventually(lambda: "lock" in driver.calls(pid))
    await pool.release(waits.id)
    driver.scenario("")
    assert (await going).state is LeaseState.HELD
    assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
    assert driver.state(pid) == "running"
    assert (await pool.get_lease(lease.id)).held_at == lease.held_at


async def test_a_driver_that_hangs_on_one_gpu_holds_up_nobody_on_another(
    tmp_path: Path, driver: Driver, pid: int
) -> None:
    async with open_pool(tmp_path, driver, (H100, ANOTHER), checkpoint=True) as pool:
        with driver.process(gpu=2) as other:
            leases = [await held(pool), await held(pool)]
            leases.sort(key=lambda lease: lease.slices[0].device.uuid)
            for lease, user in zip(leases, (pid, other), strict=True):
                await pool.attach(lease.id, identity(user))
            driver.scenario("gpus 2", f"hold lock {other}")
            hanging = asyncio.ensure_future(pool.park(leases[1].id))
            await eventually(lambda: "lock" in driver.calls(other))
            await pool.park(leases[0].id)
            await pool.resume(leases[0].id)
            assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
            assert not hanging.done()
            driver.scenario("gpus 2")
            await hanging
            assert driver.state(other) == "checkpointed"


async def test_nothing_is_left_of_what_calls_the_driver_when_a_pool_closes(
    tmp_path: Path, driver: Driver, pid: int
) -> None:
    async with open_pool(tmp_path, driver, checkpoint=True) as pool:
        lease = await held(pool, pid)
        await pool.park(lease.id)
        (worker,) = driver.workers()
        assert Process.of(worker) is not None
    await eventually(lambda: Process.of(worker) is None)


async def test_it_keeps_its_slice_where_the_driver_refuses(pool: Pool, driver: Driver, pid: int) -> None:
    lease = await held(pool, pid)
    driver.scenario(f"fail checkpoint {pid} 801")
    with pytest.raises(NotAllowed, match="the driver does not support it"):
        await pool.park(lease.id)
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
    assert driver.state(pid) == "running"


async def test_it_keeps_its_slice_where_that_is_switched_off(
    tmp_path: Path, driver: Driver, pid: int
) -> None:
    async with open_pool(tmp_path, driver, checkpoint="off") as pool:
        lease = await held(pool, pid)
        assert not (await pool.activity(lease.id)).movable
        with pytest.raises(NotAllowed, match="c.PoolSettings.checkpoint"):
            await pool.park(lease.id)
        assert driver.calls(pid) == []


async def test_what_cannot_be_brought_back_is_ended_and_not_left_broken(
    pool: Pool, driver: Driver, pid: int
) -> None:
    lease = await held(pool, pid)
    await pool.park(lease.id)
    driver.scenario(f"fail restore {pid} 999")
    with pytest.raises(LeaseGone):
        await pool.resume(lease.id)
    await eventually(lambda: Process.of(pid) is None)
    assert (await pool.get_lease(lease.id)).end_reason is EndReason.NOT_RESTORED


async def test_it_stays_parked_in_host_memory_while_something_else_has_its_memory(
    pool: Pool, driver: Driver, pid: int
) -> None:
    lease = await held(pool, pid)
    await pool.park(lease.id)
    driver.scenario("memory 8192", "others 8192")
    with pytest.raises(PoolUnreachable, match="its variables are kept"):
        await pool.resume(lease.id)
    assert driver.state(pid) == "checkpointed"
    driver.scenario()
    await pool.resume(lease.id)
    assert driver.state(pid) == "running"


async def test_a_size_cannot_change_while_something_is_moved_away(
    pool: Pool, driver: Driver, pid: int
) -> None:
    lease = await held(pool, pid)
    await pool.park(lease.id)
    with pytest.raises(NotAllowed, match="cannot change its size"):
        await pool.resize(lease.id, parse_request("10%"))


async def test_another_process_of_the_pool_brings_it_back(tmp_path: Path, driver: Driver, pid: int) -> None:
    async with open_pool(tmp_path, driver, checkpoint=True) as first:
        lease = await held(first, pid)
        await first.park(lease.id)
    async with open_pool(tmp_path, driver, checkpoint=True) as second:
        assert (await second.resume(lease.id)).state is LeaseState.HELD
    assert driver.state(pid) == "running"


async def test_what_was_moved_away_for_a_lease_that_has_ended_is_ended(
    tmp_path: Path, driver: Driver, pid: int
) -> None:
    async with open_pool(tmp_path, driver, checkpoint=True) as first:
        lease = await held(first, pid)
        await first.park(lease.id)
        await first.release(lease.id)
    async with open_pool(tmp_path, driver, checkpoint=True) as second:
        await second.status()
    await eventually(lambda: Process.of(pid) is None)
