"""Nobody fills the queue alone: how many leases one user may wait for at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_pool_client import Holder, LeaseState, OverQuota, parse_request
from support.pools import device, embedded, take

GRACE = Holder("grace")


async def test_one_more_than_may_wait_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_waiting=2) as pool:
        await take(pool, "1", "held")
        waiting = [await take(pool, "1", "one"), await take(pool, "1", "two")]
        with pytest.raises(OverQuota, match="wait for 2 slices already; 2 is the most") as refused:
            await take(pool, "1", "three")
        assert "gpu-pool release" in refused.value.remedy
        assert [lease.id for lease in (await pool.status()).queue] == waiting


async def test_who_would_be_refused_is_not_promised_a_place(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_waiting=1) as pool:
        await take(pool, "1", "held", GRACE)
        assert await pool.forecast(parse_request("1"), GRACE) is not None
        await take(pool, "1", "waits", GRACE)
        with pytest.raises(OverQuota, match="wait for 1 slices already"):
            await pool.forecast(parse_request("1"), GRACE)
        assert await pool.forecast(parse_request("1"), Holder("ada")) is not None
        # Nobody in particular, who may be told, has no leases.
        assert await pool.forecast(parse_request("1"), Holder("")) is not None


async def test_it_counts_for_each_user_alone_and_repeated_requests_once(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_waiting=1) as pool:
        await take(pool, "1", "held")
        mine = await take(pool, "1", "mine")
        assert await take(pool, "1", "mine") == mine
        await take(pool, "1", "hers", GRACE)
        await pool.release(mine)
        await take(pool, "1", "next")


async def test_what_is_granted_at_once_does_not_wait(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", device(0), device(1), max_waiting=1) as pool:
        await take(pool, "80%", "held")
        await take(pool, "2x50%", "waits")
        await pool.drain("1")
        with pytest.raises(OverQuota):
            await take(pool, "1", "more")
        await pool.release((await pool.status()).queue[0].id)
        lease = await pool.request(parse_request("20%"), GRACE, "small")
        assert lease.state is LeaseState.HELD


async def test_a_parked_lease_comes_back_however_many_wait(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_waiting=1) as pool:
        parked = await take(pool, "1", "parked")
        await pool.park(parked)
        await take(pool, "1", "held", GRACE)
        assert (await pool.resume(parked)).state is LeaseState.WAITING
        await take(pool, "1", "waits")
        with pytest.raises(OverQuota):
            await take(pool, "1", "more")


async def test_no_more_wait_however_many_ask_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, max_waiting=3) as one, embedded(path, max_waiting=3) as other:
        await take(one, "1", "held")
        asked = [take(each, "1", f"{number}-{each is one}") for number in range(6) for each in (one, other)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, OverQuota) for each in answers) == 9
        assert len((await one.status()).queue) == 3


async def test_nought_is_no_limit(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_waiting=0) as pool:
        for number in range(110):
            await take(pool, "1", f"key-{number}")
        assert len((await pool.status()).queue) == 109
