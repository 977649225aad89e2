"""Nobody keeps the pool busy alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.service.pace import Pace
from gpu_pool_client import OverQuota
from support.hub import ADMIN, Hub, serving_hub
from support.service import Nursery


def test_each_user_has_so_many_decisions_a_minute() -> None:
    now = 0.0
    pace = Pace(60, lambda: now)
    for _ in range(60):
        pace.count("ada")
    with pytest.raises(OverQuota, match="60 times within a minute"):
        pace.count("ada")
    pace.count("bob")
    now = 1.5
    pace.count("ada")
    with pytest.raises(OverQuota):
        pace.count("ada")


def test_those_who_ask_too_much_are_remembered_whoever_else_comes() -> None:
    pace = Pace(1, lambda: 0.0)
    for number in range(2_000):
        pace.count(f"user-{number}")
    with pytest.raises(OverQuota):
        pace.count("user-0")


async def test_questions_do_not_count_and_administrators_may_ask_more(
    nursery: Nursery, hub: Hub, folder: Path
) -> None:
    async with serving_hub(nursery, hub, folder / "pool", "c.ServeApp.max_decisions = 2") as behind:
        ada, admin = await hub.token("ada"), await hub.token(ADMIN)
        for token, number in ((ada, 2), (admin, 4)):
            for key in range(number):
                await behind.take(token, "2%", f"key-{key}")
        for _ in range(4):
            assert (await behind.ask(ada, "GET", "/status"))[0] == 200
        status, problem = await behind.ask(ada, "POST", "/leases", {"request": "2%", "key": "third"})
        assert (status, problem["code"]) == (429, "over-quota")
