"""Nobody keeps the pool busy alone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_pool.audit.callers import Caller
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.decisions import RatePerMinute
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.served_pool import ServedPool
from gpu_pool_client import (
    EndedLease,
    Holder,
    Outlook,
    OverQuota,
    Pool,
    Process,
    SliceRequest,
    parse_request,
)
from support.hub import ADMIN, TESTER, Hub, serving_hub
from support.pools import embedded
from support.service import ForkServer

LOG = logging.getLogger(__name__)


def test_each_user_has_so_many_decisions_a_minute() -> None:
    now = 0.0
    pace = RatePerMinute(60, lambda: now)
    for _ in range(60):
        pace.count("ada")
    with pytest.raises(OverQuota, match="60 change requests within a minute"):
        pace.count("ada")
    pace.count("bob")
    now = 1.5
    pace.count("ada")
    with pytest.raises(OverQuota):
        pace.count("ada")


def test_those_who_ask_too_much_are_remembered_whoever_else_comes() -> None:
    pace = RatePerMinute(1, lambda: 0.0)
    for number in range(2_000):
        pace.count(f"user-{number}")
    with pytest.raises(OverQuota):
        pace.count("user-0")


class Counting:
    """Knows how many questions of each user a pool has answered at once, at most."""

    def __init__(self, pool: GpuPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = pool
        self.under_way: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        read, foresee = GpuPool.history, GpuPool.forecast

        async def history(pool: GpuPool, since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
            with self._answering("all"), self._answering(str(user)):
                return await read(pool, since, user=user)

        async def forecast(pool: GpuPool, request: SliceRequest, holder: Holder) -> Outlook | None:
            with self._answering(holder.user):
                found = await foresee(pool, request, holder)
                await asyncio.sleep(0.01)
                return found

        monkeypatch.setattr(GpuPool, "history", history)
        monkeypatch.setattr(GpuPool, "forecast", forecast)

    @contextmanager
    def _answering(self, user: str) -> Iterator[None]:
        self.under_way[user] += 1
        self.most[user] = max(self.most[user], self.under_way[user])
        yield
        self.under_way[user] -= 1


@pytest.fixture
async def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    async with embedded(tmp_path / "store.db") as pool:
        yield Counting(pool, monkeypatch)


def for_callers(pool: GpuPool, *users: str) -> list[Pool]:
    heartbeats = Heartbeats(10, LOG)
    served = ServedPool(pool, LeaseChanges(pool, LOG, heartbeats), heartbeats, LOG)
    return [served.for_caller(Caller(each, each == "root", each, Process.current())) for each in users]


async def test_a_users_history_is_read_once_at_a_time(counting: Counting) -> None:
    await asyncio.gather(*(each.history() for each in for_callers(counting.pool, "ada", "ada", "ada", "bob")))
    assert counting.most == {"ada": 1, "bob": 1, "all": 2}


async def test_a_users_questions_are_answered_one_at_a_time(counting: Counting) -> None:
    some, callers = parse_request("2%"), for_callers(counting.pool, *["eve", "root"] * 5)
    await asyncio.gather(*(each.forecast(some, Holder("somebody")) for each in callers))
    assert counting.most == {"eve": 1, "root": 5}


async def test_each_user_has_so_many_questions_a_minute(children: ForkServer, hub: Hub, folder: Path) -> None:
    async with serving_hub(children, hub, folder / "pool", "c.ServeApp.max_questions = 6") as behind:
        eve, admin = await hub.token("eve"), await hub.token(ADMIN)
        lease = (await behind.take(eve, "1"))["id"]
        waiting = (await behind.take(eve, "1", "waiting"))["id"]
        questions = [
            "/status",
            "/forecast?request=2%25",
            "/offers",
            f"/leases/{lease}/activity",
            f"/leases/{waiting}/outlook",
            "/status",
        ]
        for question in questions:
            assert (await behind.ask(eve, "GET", question))[0] == 200
        for question in questions:
            status, problem = await behind.ask(eve, "GET", question)
            assert (status, problem["code"]) == (429, "over-quota")
            assert (
                problem["message"] == "You have asked the pool 6 questions in a minute, which is the limit."
            )
        # What is decided, and waited for, is another matter; and so are others.
        assert (await behind.ask(eve, "GET", f"/leases/{lease}"))[0] == 200
        assert (await behind.ask(eve, "DELETE", f"/leases/{lease}"))[0] == 200
        for token in [admin, TESTER] * 8:
            assert (await behind.ask(token, "GET", "/status"))[0] == 200


async def test_questions_do_not_count_and_administrators_may_ask_more(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    async with serving_hub(children, hub, folder / "pool", "c.ServeApp.max_decisions = 2") as behind:
        ada, admin = await hub.token("ada"), await hub.token(ADMIN)
        for token, number in ((ada, 2), (admin, 4)):
            for key in range(number):
                await behind.take(token, "2%", f"key-{key}")
        for _ in range(4):
            assert (await behind.ask(ada, "GET", "/status"))[0] == 200
        status, problem = await behind.ask(ada, "POST", "/leases", {"request": "2%", "key": "third"})
        assert (status, problem["code"]) == (429, "over-quota")


async def test_each_user_may_ask_for_so_many_leases_a_minute(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    async with serving_hub(children, hub, folder / "pool", "c.ServeApp.max_requests = 3") as behind:
        ada, bob, admin = await hub.token("ada"), await hub.token("bob"), await hub.token(ADMIN)
        leases = [(await behind.take(ada, "2%", f"key-{number}"))["id"] for number in range(3)]
        status, problem = await behind.ask(ada, "POST", "/leases", {"request": "2%", "key": "fourth"})
        assert (status, problem["code"]) == (429, "over-quota")
        assert (
            problem["message"] == "You have asked the pool for 3 leases within a minute, which is the limit."
        )
        assert problem["remedy"].startswith("Try again in ")
        # What is sent again is no new one, and what is held goes on; nor do others, or administrators, count.
        assert (await behind.take(ada, "2%", "key-0"))["id"] == leases[0]
        for lease in leases:
            assert (await behind.ask(ada, "POST", f"/leases/{lease}/renew", {"ttl": 60}))[0] == 200
        await behind.take(bob, "2%", "bobs")
        for number in range(4):
            await behind.take(admin, "2%", f"key-{number}")


def test_what_turns_out_to_be_none_is_taken_back() -> None:
    pace = RatePerMinute(2, lambda: 0.0)
    for _ in range(20):
        pace.count("ada")
        pace.take_back("ada")
    pace.take_back("nobody")
    for _ in range(2):
        pace.count("ada")
    with pytest.raises(OverQuota) as refused:
        pace.count("ada")
    assert refused.value.remedy == "Try again in 30 seconds, and send fewer."
