"""Devices of several machines: what one process gets is of one, and what others have is not granted."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.policy import placement, queue
from gpu_pool.policy.admission import check
from gpu_pool.policy.queue import Holding, Policy, Situation, Usage, Waiter
from gpu_pool.policy.queue_state import Rules
from gpu_pool.pool.pool import GpuPool
from gpu_pool.store import registration, requests
from gpu_pool.store.device_table import ForeignUse
from gpu_pool_client import DeviceStatus, LeaseState, NeverFits, Slice, TimedOut, parse_request
from support.pools import ME, device, embedded, take

TWO = parse_request("2")


def on(node: str, *indexes: int, held: int = 0, **facts: object) -> list[DeviceStatus]:
    """Return the devices of a node, so much held of each."""
    return [
        DeviceStatus(device(index, f"{node}-V100", node=node, **facts), held, 32768 * held // 1000, 0, 0)
        for index in indexes
    ]


def test_several_devices_are_of_one_machine() -> None:
    split, together = [*on("a", 0), *on("b", 0)], [*on("a", 0), *on("b", 0, 1)]
    assert placement.place(TWO, split, Rules()) is None
    parts = placement.place(TWO, together, Rules())
    assert parts is not None
    assert {part.device.node for part in parts} == {"b"}


def test_more_than_any_machine_has_never_fits() -> None:
    devices = [each.device for each in (*on("a", 0, 1), *on("b", 0, 1))]
    check(TWO, devices, Rules())
    with pytest.raises(NeverFits, match="3 GPUs; 2 of one machine here could take part") as caught:
        check(parse_request("3"), devices, Rules())
    assert caught.value.remedy == "Ask for at most 2."


def test_a_slot_of_a_device_in_a_cluster_is_a_pods() -> None:
    (here,) = on("a", 0, contexts=10)
    part = placement.cut(parse_request("2%"), here.device, Rules())
    assert part.contexts == 1
    # Nor does one process have to do with MPS daemons there.
    assert placement.place(TWO, on("a", 0, 1, contexts=10), Rules()) is not None


def test_what_is_emptied_for_a_large_request_is_of_one_machine() -> None:
    statuses = [*on("a", 0, held=20), *on("b", 0, 1, held=20), *on("c", 0, held=20)]
    waiter = Waiter(1, TWO, user="ada", course="", since=0.0)
    held = [Holding("", "", (Slice(each.device, 20, 655),), 60.0) for each in statuses]
    situation = Situation([waiter], held, statuses, Rules(), Policy(drain_after=1.0), Usage(), 10.0)
    reserved = queue.decide(situation).reservations[1]
    assert {each.device.node for each in statuses if each.device.uuid in reserved} == {"b"}


@pytest.fixture
async def pool(tmp_path: Path) -> GpuPool:
    return embedded(tmp_path / "store.db", device(0), device(1))


async def others(pool: GpuPool, **found: ForeignUse) -> None:
    uuids = {f"d{each.index}": each.uuid for each in (device(0), device(1))}
    await pool.store.run(registration.set_others, {uuids[name]: other for name, other in found.items()})


async def test_what_others_have_is_not_free_and_serves_the_line_once_it_is(pool: GpuPool) -> None:
    await others(pool, d0=ForeignUse(700, 20_000, 1), d1=ForeignUse(1000, 32768, 1))
    status = await pool.status()
    assert [(each.free_milli, each.free_memory_mib) for each in status.devices] == [(300, 12768), (0, 0)]
    waiting = await take(pool, "50%", "key")
    with pytest.raises(TimedOut, match="is free now"):
        await pool.wait(waiting, 0)
    await others(pool, d0=ForeignUse(700, 20_000, 1))
    lease = await pool.get_lease(waiting)
    assert (lease.state, lease.slices[0].device.index) == (LeaseState.HELD, 1)
    await pool.close()


async def test_more_than_there_is_may_be_held_together_and_nothing_is_free_then(pool: GpuPool) -> None:
    await take(pool, "1", "key")
    await others(pool, d0=ForeignUse(1000, 32768, 50))
    assert [each.free_milli for each in (await pool.status()).devices] == [0, 1000]
    await pool.close()


async def test_a_closed_device_stays_closed_whatever_an_administrator_says(pool: GpuPool) -> None:
    await others(pool, d0=ForeignUse(closed=True))
    assert (await pool.drain("0", drained=False)).drained
    assert (await pool.get_lease(await take(pool, "2%", "key"))).slices[0].device.index == 1
    await pool.drain("1")
    await others(pool)
    assert [each.drained for each in (await pool.status()).devices] == [False, True]
    await pool.close()


async def test_a_request_for_some_devices_waits_for_these(pool: GpuPool) -> None:
    request = parse_request("60%")
    only = [device(1).uuid]
    first = await pool.store.run(requests.decide, request, ME, "first", only)
    assert first.slices[0].device.index == 1
    second = await pool.store.run(requests.decide, request, ME, "second", only)
    assert second.state is LeaseState.WAITING
    with pytest.raises(TimedOut, match="40% and"):
        await pool.wait(second.id, 0)
    with pytest.raises(NeverFits):
        await pool.store.run(requests.decide, TWO, ME, "third", only)
    await pool.release(first.id)
    assert (await pool.get_lease(second.id)).slices[0].device.index == 1
    await pool.close()
