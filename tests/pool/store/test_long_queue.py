"""A long queue: grants are as in a short one, and its order is written down from time to time only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, reclaim, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.tuning import Tuning
from gpu_pool_client import EndReason, Holder, Process, parse_request
from support.pools import device

ME = Process.current()
SIZES = ["1", "1", "50%", "50%", "30%", "20%", "2", "40% model=A100", "1 index=1"]
COURSES = {"a": {"weight": 2}, "b": {"priority": 1}, "c": {}}
GROUPS = {"first": {"users": ["u1"], "priority": 3}}
POOL = [*(device(index) for index in range(3)), device(3, "A100-SXM4-40GB", 40960)]


class ClockedStore:
    """A store whose time stands still until it is moved, and to which any queue is a long one."""

    def __init__(self, path: Path, long_queue: int = 0, **settings: object) -> None:
        self.now = 1e6
        self.database = Database(path)
        clock = Clock(lambda: self.now, lambda: self.now)
        tuning = Tuning(long_queue=long_queue)
        asked = PoolSettings(max_waiting=1000, attach_within=86_400.0, tuning=tuning, **settings)
        self.lease_store = StoreContext(self.database, asked, clock)
        registration.register(self.lease_store, POOL)

    def ask(self, text: str, key: str, user: str = "ada", course: str | None = None) -> None:
        requests.decide(self.lease_store, parse_request(text), Holder(user, course, process=ME), key)

    def end(self, key: str) -> None:
        leases.end_request(self.lease_store, key, EndReason.RELEASED)

    def held(self) -> dict[str, list[str]]:
        """Return the uuids of what is held, by key."""
        told = leases.status(self.lease_store, "").leases
        return {lease.key: [part.device.uuid for part in lease.slices] for lease in told if lease.slices}

    def queue(self) -> list[str]:
        return [lease.key for lease in leases.status(self.lease_store, "").queue]

    def sort_later(self) -> None:
        """Let every decision be as where the queue has just been put in order and is long."""
        with self.database.transaction():
            self.database.run("set_sorted_until", {"until": self.now + 30.0})

    def sort_now(self) -> None:
        with self.database.transaction():
            self.database.run("set_sorted_until", {"until": 0.0})
        reclaim.serve_queue(self.lease_store)


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[ClockedStore]:
    opened = ClockedStore(tmp_path / "store.db")
    yield opened
    opened.database.close()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_whoever_would_be_granted_something_in_a_short_queue_is_in_a_long_one(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    settings = {"courses": COURSES, "groups": GROUPS if seed % 2 else {}, "drain_after": "24h"}
    long = ClockedStore(tmp_path / "long.db", **settings)
    short = ClockedStore(tmp_path / "short.db", long_queue=10_000, **settings)
    keys: list[str] = []
    longest = 0
    for step in range(150):
        long.now = short.now = short.now + chance.choice([0.0, 1.0, 20.0, 300.0])
        doing = chance.random()
        text, user, course = chance.choice(SIZES), f"u{chance.randrange(9)}", chance.choice("abc")
        going = chance.choice(sorted(short.held()) if doing < 0.8 else keys) if keys else ""
        for clocked in (long, short):
            clocked.sort_later()
            if (doing < 0.6 or step < 40) and len(keys) < 80:
                clocked.ask(text, f"k{step}", user, course)
            elif doing < 0.95:
                clocked.end(going)
            else:
                registration.close_device(clocked.lease_store, "0", step % 2 == 0)
        keys = [*short.held(), *short.queue()]
        assert long.held() == short.held()
        assert sorted(long.queue()) == sorted(short.queue())
        longest = max(longest, len(keys) - len(short.held()))
    assert longest > 20
    for clocked in (long, short):
        clocked.database.close()


def test_a_group_comes_first_in_a_long_queue_though_it_came_last(tmp_path: Path) -> None:
    clocked = ClockedStore(tmp_path / "store.db", groups=GROUPS)
    clocked.ask("4", "all")
    clocked.sort_later()
    for number in range(10):
        clocked.now += 1.0
        clocked.ask("1", f"w{number}", f"x{number}")
    clocked.ask("1", "prior", "u1")
    clocked.end("all")
    assert sorted(clocked.held()) == ["prior", "w0", "w1", "w2"]
    clocked.database.close()


def test_a_long_queue_is_put_in_order_when_it_is_time(clocked: ClockedStore) -> None:
    clocked.ask("4", "all")
    clocked.sort_later()
    clocked.ask("1", "has-1", "has")
    clocked.ask("1", "has-2", "has")
    clocked.ask("1", "new", "new")
    assert clocked.queue() == ["has-1", "has-2", "new"]
    clocked.sort_now()
    assert clocked.queue() == ["has-1", "new", "has-2"]


def test_what_is_emptied_for_one_goes_to_nobody_else(clocked: ClockedStore) -> None:
    for index in range(4):
        clocked.ask(f"50% index={index}", f"first-{index}")
        clocked.ask(f"50% index={index}", f"second-{index}", "other")
    clocked.ask("1", "large", "late")
    clocked.now += 2000.0
    clocked.sort_now()
    [kept] = [row["reserved"] for row in clocked.database.run("reserved").fetchall()]
    clocked.sort_later()
    clocked.ask("50%", "small", "new")
    ends = [key for key, uuids in clocked.held().items() if uuids == [kept]]
    clocked.end(ends[0])
    assert "small" not in clocked.held()
    clocked.end(ends[1])
    assert clocked.held()["large"] == [kept]
    assert "small" not in clocked.held()


def test_what_is_left_of_a_reservation_that_cannot_stand_is_free_at_once(clocked: ClockedStore) -> None:
    for index, size in enumerate(["1", "1", "50%", "50%"]):
        clocked.ask(f"{size} index={index}", f"held-{index}")
    clocked.ask("2", "large", "late")
    clocked.now += 2000.0
    clocked.sort_now()
    clocked.sort_later()
    clocked.ask("50%", "small", "new")
    assert "small" not in clocked.held()
    registration.close_device(clocked.lease_store, "3", drained=True)
    assert clocked.held()["small"] == [POOL[2].uuid]


def test_leaving_moves_up_whoever_follows_and_writes_nothing_about_them(tmp_path: Path) -> None:
    clocked = ClockedStore(tmp_path / "store.db", long_queue=200)
    clocked.ask("4", "all")
    for number in range(5):
        clocked.ask("1", f"w{number}", f"u{number}")
    turns = {row["number"]: row["turn"] for row in clocked.database.run("waiters").fetchall()}
    clocked.end("w1")
    assert clocked.queue() == ["w0", "w2", "w3", "w4"]
    assert [lease.position for lease in leases.status(clocked.lease_store, "").queue] == [1, 2, 3, 4]
    assert all(turns[row["number"]] == row["turn"] for row in clocked.database.run("waiters").fetchall())
    clocked.database.close()


def test_how_long_the_wait_may_be_is_not_worked_out_for_a_long_queue(tmp_path: Path) -> None:
    short = ClockedStore(tmp_path / "store.db", long_queue=200)
    for number in range(5):
        short.ask("4", f"past-{number}")
        short.now += 60.0
        short.end(f"past-{number}")
    short.ask("4", "all")
    short.ask("1", "next")
    [waiting] = leases.status(short.lease_store, "").queue
    assert requests.prospects(short.lease_store) is not None
    told = requests.why_waiting(short.lease_store, waiting.id)
    long = ClockedStore(tmp_path / "store.db")
    long.now = short.now
    assert requests.prospects(long.lease_store) is None
    assert requests.why_waiting(long.lease_store, waiting.id) == told
    for clocked in (long, short):
        clocked.database.close()
