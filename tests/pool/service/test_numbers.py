"""Numbers that nobody means, in what a client sends: refused in words, and never an error of the service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Process
from gpu_pool_client._remote.exchange import ask
from support.service import ForkServer, Service, serving

pytestmark = pytest.mark.long
IT = "the number"
WILD = ["1" + "0" * 400, "1e308", "-1e308", "1e999", "NaN", "-1", "true", str(2**63), str(2**31)]


@pytest.fixture
async def service(children: ForkServer, tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(children, tmp_path) as service:
        yield service


async def say(service: Service, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
    content = None if body is None else body.encode()
    answer = await ask(service.socket, method, f"/api/v1/{path}", content, 60)
    return answer.status, json.loads(answer.body)


async def test_a_number_that_nobody_means_is_refused_in_words(service: Service) -> None:
    _, lease = await say(service, "POST", "leases", '{"request": "2%", "key": "k"}')
    at, process = f"leases/{lease['id']}", asdict(Process.current())
    for number in WILD:
        bodies = [
            (f"{at}/renew", {"ttl": IT}),
            (f"{at}/attach", {"process": process, "grace": IT}),
            (f"{at}/attach", {"process": process, "ready_within": IT}),
            (f"{at}/attach", {"process": {**process, "pid": IT}}),
            (f"{at}/attach", {"process": {**process, "start": IT}}),
            (f"{at}/resize", {"request": IT}),
        ]
        for path, body in bodies:
            text = json.dumps(body).replace(json.dumps(IT), number)
            status, answer = await say(service, "POST", path, text)
            assert (status, answer.get("code")) == (400, "bad-request"), (path, number, answer)
        for question in (f"history?since={number}", f"{at}/wait?seconds={number}&last={number}"):
            status, answer = await say(service, "GET", question)
            assert status in (200, 400), (question, answer)
    assert "Traceback" not in service.log
