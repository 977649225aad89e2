"""Decisions that are asked for at once have one transaction, and each its own fate."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool.worker import Worker
from gpu_pool_client import EndReason, LeaseState, NeverFits, parse_request
from support.pools import ME, V100, embedded

SMALL = parse_request("2%")


class OpenStore:
    """A connection to a store of one V100."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self.lease_store = StoreContext(self.database, PoolSettings())
        registration.register(self.lease_store, [V100])

    def keys(self) -> list[str]:
        return [lease.key for lease in leases.status(self.lease_store, "").leases]

    def ask_and_fail(self) -> None:
        requests.decide(self.lease_store, SMALL, ME, "a")
        raise ZeroDivisionError

    def drain_and_fail(self) -> None:
        with self.database.transaction():
            self.database.run("set_drained", {"id": 1, "drained": 1, "hibernate": 0, "now": 0.0})
            raise ZeroDivisionError


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[OpenStore, OpenStore]]:
    one, other = OpenStore(tmp_path / "store.db"), OpenStore(tmp_path / "store.db")
    yield one, other
    one.database.close()
    other.database.close()


def test_others_see_a_block_at_its_end_and_as_a_whole(stores: tuple[OpenStore, OpenStore]) -> None:
    here, there = stores
    with here.database.together():
        lease = requests.decide(here.lease_store, SMALL, ME, "a")
        requests.decide(here.lease_store, SMALL, ME, "b")
        leases.end_lease(here.lease_store, lease.id, EndReason.RELEASED)
        assert here.keys() == ["b"]
        assert there.keys() == []
    assert there.keys() == ["b"]
    assert leases.read(there.lease_store, lease.id).end_reason is EndReason.RELEASED


def test_what_fails_is_undone_alone(stores: tuple[OpenStore, OpenStore]) -> None:
    here, there = stores
    with here.database.together():
        requests.decide(here.lease_store, SMALL, ME, "a")
        with pytest.raises(ZeroDivisionError):
            here.drain_and_fail()
        requests.decide(here.lease_store, SMALL, ME, "b")
    assert there.keys() == ["a", "b"]
    assert not leases.status(there.lease_store, "").devices[0].drained


def test_of_a_block_that_fails_nothing_is_left_and_the_next_one_works(
    stores: tuple[OpenStore, OpenStore],
) -> None:
    here, there = stores
    with pytest.raises(ZeroDivisionError), here.database.together():
        here.ask_and_fail()
    assert here.keys() == there.keys() == []
    requests.decide(there.lease_store, SMALL, ME, "b")
    assert here.keys() == ["b"]


def test_a_transaction_that_sqlite_has_undone_is_told_to_all_that_follow(
    stores: tuple[OpenStore, OpenStore],
) -> None:
    here, there = stores
    block = here.database.together()
    block.__enter__()
    requests.decide(here.lease_store, SMALL, ME, "a")
    # As SQLite does by itself where the disk is full.
    here.database._connection.execute("ROLLBACK")
    with pytest.raises(StoreUnusable, match="could not be written"):
        requests.decide(here.lease_store, SMALL, ME, "b")
    with pytest.raises(StoreUnusable):
        block.__exit__(None, None, None)
    assert here.keys() == there.keys() == []


def test_why_sqlite_has_undone_a_block_is_told_to_all_of_it(stores: tuple[OpenStore, OpenStore]) -> None:
    here, there = stores
    block = here.database.together()
    block.__enter__()
    requests.decide(here.lease_store, SMALL, ME, "a")
    with pytest.raises(NoSpace), here.database.transaction():
        _undo(here)
    with pytest.raises(NoSpace):
        requests.decide(here.lease_store, SMALL, ME, "b")
    with pytest.raises(NoSpace):
        block.__exit__(None, None, None)
    assert here.keys() == there.keys() == []


def test_a_block_that_is_closed_in_its_middle_is_kept(tmp_path: Path) -> None:
    here = OpenStore(tmp_path / "store.db")
    with here.database.together():
        requests.decide(here.lease_store, SMALL, ME, "a")
        here.database.close()
    there = OpenStore(tmp_path / "store.db")
    assert there.keys() == ["a"]
    there.database.close()


async def test_all_who_ask_a_pool_at_once_have_their_own_answer(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        await pool.status()
        sizes = ["2%", "64GiB"] * 60
        asked = (pool.request(parse_request(size), ME, f"{n}") for n, size in enumerate(sizes))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, NeverFits) for each in answers[1::2])
        leases = [each for each in answers[::2] if not isinstance(each, BaseException)]
        assert [each.key for each in leases] == [str(n) for n in range(0, 120, 2)]
        assert [each.state for each in leases].count(LeaseState.HELD) == 50
        status = await pool.status()
        assert (len(status.leases), len(status.queue)) == (50, 10)


async def test_jobs_are_done_together_and_each_alone_if_that_fails() -> None:
    blocks: list[str] = []

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        blocks.append("begun")
        yield
        raise OSError("no space")

    worker, begun, go_on = Worker("test", together), threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go_on.wait()

    alone = asyncio.create_task(worker.run(wait, 20))
    await asyncio.to_thread(begun.wait)

    def write() -> None:
        if len(blocks) == 1 and done.count("write"):
            raise OSError("no space")
        done.append("write")

    done: list[str] = []
    jobs: list[Callable[[], None]] = [lambda: done.append("read"), write, lambda: done.append("read")]
    others = [asyncio.create_task(worker.run(job, 20)) for job in jobs]
    await asyncio.sleep(0)
    go_on.set()
    assert await alone
    outcomes = await asyncio.gather(*others, return_exceptions=True)
    assert [str(each) for each in outcomes] == ["None", "no space", "None"]
    assert done == ["read", "write", "read", "read", "read"]
    assert blocks == ["begun"]
    worker.stop()


def _undo(store: OpenStore) -> None:
    """Do as SQLite does by itself where the disk is full."""
    store.database._connection.execute("ROLLBACK")
    raise sqlite3.OperationalError("database or disk is full")
