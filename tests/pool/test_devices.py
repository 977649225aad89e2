"""Which devices a pool has, when the processes that open its store do not see the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.store import registration
from gpu_pool.store.database import Database
from gpu_pool.store.errors import OtherDevices, StoreUnusable
from gpu_pool_client import Device, LeaseState, NeverFits, parse_request
from support.pools import ME, device, embedded, identity, running, take


def real(index: int) -> Device:
    return replace(device(index), simulated=False)


async def devices(path: Path, *seen: Device) -> list[Device]:
    """Return the pool's devices after a process that sees these has opened it."""
    async with embedded(path, *seen) as pool:
        return [each.device for each in (await pool.status()).devices]


async def test_a_process_that_sees_no_device_takes_none_away(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path) as first, local_pool(path, find_devices=lambda: Inventory((), "")) as second:
        await first.status()
        assert len((await second.status()).devices) == 1
        assert (await second.get_lease(await take(second, "1", "key"))).state is LeaseState.HELD


async def test_a_device_that_is_gone_is_granted_no_more_and_its_leases_live_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    old, new = real(0), real(1)
    async with embedded(path, old) as pool:
        lease = await take(pool, "50%", "old")
        async with embedded(path, new) as later:
            await later.status()
            waiting = await later.get_lease(await take(pool, "50% index=1", "new"))
            assert waiting.slices[0].device == new
            assert {each.device.uuid for each in (await pool.status()).devices} == {old.uuid, new.uuid}
            await pool.release(lease)
            assert [each.device for each in (await pool.status()).devices] == [new]


async def test_a_device_whose_facts_change_is_known_anew(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, device(0, driver="550")) as pool:
        await pool.status()
        async with embedded(path, device(0, driver="565")) as later:
            await later.status()
        assert (await pool.status()).devices[0].device.driver == "565"


async def test_a_new_device_serves_the_line(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, device(0)) as pool:
        await take(pool, "1", "first")
        second = await take(pool, "1", "second")
        async with embedded(path, device(0), device(1)) as later:
            assert (await later.get_lease(second)).state is LeaseState.HELD


async def test_a_process_that_sees_other_devices_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    assert await devices(path, real(0)) == [real(0)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(registration, "pid_namespace", lambda: "pid:[of another container]")
        assert await devices(path, real(1)) == [real(1)], "and is offered its own"
    assert await devices(path, real(0)) == [real(0)], "nor is the one here offered what that one saw"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(registration, "pid_namespace", lambda: "pid:[of another container]")
        async with embedded(path, real(1)) as pool:
            assert (await pool.get_lease(await take(pool, "1", "key"))).slices[0].device == real(1)


async def test_simulated_devices_never_replace_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await devices(path, real(0))
    with pytest.raises(StoreUnusable, match="in use for V100-SXM2-32GB; .* GPU_POOL_URL"):
        await devices(path, device(1))
    assert await devices(path, real(0)) == [real(0)]


async def test_simulated_devices_are_replaced_only_when_nobody_uses_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, device(0)) as pool:
        lease = await take(pool, "2%", "key")
        with pytest.raises(OtherDevices, match=r"in use for V100-SXM2-32GB \(simulated\) \(1 lease\)"):
            await devices(path, device(1))
        await pool.release(lease)
    assert await devices(path, device(1)) == [device(1)]
    assert await devices(path, real(2)) == [real(2)]


async def test_a_real_device_waits_for_the_end_of_what_holds_simulated_ones(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, real(2)) as later:
        async with embedded(path, device(0)) as pool:
            lease = await take(pool, "2%", "key")
            seen = await later.status()
            assert [each.device for each in seen.devices] == [device(0)], "what there is to end is shown"
            assert [each.id for each in seen.leases] == [lease]
            assert "in use for V100-SXM2-32GB (simulated) (1 lease)" in seen.note
            for ask in (take(later, "2%", "new"), later.forecast(parse_request("2%"), ME)):
                with pytest.raises(OtherDevices, match="Simulated and real GPUs are never in one pool"):
                    await ask
            await later.release(lease)
            with pytest.raises(OtherDevices, match="what was started with GPU_POOL_DEVICES"):
                await take(later, "2%", "new")
        held = await later.get_lease(await take(later, "2%", "new"))
        assert [part.device for part in held.slices] == [real(2)]
        seen = await later.status()
        assert ([each.device for each in seen.devices], seen.note) == ([real(2)], "")
        assert [row.id for row in await later.history()] == [lease], "what was is not lost"


async def test_a_service_does_not_start_on_what_others_hold_of_simulated_devices(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, device(0)) as pool:
        await take(pool, "2%", "key")
    service = local_pool(path, find_devices=lambda: Inventory((real(2),), ""), owner=True)
    with pytest.raises(OtherDevices, match="gpu-pool release ID"):
        async with service:
            pass


@pytest.mark.parametrize("seen", [(real(2),), ()], ids=["a real GPU", "none"])
async def test_leases_of_processes_that_are_gone_keep_no_simulated_device(
    tmp_path: Path, seen: tuple[Device, ...]
) -> None:
    path = tmp_path / "store.db"
    with running() as process:
        async with embedded(path, device(0)) as pool:
            await pool.attach(await take(pool, "2%", "key"), identity(process))
    # As after a crash or a reboot: nobody has looked since.
    async with local_pool(path, find_devices=lambda: Inventory(seen, "")) as later:
        status = await later.status()
    assert (tuple(each.device for each in status.devices), status.leases) == (seen, ())


async def test_simulated_devices_are_forgotten_when_nobody_uses_them_any_more(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, device(0)) as pool:
        lease = await take(pool, "2%", "key")
        await pool.drain("0")
        assert await devices_without_gpu(path) == [device(0)]
        await pool.release(lease)
        assert await devices_without_gpu(path) == [device(0)], "a process uses them still"
    assert await devices_without_gpu(path) == []
    async with embedded(path, device(0)) as again:
        (back,) = (await again.status()).devices
        assert (back.device, back.drained) == (device(0), True)
        assert [row.id for row in await again.history()] == [lease]


async def devices_without_gpu(path: Path) -> list[Device]:
    """Return the pool's devices after a process that sees none has opened it."""
    async with local_pool(path, find_devices=lambda: Inventory((), "")) as pool:
        return [each.device for each in (await pool.status()).devices]


async def test_looking_does_not_wait_for_those_who_write(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await devices(path, device(0))
    database = Database(path)
    with database.transaction():
        assert await devices(path, device(0)) == [device(0)]
    database.close()


def given(*mine: Device, of: tuple[Device, ...]) -> Callable[[], Inventory]:
    """Return what a process finds that was given some of a machine's devices."""
    others = tuple(each for each in of if each not in mine)
    gpus = tuple(each.uuid for each in of)
    return lambda: Inventory(mine, "test", ("A problem.", "A way."), others, gpus, is_limited=True)


THREE = real(0), real(1), real(2)


async def test_a_process_has_only_devices_that_it_was_given_whoever_grants_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    first = local_pool(path, find_devices=given(real(0), of=THREE))
    second = local_pool(path, find_devices=given(real(1), of=THREE))
    async with first, second, local_pool(path, find_devices=given(of=THREE)) as nobody:
        mine = await take(first, "1", "mine")
        theirs = await take(second, "1", "theirs")
        assert (await first.get_lease(mine)).slices[0].device == real(0)
        assert (await first.get_lease(theirs)).slices[0].device == real(1)
        waiting = await take(second, "1", "waiting")
        await first.release(mine)
        assert (await second.get_lease(waiting)).state is LeaseState.WAITING, "what became free is not theirs"
        assert "where the kernel was" not in (await second.explain(waiting)).why
        assert [each.device for each in (await first.status()).devices] == [real(0)]
        assert [each.device for each in (await second.status()).devices] == [real(1)]
        with pytest.raises(NeverFits, match=r"You asked for 2%; this pool has no GPU. A problem. A way."):
            await take(nobody, "2%", "none")
        assert (await nobody.status()).devices == ()
        with pytest.raises(NeverFits, match="this pool has one"):
            await take(first, "2", "two")
        await second.release(theirs)
        assert (await second.get_lease(waiting)).slices[0].device == real(1)
        assert (await first.get_lease(await take(first, "1", "again"))).slices[0].device == real(0)


async def test_processes_of_one_user_that_are_shown_different_gpus_take_none_away(tmp_path: Path) -> None:
    """Two jobs on one machine, whose driver shows each its own GPU alone."""
    path = tmp_path / "store.db"
    first = local_pool(path, find_devices=lambda: Inventory((real(0),), "test", gpus=(real(0).uuid,)))
    second = local_pool(path, find_devices=lambda: Inventory((real(1),), "test", gpus=(real(1).uuid,)))
    async with first, second:
        await first.status()
        await second.status()
        assert (await first.get_lease(await take(first, "1", "mine"))).slices[0].device == real(0)
        assert (await second.get_lease(await take(second, "1", "theirs"))).slices[0].device == real(1)
        assert (await first.get_lease(await take(first, "1", "more"))).state is LeaseState.WAITING


async def test_what_others_were_given_is_there_for_whoever_is_not_limited(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    everything = local_pool(path, find_devices=lambda: Inventory(THREE, "", gpus=tuple(map(uuid, THREE))))
    async with everything, local_pool(path, find_devices=given(real(1), of=THREE)) as limited:
        await everything.status()
        await limited.status()
        assert [each.device for each in (await everything.status()).devices] == list(THREE)
        assert len((await everything.get_lease(await take(everything, "3", "all"))).slices) == 3


async def test_a_service_has_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with local_pool(path, find_devices=lambda: Inventory(THREE, "test"), owner=True) as before:
        await before.status()
    async with local_pool(path, find_devices=given(real(1), of=THREE), owner=True) as service:
        assert [each.device for each in (await service.status()).devices] == [real(1)]
        assert service.core.registry.problems == ("A problem.", "A way.")


def uuid(found: Device) -> str:
    return found.uuid
