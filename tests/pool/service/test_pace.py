"""Nobody keeps the pool busy alone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.caller import Caller
from gpu_pool.service.authorized_pool import AuthorizedPool
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.rate_limits import RatePerMinute
from gpu_pool_client import EndedLease, Holder, Outlook, OverQuota, Process, SliceRequest
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


async def test_a_users_history_is_read_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: Counter[str] = Counter()
    most: Counter[str] = Counter()
    async with embedded(tmp_path / "store.db") as pool:
        read = pool.history

        async def history(since: float = 0.0, *, user: str | None = None) -> list[EndedLease]:
            for name in ("all", str(user)):
                under_way[name] += 1
                most[name] = max(most[name], under_way[name])
            rows = await read(since, user=user)
            under_way.subtract(["all", str(user)])
            return rows

        monkeypatch.setattr(pool, "history", history)
        heartbeats = Heartbeats(10, LOG)
        authorized = AuthorizedPool(pool, LeaseChanges(pool, LOG, heartbeats), heartbeats, LOG, 10)
        callers = [Caller(name, False, name, Process.current()) for name in ("ada", "ada", "ada", "bob")]
        await asyncio.gather(*(authorized.history(caller, 0.0) for caller in callers))
    assert most == {"ada": 1, "bob": 1, "all": 2}


async def test_a_users_questions_are_answered_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: Counter[str] = Counter()
    most: Counter[str] = Counter()
    async with embedded(tmp_path / "store.db") as pool:
        forecast = pool.forecast

        async def slow(request: SliceRequest, holder: Holder, **more: Any) -> Outlook | None:
            under_way[holder.user] += 1
            most[holder.user] = max(most[holder.user], under_way[holder.user])
            found = await forecast(request, holder, **more)
            await asyncio.sleep(0.01)
            under_way[holder.user] -= 1
            return found

        monkeypatch.setattr(pool, "forecast", slow)
        heartbeats = Heartbeats(10, LOG)
        authorized = AuthorizedPool(pool, LeaseChanges(pool, LOG, heartbeats), heartbeats, LOG, 10)
        callers = [Caller(name, name == "root", name, Process.current()) for name in ["eve", "root"] * 5]
        await asyncio.gather(*(authorized.forecast(each, "2%", None, anybody=False) for each in callers))
    assert most == {"eve": 1, "root": 5}


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
