"""What a hostile caller can do to the service: little, and nothing to others."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from gpu_pool_client import GpuPoolError, Holder, LeaseGone, LeaseState, OverQuota, Pool, connect
from gpu_pool_client._remote.bodies import PROBLEM_TYPE
from gpu_pool_client._remote.exchange import ask
from support.pools import eventually, take
from support.service import ForkServer, Service, is_closed, serving


@contextmanager
def connected(service: Service, sent: bytes = b"") -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(120)
        connection.connect(str(service.socket))
        connection.sendall(sent)
        yield connection


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection, whatever it sent before."""
    asked = select.poll()
    asked.register(connection, select.POLLRDHUP)
    return bool(asked.poll(0))


def flood(connection: socket.socket, part: bytes) -> None:
    """Send 100 MB."""
    for _ in range(1600):
        connection.sendall(part)


async def until_answered(service: Service, path: str, status: int) -> None:
    end = time.monotonic() + 120
    while (await question(service, "GET", path))[0] != status:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def question(service: Service, method: str, path: str, body: bytes | None = None) -> tuple[int, dict]:
    answer = await ask(service.socket, method, path, body, 20)
    return answer.status, json.loads(answer.body or b"{}")


async def test_a_body_of_100_mb_is_not_read(service: Service, pool: Pool) -> None:
    head = b"POST /api/v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
    with connected(service, head) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert connection.recv(100) == b""
    chunked = b"POST /api/v1/leases HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(service, chunked) as connection, pytest.raises(OSError):
        flood(connection, b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert (await pool.status()).leases == ()


async def test_endless_headers_are_not_read(service: Service, pool: Pool) -> None:
    with connected(service) as connection, pytest.raises(OSError):
        flood(connection, b"x" * 0x10000)
    assert (await pool.status()).leases == ()


async def test_idle_and_slow_connections_hold_nobody_up(service: Service, pool: Pool) -> None:
    with ExitStack() as stack:
        for number in range(200):
            stack.enter_context(connected(service, b"POST /api/v1/leases HTTP/1.1\r\n"[: number % 29]))
        assert (await pool.status()).leases == ()


@pytest.mark.long
async def test_whoever_does_not_take_an_answer_loses_the_connection(
    children: ForkServer, folder: Path
) -> None:
    settings = "c.ServeApp.taken_within = 0.3\nc.PoolSettings.max_waiting = 0"
    async with serving(children, folder / "pool", settings) as service, connect(service.url) as pool:
        # More than the system keeps for a client that does not read.
        for number in range(300):
            await take(pool, "1", f"key-{number}", Holder("ada", kernel="x" * 200))
        with connected(service, b"GET /api/v1/status HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
            await eventually(lambda: is_hung_up(connection))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert len((await pool.status()).queue) == 299


async def test_one_user_has_so_many_connections_and_no_more(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", "c.ServeApp.max_connections = 5") as service:
        with ExitStack() as stack:
            some = [stack.enter_context(connected(service)) for _ in range(9)]
            # Not at once five are left if the one that found out that it listens is still among them.
            await eventually(lambda: sum(map(is_closed, some)) >= 4)
        async with connect(service.url) as pool:
            assert (await pool.status()).leases == ()


async def test_one_user_waits_for_so_many_leases_and_no_more(children: ForkServer, folder: Path) -> None:
    async with (
        serving(children, folder / "pool", "c.ServeApp.max_waits = 2") as service,
        connect(service.url) as pool,
    ):
        await take(pool, "1", "held")
        lease = await take(pool, "1", "next")
        waits = [asyncio.create_task(pool.wait(lease)) for _ in range(3)]
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(OverQuota, match="wait for 2 leases at once"):
            await done.pop()
        assert not any(each.done() for each in others)
        for each in others:
            each.cancel()
        await asyncio.wait(others)


async def test_a_client_that_leaves_ends_its_wait(children: ForkServer, folder: Path) -> None:
    async with (
        serving(children, folder / "pool", "c.ServeApp.max_waits = 1") as service,
        connect(service.url) as pool,
    ):
        lease = await take(pool, "1", "held")
        version = (await ask(service.socket, "GET", f"/api/v1/leases/{lease}/watch", None, 20)).headers[
            "ETag"
        ]
        poll = f"/api/v1/leases/{lease}/watch?seconds=25&seen={version[1:-1]}"
        with connected(service, f"GET {poll} HTTP/1.1\r\nHost: x\r\n\r\n".encode()):
            await until_answered(service, f"{poll}x", 429)
        await until_answered(service, f"{poll}x", 200)


async def test_a_replayed_release_ends_nothing_else(service: Service, pool: Pool) -> None:
    lease = await take(pool, "1", "first")
    address = f"/api/v1/leases/{lease}?reason=released"
    assert (await question(service, "DELETE", address))[0] == 200
    other = await take(pool, "1", "second")
    assert (await question(service, "DELETE", address))[0] == 200
    assert (await pool.get_lease(other)).state is LeaseState.HELD


@pytest.mark.parametrize(
    "name", ["../status", "..%2Fstatus", "1-00000000%00", "%2e%2e", "1'--", "x" * 390, "ä"]
)
async def test_a_path_in_an_id_leads_nowhere(pool: Pool, name: str) -> None:
    with pytest.raises(LeaseGone):
        await pool.get_lease(name)
    await pool.release(name)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/", None, 404, "bad-request"),
        ("GET", "/api/v1/leases/../status", None, 404, "bad-request"),
        ("GET", "/api/v1/leases/%2e%2e%2fstatus", None, 404, "lease-gone"),
        ("GET", "/api/v2/status", None, 404, "bad-request"),
        ("DELETE", "/api/v1/status", None, 405, "bad-request"),
        ("PUT", "/api/v1/status", b"{}", 405, "bad-request"),
        ("POST", "/api/v1/leases", b"", 400, "bad-request"),
        ("POST", "/api/v1/leases", b"[]", 400, "bad-request"),
        ("POST", "/api/v1/leases", b'{"request": 2, "key": "key"}', 400, "bad-request"),
        ("POST", "/api/v1/leases", b'{"request": "2%", "key": "a b"}', 400, "bad-request"),
        ("POST", "/api/v1/leases", b"\xff" * 60_000, 400, "bad-request"),
        ("POST", "/api/v1/leases", b"[" * 60_000, 400, "bad-request"),
        ("POST", "/api/v1/leases/1-0/renew", b'{"ttl": "soon"}', 400, "bad-request"),
        ("DELETE", "/api/v1/leases/1-0?reason=fun", None, 400, "bad-request"),
        ("GET", "/api/v1/history?since=nan", None, 400, "bad-request"),
        ("GET", "/api/v1/leases/1-0/wait?seconds=x", None, 400, "bad-request"),
        ("POST", "/api/v1/devices/" + "9" * 300 + "/drain", b'{"drained": true}', 400, "bad-request"),
    ],
)
async def test_what_is_not_understood_is_told(
    service: Service, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    answer = await ask(service.socket, method, path, body, 20)
    problem = json.loads(answer.body)
    assert (answer.status, problem["status"], problem["code"]) == (status, status, code)
    assert answer.headers["Content-Type"] == PROBLEM_TYPE
    assert "Traceback" not in service.log


async def test_an_unforeseen_error_tells_nothing_of_the_inside(service: Service, pool: Pool) -> None:
    await take(pool, "2%", "key")
    with closing(sqlite3.connect(service.folder / "store.db")) as store, store:
        store.execute("UPDATE lease SET slices = 'not JSON at all'")
    status, problem = await question(service, "GET", "/api/v1/status")
    assert (status, problem["code"]) == (500, "error")
    assert "JSON" not in json.dumps(problem)
    assert "JSONDecodeError" in service.log
    with pytest.raises(GpuPoolError, match="Internal error in the pool"):
        await pool.status()


async def test_health(service: Service) -> None:
    assert await question(service, "GET", "/api/v1/health") == (200, {"status": "ok"})


async def test_one_user_waits_for_so_many_leases_and_is_told_so(children: ForkServer, folder: Path) -> None:
    settings = "c.PoolSettings.max_waiting = 2\n"
    async with serving(children, folder / "pool", settings) as service, connect(service.url) as pool:
        for key in ("held", "one", "two"):
            await take(pool, "1", key)
        with pytest.raises(OverQuota, match="wait for 2 slices already") as refused:
            await take(pool, "1", "three")
        assert "gpu-pool release ID" in refused.value.remedy
