"""How a lease's kernel failed is kept with the lease, and after its end in the history."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gpu_pool.pool.pool import GpuPool
from gpu_pool.store import leases
from gpu_pool_client import Failure
from support.pools import embedded, take

FAILED = Failure(1.0, "It ended with status 1. Its last output: no torch", "gpu-pool-1-ab-1", "n1", "lab:1")


async def note(pool: GpuPool, lease_id: str, failure: Failure) -> None:
    await pool.store.run(leases.record_failure, lease_id, failure)


async def test_it_is_kept_while_the_lease_lives_and_after_its_end(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id, other = await take(pool, "2%", "fails"), await take(pool, "2%", "works")
        assert (await pool.get_lease(lease_id)).failure is None
        await note(pool, lease_id, FAILED)
        assert (await pool.get_lease(lease_id)).failure == FAILED
        assert [each.failure for each in (await pool.status()).leases] == [FAILED, None]
        for each in (lease_id, other):
            await pool.release(each)
        assert (await pool.get_lease(lease_id)).failure == FAILED
        rows = {row.id: row.failure for row in await pool.history()}
        assert rows == {lease_id: FAILED, other: None}
        assert await pool.history(user="ada") == await pool.history()


async def test_it_may_be_known_only_after_the_lease_has_ended(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id = await take(pool, "2%", "fails")
        await pool.release(lease_id)
        await note(pool, lease_id, FAILED)
        await note(pool, "9-none", FAILED)
        assert (await pool.get_lease(lease_id)).failure == FAILED


async def test_one_pods_end_is_noted_once_and_the_next_ones_in_its_place(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id = await take(pool, "2%", "fails")
        await note(pool, lease_id, FAILED)
        await note(pool, lease_id, dataclasses.replace(FAILED, at=2.0))
        assert (await pool.get_lease(lease_id)).failure == FAILED
        again = dataclasses.replace(FAILED, at=3.0, pod="gpu-pool-1-ab-2")
        await note(pool, lease_id, again)
        assert (await pool.get_lease(lease_id)).failure == again


async def test_what_a_terminal_could_choke_on_and_what_is_too_long_is_not_kept(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id = await take(pool, "2%", "fails")
        await note(pool, lease_id, dataclasses.replace(FAILED, message="\x1b[2Jred\n" + "x" * 9_000))
        failure = (await pool.get_lease(lease_id)).failure
        assert failure is not None
        assert failure.message == "?[2Jred?" + "x" * 492
