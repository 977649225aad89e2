"""What is particular to the embedded pool: its URL, its devices, its settings, its history."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.embedded import EmbeddedPool, ledger_path
from gpu_pool.inventory import Inventory
from gpu_pool.ledger.book import Book
from gpu_pool.ledger.database import Database
from gpu_pool.settings import PoolSettings
from gpu_pool_client import BadRequest, EndReason, LeaseState, NotAllowed, Process, connect, parse_request
from support.pools import ME, V100, device, embedded, take


def test_where_the_ledger_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ledger_path("embedded:") == tmp_path / "gpu-pool/ledger.db"
    assert ledger_path("embedded:/a%20b/c.db") == Path("/a b/c.db")
    assert ledger_path("embedded:///x/y") == Path("/x/y")
    assert ledger_path("embedded:~/x") == Path.home() / "x"
    monkeypatch.chdir(tmp_path)
    assert ledger_path("embedded:x.db") == tmp_path / "x.db"
    with pytest.raises(BadRequest, match="embedded:\\[path\\]"):
        ledger_path("embedded:/x?y=1")


async def test_connect_finds_simulated_devices_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:2")
    monkeypatch.setenv("GPU_POOL_URL", f"embedded:{tmp_path}/ledger.db")
    async with connect() as pool:
        status = await pool.status()
    assert [each.device.label for each in status.devices] == ["V100-SXM2-32GB (simulated)"] * 2


async def test_a_process_that_sees_no_device_takes_none_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with embedded(path) as first, EmbeddedPool(path, find_devices=lambda: Inventory((), "")) as second:
        await first.status()
        assert len((await second.status()).devices) == 1
        assert (await second.lease(await take(second, "1", "key"))).state is LeaseState.HELD


async def test_a_device_that_is_gone_is_granted_no_more_and_its_leases_live_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    old, new = device(0), device(1)
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


async def test_the_pools_rules_hold_whatever_is_asked(tmp_path: Path) -> None:
    async with embedded(tmp_path / "ledger.db", max_share=0.1) as pool:
        with pytest.raises(NotAllowed):
            await take(pool, "11%", "key")


async def test_one_pool_serves_several_event_loops(tmp_path: Path) -> None:
    pool = embedded(tmp_path / "ledger.db")
    first = await take(pool, "2%", "here")
    there: list[str] = []
    thread = threading.Thread(target=lambda: there.append(asyncio.run(take(pool, "2%", "there"))))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert {lease.id for lease in (await pool.status()).leases} == {first, *there}
    await pool.close()


async def test_the_history_keeps_how_long_what_was_held_and_why_it_ended(tmp_path: Path) -> None:
    path, now = tmp_path / "ledger.db", [1000.0]
    database = Database(path)
    book = Book(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    book.register([V100])
    lease = book.request(parse_request("50%"), ME, "key")
    now[0] += 60
    book.park(lease.id)
    now[0] += 1000
    book.resume(lease.id)
    now[0] += 30
    book.release(lease.id, EndReason.REVOKED)
    database.close()
    with sqlite3.connect(path) as ledger:
        row = ledger.execute("SELECT held_seconds, ended_at, reason, slices, user FROM history").fetchone()
    ledger.close()
    assert row == (90.0, 2090.0, "revoked", "[[1, 500, 16384, 0]]", "ada")


async def test_a_grant_that_nobody_picks_up_ends(tmp_path: Path) -> None:
    now = [1000.0]
    database = Database(tmp_path / "ledger.db")
    book = Book(database, PoolSettings(attach_within=120), Clock(lambda: now[0], lambda: now[0]))
    book.register([V100])
    first = book.request(parse_request("1"), ME, "first")
    second = book.request(parse_request("1"), ME, "second")
    now[0] += 119
    book.look()
    assert book.lease(second.id).state is LeaseState.WAITING
    now[0] += 2
    book.look()
    assert book.lease(first.id).end_reason is EndReason.NEVER_ATTACHED
    assert book.lease(second.id).state is LeaseState.HELD
    now[0] += 119
    book.look()
    assert book.lease(second.id).state is LeaseState.HELD, "its own time began when it was granted"
    database.close()


async def test_renewing_does_not_prolong_the_grace_after_a_death(tmp_path: Path) -> None:
    now = [1000.0]
    database = Database(tmp_path / "ledger.db")
    book = Book(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    book.register([V100])
    lease = book.request(parse_request("1"), ME, "key")
    dead = replace(Process.current(), start=1)
    book.attach(lease.id, dead, ready_within=None, grace=10)
    book.look()
    book.renew(lease.id, None)
    now[0] += 9
    book.look()
    assert book.lease(lease.id).state is LeaseState.HELD
    now[0] += 2
    book.look()
    assert book.lease(lease.id).end_reason is EndReason.PROCESS_GONE
    database.close()


async def test_waiters_of_one_machine_share_one_look(tmp_path: Path) -> None:
    now = [1000.0]
    database = Database(tmp_path / "ledger.db")
    book = Book(database, PoolSettings(attach_within=5), Clock(lambda: now[0], lambda: now[0]))
    book.register([V100])
    lease = book.request(parse_request("1"), ME, "first")
    book.look(at_most_every=10)
    now[0] += 9
    book.look(at_most_every=10)
    assert book.lease(lease.id).state is LeaseState.HELD
    now[0] += 2
    book.look(at_most_every=10)
    assert book.lease(lease.id).state is LeaseState.ENDED
    database.close()
