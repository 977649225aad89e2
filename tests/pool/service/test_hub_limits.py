"""What can be done to the service from any machine, token or not: little, and nothing to others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from gpu_pool.service.hub import HubUser
from gpu_pool_client._remote.bodies import PROBLEM_TYPE
from gpu_pool_client._remote.exchange import ask
from support.hub import PREFIX, Hub, HubService, serving_hub
from support.pools import eventually
from support.service import ForkServer, is_closed
from support.stand_in_hub import behind_stand_in

LEASES = f"POST {PREFIX}api/v1/leases HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def connected(behind: HubService, sent: str = "") -> Iterator[socket.socket]:
    with closing(socket.create_connection((behind.where.host, behind.where.port), 20)) as connection:
        connection.sendall(sent.encode())
        yield connection


def flood(connection: socket.socket, part: bytes) -> None:
    """Send 100 MB."""
    for _ in range(1600):
        connection.sendall(part)


async def test_a_body_of_100_mb_is_not_read(behind_hub: HubService) -> None:
    with connected(behind_hub, f"{LEASES}Content-Length: 100000000\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert connection.recv(100) == b""
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with (
        connected(behind_hub, f"{LEASES}Transfer-Encoding: chunked\r\n\r\n") as connection,
        pytest.raises(OSError),
    ):
        flood(connection, chunk)
    assert (await behind_hub.ask(None, "GET", "/health"))[0] == 200


async def test_idle_and_slow_connections_hold_nobody_up(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    with ExitStack() as stack:
        for number in range(400):
            stack.enter_context(connected(behind_hub, LEASES[: number % len(LEASES)]))
        assert (await behind_hub.take(token))["state"] == "held"


async def test_there_are_so_many_connections_and_no_more_and_the_socket_is_free(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    async with serving_hub(children, hub, folder / "pool", "c.ServeApp.max_clients = 5") as behind:
        with ExitStack() as stack:
            some = [stack.enter_context(connected(behind)) for _ in range(9)]
            await eventually(lambda: sum(map(is_closed, some)) >= 4)
            answer = await ask(behind.service.socket, "GET", "/api/v1/health", None, 20)
            assert answer.status == 200
        assert "TCP: 5 connections already" in behind.service.log


async def test_a_replayed_release_ends_nothing_else(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    first = (await behind_hub.take(token, "1", "first"))["id"]
    assert (await behind_hub.ask(token, "DELETE", f"/leases/{first}"))[0] == 200
    second = await behind_hub.take(token, "1", "second")
    assert (await behind_hub.ask(token, "DELETE", f"/leases/{first}"))[0] == 200
    assert (await behind_hub.ask(token, "GET", f"/leases/{second['id']}"))[1]["state"] == "held"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/leases/..%2fstatus", 404),
        ("GET", "/leases/../status", 404),
        ("GET", "/leases/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        ("DELETE", "/leases/..%2f..%2fetc%2fpasswd", 200),  # there is no such lease
        ("GET", "/nothing", 404),
        ("GET", "/../../../../etc/passwd", 404),
        ("GET", "/../../static/../pages.py", 404),
        ("PUT", "/status", 405),
        ("POST", "/status", 405),
        ("POST", "/heartbeat", 400),
        ("POST", "/devices/..%2f..%2f/drain", 403),
    ],
)
async def test_what_there_is_not_is_told_in_a_problem_document(
    behind_hub: HubService, hub: Hub, method: str, path: str, status: int
) -> None:
    headers = {"Authorization": f"Bearer {await hub.token('ada')}"}
    body = b'{"drained": true}' if method == "POST" else None
    answer = await ask(behind_hub.where, method, f"{PREFIX}api/v1{path}", body, 20, headers)
    assert answer.status == status
    assert status == 200 or answer.headers["Content-Type"] == PROBLEM_TYPE
    assert answer.headers.get("Allow") == ("GET" if status == 405 else None)
    assert "Traceback" not in behind_hub.service.log


async def test_anybody_may_ask_whether_it_works_and_learns_nothing_else(behind_hub: HubService) -> None:
    assert await behind_hub.ask(None, "GET", "/health") == (200, {"status": "ok"})
    assert (await behind_hub.ask(None, "GET", "/openapi.json"))[1]["openapi"] == "3.1.0"
    assert (await ask(behind_hub.where, "GET", "/api/v1/health", None, 20)).status == 404


async def test_one_heartbeat_is_enough_for_two_thousand_leases(behind_hub: HubService, hub: Hub) -> None:
    names = [f"{number}-{number:08x}" for number in range(2000)]
    token = await hub.token("ada")
    assert (await behind_hub.ask(token, "POST", "/heartbeat", {"leases": names}))[0] == 200


async def test_a_hundred_at_once_are_all_answered(behind_hub: HubService, hub: Hub) -> None:
    token = await hub.token("ada")
    leases = await asyncio.gather(*(behind_hub.take(token, "2%", f"key-{number}") for number in range(100)))
    assert [each["state"] for each in leases].count("held") == 50
    assert json.dumps(leases).count('"waiting"') == 50


#: What a user can choose for a server of theirs, beside the course.
BULK = {"note": "x" * 500_000}


@pytest.mark.parametrize(
    ("options", "course"),
    [
        ({"course": "ml"}, "ml"),
        ({"course": ""}, None),
        ({"course": ["ml"]}, None),
        ({}, None),
        (None, None),
        ([BULK], None),
        ({"course": "ml", "more": BULK}, "ml"),
    ],
)
def test_of_what_a_user_chose_for_a_server_the_course_alone_is_kept(
    options: object, course: str | None
) -> None:
    servers = {"lab": {"user_options": options}}
    said = {"name": "ada", "kind": "user", "scopes": [], "servers": servers}
    user = HubUser.model_validate_json(json.dumps(said))
    assert user.servers["lab"].course == course
    assert len(repr(user)) < 1_000


@pytest.mark.parametrize("length", [2**20 + 1, 2**25])
async def test_an_answer_of_the_hub_that_is_too_large_is_not_read(
    children: ForkServer, folder: Path, length: int
) -> None:
    async with behind_stand_in(children, folder / "pool") as (hub, service):
        hub.answers["eves"] = b'"%s"' % (b"x" * (length - 2))
        status, problem = await service.ask("eves", "GET", "/status")
        assert (status, problem["code"]) == (401, "not-allowed")
        assert "What the JupyterHub says of this token cannot be read." in problem["message"]
        assert "the answer is larger than 1048576 bytes" in service.service.log
        assert "eves" not in service.service.log
