"""A class of two hundred asks at once, over HTTP, each with a token of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.hub import ADMIN, Hub, HubService

STUDENTS = 200


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_all_have_one_answer_each(behind_hub: HubService, hub: Hub) -> None:
    tokens = [await hub.token(f"student-{number}") for number in range(STUDENTS)]

    async def ask(token: str) -> dict[str, Any]:
        return await behind_hub.take(token, key="mine")

    leases = await asyncio.gather(*map(ask, tokens))
    assert [each["holder"]["user"] for each in leases] == [f"student-{n}" for n in range(STUDENTS)]
    assert len({each["id"] for each in leases}) == STUDENTS
    assert [each["state"] for each in leases].count("held") == 50
    # Who did not hear the answer asks again, and has the same.
    again = await asyncio.gather(*map(ask, tokens))
    assert [each["id"] for each in again] == [each["id"] for each in leases]

    _, status = await behind_hub.ask(await hub.token(ADMIN), "GET", "/status")
    assert [each["position"] for each in status["queue"]] == list(range(1, STUDENTS - 49))
    everybody = {each["id"] for each in (*status["leases"], *status["queue"])}
    assert everybody == {each["id"] for each in leases}
    assert [each["held_milli"] for each in status["devices"]] == [1000]
