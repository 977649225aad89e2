"""A long queue: grants are as in a short one, and its order is written down from time to time only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.settings import PoolSettings
from gpu_pool.store import queue
from gpu_pool.store.database import Database
from gpu_pool.store.leases import LeaseStore
from gpu_pool_client import EndReason, Holder, Process, parse_request
from support.pools import device

ME = Process.current()
WISHES = ["1", "1", "50%", "50%", "30%", "20%", "2", "40% model=A100", "1 index=1"]
COURSES = {"a": {"weight": 2}, "b": {"priority": 1}, "c": {}}
GROUPS = {"first": {"users": ["u1"], "priority": 3}}
POOL = [*(device(index) for index in range(3)), device(3, "A100-SXM4-40GB", 40960)]


class Desk:
    """A book whose time stands still until it is moved."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.now = 1e6
        self.database = Database(path)
        clock = Clock(lambda: self.now, lambda: self.now)
        self.book = LeaseStore(
            self.database, PoolSettings(max_waiting=1000, attach_within=86_400.0, **settings), clock
        )
        self.book.register(POOL)

    def ask(self, text: str, key: str, user: str = "ada", course: str | None = None) -> None:
        self.book.request(parse_request(text), Holder(user, course, process=ME), key)

    def end(self, key: str) -> None:
        self.book.release_key(key, EndReason.RELEASED)

    def held(self) -> dict[str, list[str]]:
        """Return the uuids of what is held, by key."""
        leases = self.book.status("").leases
        return {lease.key: [part.device.uuid for part in lease.slices] for lease in leases if lease.slices}

    def line(self) -> list[str]:
        return [lease.key for lease in self.book.status("").queue]

    def sort_later(self) -> None:
        """Let every decision be as where the queue has just been put in order and is long."""
        with self.database.transaction():
            self.database.run("set_sorted_until", {"until": self.now + 30.0})

    def sort_now(self) -> None:
        with self.database.transaction():
            self.database.run("set_sorted_until", {"until": 0.0})
        self.book.look(at_most_every=1e-6)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path / "store.db")
    yield opened
    opened.database.close()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_whoever_would_be_granted_something_in_a_short_line_is_in_a_long_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    settings = {"courses": COURSES, "groups": GROUPS if seed % 2 else {}, "drain_after": "24h"}
    long, short = (Desk(tmp_path / name, **settings) for name in ("long.db", "short.db"))
    keys: list[str] = []
    longest = 0
    for step in range(150):
        long.now = short.now = short.now + chance.choice([0.0, 1.0, 20.0, 300.0])
        doing = chance.random()
        text, user, course = chance.choice(WISHES), f"u{chance.randrange(9)}", chance.choice("abc")
        going = chance.choice(sorted(short.held()) if doing < 0.8 else keys) if keys else ""
        for desk in (long, short):
            monkeypatch.setattr(queue, "_LONG", 0 if desk is long else 10_000)
            desk.sort_later()
            if (doing < 0.6 or step < 40) and len(keys) < 80:
                desk.ask(text, f"k{step}", user, course)
            elif doing < 0.95:
                desk.end(going)
            else:
                desk.book.drain("0", step % 2 == 0)
        keys = [*short.held(), *short.line()]
        assert long.held() == short.held()
        assert sorted(long.line()) == sorted(short.line())
        longest = max(longest, len(keys) - len(short.held()))
    assert longest > 20
    for desk in (long, short):
        desk.database.close()


def test_a_group_comes_first_in_a_long_line_though_it_came_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_LONG", 0)
    desk = Desk(tmp_path / "store.db", groups=GROUPS)
    desk.ask("4", "all")
    desk.sort_later()
    for number in range(10):
        desk.now += 1.0
        desk.ask("1", f"w{number}", f"x{number}")
    desk.ask("1", "prior", "u1")
    desk.end("all")
    assert sorted(desk.held()) == ["prior", "w0", "w1", "w2"]
    desk.database.close()


def test_a_long_line_is_put_in_order_when_it_is_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_LONG", 0)
    desk.ask("4", "all")
    desk.sort_later()
    desk.ask("1", "has-1", "has")
    desk.ask("1", "has-2", "has")
    desk.ask("1", "new", "new")
    assert desk.line() == ["has-1", "has-2", "new"]
    desk.sort_now()
    assert desk.line() == ["has-1", "new", "has-2"]


def test_what_is_emptied_for_one_goes_to_nobody_else(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_LONG", 0)
    for index in range(4):
        desk.ask(f"50% index={index}", f"first-{index}")
        desk.ask(f"50% index={index}", f"second-{index}", "other")
    desk.ask("1", "large", "late")
    desk.now += 2000.0
    desk.sort_now()
    [kept] = [row["reserved"] for row in desk.database.run("reserved").fetchall()]
    desk.sort_later()
    desk.ask("50%", "small", "new")
    ends = [key for key, uuids in desk.held().items() if uuids == [kept]]
    desk.end(ends[0])
    assert "small" not in desk.held()
    desk.end(ends[1])
    assert desk.held()["large"] == [kept]
    assert "small" not in desk.held()


def test_what_is_left_of_a_reservation_that_cannot_stand_is_free_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_LONG", 0)
    for index, size in enumerate(["1", "1", "50%", "50%"]):
        desk.ask(f"{size} index={index}", f"held-{index}")
    desk.ask("2", "large", "late")
    desk.now += 2000.0
    desk.sort_now()
    desk.sort_later()
    desk.ask("50%", "small", "new")
    assert "small" not in desk.held()
    desk.book.drain("3", drained=True)
    assert desk.held()["small"] == [POOL[2].uuid]


def test_leaving_moves_up_whoever_follows_and_writes_nothing_about_them(desk: Desk) -> None:
    desk.ask("4", "all")
    for number in range(5):
        desk.ask("1", f"w{number}", f"u{number}")
    turns = {row["number"]: row["turn"] for row in desk.database.run("waiters").fetchall()}
    desk.end("w1")
    assert desk.line() == ["w0", "w2", "w3", "w4"]
    assert [lease.position for lease in desk.book.status("").queue] == [1, 2, 3, 4]
    assert all(turns[row["number"]] == row["turn"] for row in desk.database.run("waiters").fetchall())


def test_how_long_the_wait_may_be_is_not_worked_out_for_a_long_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        desk.ask("4", f"past-{number}")
        desk.now += 60.0
        desk.end(f"past-{number}")
    desk.ask("4", "all")
    desk.ask("1", "next")
    [waiting] = desk.book.status("").queue
    assert desk.book.prospects() is not None
    told = desk.book.explain(waiting.id)
    monkeypatch.setattr(queue, "_LONG", 0)
    assert desk.book.prospects() is None
    assert desk.book.explain(waiting.id) == told
