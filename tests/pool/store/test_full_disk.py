"""A store on a disk without room: what can be read is read, and nothing is lost. The disks are real."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool_client import EndReason, LeaseState, Pool, PoolStatus, parse_request
from support.disks import Disk, small_disk
from support.pools import ME, embedded, eventually, identity, running, take


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


async def test_the_pool_is_shown_on_a_full_disk_and_what_has_ended_is_noted_later(disk: Disk) -> None:
    path = disk.path / "store.db"
    with running() as process:
        async with embedded(path) as pool:
            lease = await take(pool, "10%", "key")
            await pool.attach(lease, identity(process))
        disk.fill()
        # Nobody has it open: SQLite cannot make the files that it wants beside it.
        async with embedded(path) as pool:
            seen = await pool.status()
            assert ([each.id for each in seen.leases], seen.note) == ([lease], "")
            with pytest.raises(NoSpace, match=rf"the disk at {disk.path}: it is full\. Free 20 MiB there"):
                await take(pool, "2%", "more")
            process.kill()
            process.wait()
            seen = await pool.status()
            assert (seen.leases, seen.note, seen.devices[0].held_milli) == ((), "", 0)
            assert (await pool.get_lease(lease)).end_reason is EndReason.PROCESS_GONE
            with pytest.raises(NoSpace):
                await pool.core.reconciler.once()
            assert await pool.history() == []
            disk.empty()
            await pool.core.reconciler.once()
            assert [each.id for each in await pool.history()] == [lease]
            assert (await pool.get_lease(await take(pool, "1", "all-of-it"))).state is LeaseState.HELD


async def test_decisions_go_on_in_the_room_that_the_store_has(disk: Disk) -> None:
    async with embedded(disk.path / "store.db") as pool:
        for number in range(5):
            await pool.release(await take(pool, "2%", f"key{number}"))
        held = [await take(pool, "10%", f"held{number}") for number in range(3)]
        disk.fill()
        for lease in held:  # each is written over what was written before
            await pool.release(lease)
        assert (await pool.status()).leases == ()


async def test_many_who_ask_at_once_are_all_told_so(disk: Disk) -> None:
    async with embedded(disk.path / "store.db") as pool:
        await pool.status()
        disk.fill()
        asked = (take(pool, "1.5%", f"key{number}") for number in range(60))
        told = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in told if isinstance(each, BaseException)]
        assert refused
        assert {type(each) for each in refused} == {NoSpace}
        disk.empty()
        assert len((await pool.status()).leases) == len(told) - len(refused)


async def test_who_only_reads_is_answered_beside_those_for_whom_there_is_no_room(disk: Disk) -> None:
    async with embedded(disk.path / "store.db") as pool:
        await pool.status()
        with closing(sqlite3.connect(disk.path / "store.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM lease").fetchall()
            disk.fill()
            asked = [take(pool, "1.5%", f"key{number}") for number in range(30)]
            looks = [pool.status() for _ in range(30)]
            both = (each for pair in zip(asked, looks, strict=True) for each in pair)
            told = await asyncio.gather(*both, return_exceptions=True)
        assert {type(each) for each in told[1::2]} == {PoolStatus}
        assert NoSpace in {type(each) for each in told[0::2]}


async def is_queued(pool: Pool) -> bool:
    return len((await pool.status()).queue) == 1


async def test_a_request_given_up_on_a_full_disk_is_no_more_once_there_is_room(disk: Disk) -> None:
    path = disk.path / "store.db"
    async with embedded(path) as pool:
        await take(pool, "1", "first")
        acquiring = asyncio.create_task(pool.acquire(parse_request("50%"), ME, "second"))
        await eventually(lambda: is_queued(pool))
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            # Whoever reads keeps what was written from being written over.
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM lease").fetchall()
            disk.fill()
            acquiring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await acquiring
            assert len((await pool.status()).queue) == 1
            with pytest.raises(NoSpace):
                await take(pool, "2%", "third")
        disk.empty()
        await take(pool, "2%", "fourth")
        assert [each.key for each in (await pool.status()).queue] == ["fourth"]


async def test_a_disk_without_inodes_is_told(disk: Disk) -> None:
    path = disk.path / "store.db"
    async with embedded(path) as pool:
        await pool.status()
    disk.take_all_inodes()
    async with embedded(path) as pool:
        with pytest.raises(NoSpace, match=r"as many files as it can \(no inodes\)\. Remove some files"):
            await take(pool, "2%", "key")
        assert len((await pool.status()).devices) == 1


async def test_a_file_system_that_cannot_be_written_is_told(disk: Disk) -> None:
    path = disk.path / "store.db"
    async with embedded(path) as pool:
        await pool.status()
    disk.write_protect()
    async with embedded(path) as pool:
        with pytest.raises(StoreUnusable, match=rf"the file system at {disk.path} is read-only\. Mount it"):
            await pool.status()
