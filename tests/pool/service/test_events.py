"""Server-sent events in the API: what is sent, to whom, and when a stream ends."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool_client import EndReason, Pool, connect
from gpu_pool_client._remote.exchange import ServerAddress
from support.hub import PREFIX, Hub, serving_hub
from support.pools import take
from support.service import ForkServer, Service, serving
from support.users import NOBODY, Users

SOON = "c.ServeApp.comment_every = 0.3\n"


@dataclass
class Stream:
    """What a service sends, line after line."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def line(self) -> str:
        return (await asyncio.wait_for(self.reader.readline(), 120)).decode().rstrip("\n")

    async def comment(self) -> None:
        """Return after the next comment."""
        while not (line := await self.line()).startswith(":"):
            assert line or not self.reader.at_eof(), "the stream has ended"

    async def event(self) -> tuple[str, str, dict[str, Any]]:
        """Return name, id and data of the next event."""
        fields: dict[str, str] = {}
        while (line := await self.line()) or "data" not in fields:
            assert not self.reader.at_eof(), "the stream has ended"
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields["event"], fields["id"], json.loads(fields["data"])

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def ends(self) -> None:
        await asyncio.wait_for(self.reader.read(), 120)


async def opened(where: Path | ServerAddress, path: str, **headers: str) -> tuple[int, Stream]:
    if isinstance(where, Path):
        reader, writer = await asyncio.open_unix_connection(str(where))
    else:
        reader, writer = await asyncio.open_connection(where.host, where.port)
    told = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    # HTTP/1.0, so that the answer is not in pieces.
    writer.write(f"GET {path} HTTP/1.0\r\nHost: x\r\n{told}\r\n".encode())
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)).decode()
    status = int(head.split()[1])
    assert status != 200 or "Content-Type: text/event-stream\r\n" in head
    return status, Stream(reader, writer)


async def status_of(where: Path | ServerAddress, path: str, **headers: str) -> int:
    status, found = await opened(where, path, **headers)
    await found.close()
    return status


@asynccontextmanager
async def stream(where: Path | ServerAddress, path: str, **headers: str) -> AsyncIterator[Stream]:
    status, found = await opened(where, path, **headers)
    assert status == 200
    try:
        yield found
    finally:
        await found.close()


def of(lease_id: str) -> str:
    return f"/api/v1/leases/{lease_id}/events"


async def test_who_waits_hears_of_their_place_and_estimate_until_the_end(
    service: Service, pool: Pool
) -> None:
    held, before, mine = [await take(pool, "1", key) for key in ("held", "before", "mine")]
    async with stream(service.socket, of(mine)) as events:
        name, _, told = await events.event()
        assert (name, told["lease"]["id"], told["lease"]["position"]) == ("lease", mine, 2)
        assert told["outlook"]["position"] == 2
        assert told["outlook"]["why"]
        await pool.release(before)
        _, _, told = await events.event()
        assert (told["lease"]["position"], told["outlook"]["position"]) == (1, 1)
        await pool.release(held)
        _, _, told = await events.event()
        assert (told["lease"]["state"], told["lease"]["key"], told["outlook"]) == ("held", "mine", None)
        await pool.release(mine, EndReason.RELEASED)
        _, _, told = await events.event()
        assert (told["lease"]["state"], told["lease"]["end_reason"]) == ("ended", "released")
        await events.ends()


async def test_who_comes_back_hears_only_what_is_new(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", SOON) as service, connect(service.url) as pool:
        lease_id = await take(pool, "2%", "key")
        async with stream(service.socket, of(lease_id)) as events:
            _, seen, _ = await events.event()
        async with stream(service.socket, of(lease_id), Last_Event_ID=seen) as events:
            await events.comment()
            await pool.release(lease_id)
            _, last, told = await events.event()
            assert told["lease"]["state"] == "ended"
        # An end that was seen is no reason to come back: browsers stop at 204.
        assert await status_of(service.socket, of(lease_id), Last_Event_ID=last) == 204
        async with stream(service.socket, "/api/v1/events") as events:
            _, seen, _ = await events.event()
        async with stream(service.socket, "/api/v1/events", Last_Event_ID=seen) as events:
            await events.comment()
            await take(pool, "2%", "other")
            assert len((await events.event())[2]["leases"]) == 1


async def test_the_pool_is_told_as_each_may_see_it(service: Service, pool: Pool, users: Users) -> None:
    lease_id = await take(pool, "2%", "key")
    async with stream(service.socket, "/api/v1/events") as events:
        name, _, told = await events.event()
        assert (name, [each["id"] for each in told["leases"]]) == ("status", [lease_id])
    where = str(service.socket)
    body = f"""
    reader, writer = await asyncio.open_unix_connection({where!r})
    writer.write(b"GET /api/v1/events HTTP/1.0\\r\\n\\r\\n")
    while not (line := await reader.readline()).startswith(b"data:"):
        pass
    writer.close()
    return json.loads(line[5:])
    """
    theirs = await users.run(NOBODY, body)
    assert (theirs["leases"], theirs["devices"][0]["leases"]) == ([], 1)
    with pytest.raises(Exception, match="There is no lease"):
        await users.run(NOBODY, f"return (await pool.get_lease({lease_id!r})).id")


async def test_something_is_sent_while_nothing_happens(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", SOON) as service, connect(service.url) as pool:
        lease_id = await take(pool, "2%", "key")
        for path in ("/api/v1/events", of(lease_id)):
            async with stream(service.socket, path) as events:
                await events.event()
                for _ in range(3):
                    await events.comment()


async def test_what_there_is_not_is_told_before_a_stream_begins(service: Service) -> None:
    for path, status in ((of("1-00000000"), 404), (of("..%2f..%2fstatus"), 404), (of("x" * 500), 404)):
        assert await status_of(service.socket, path) == status
    hostile = {"Last_Event_ID": "x" * 10_000}
    async with stream(service.socket, "/api/v1/events", **hostile) as events:
        await events.event()
    assert "Traceback" not in service.log


async def test_one_user_has_so_many_streams(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", "c.ServeApp.max_streams = 2\n") as service:
        async with stream(service.socket, "/api/v1/events") as one, stream(service.socket, "/api/v1/events"):
            await one.event()
            assert await status_of(service.socket, "/api/v1/events") == 429
        for _ in range(100):  # the service has to see that they have gone
            status = await status_of(service.socket, "/api/v1/events")
            if status == 200:
                break
            await asyncio.sleep(0.05)
        assert status == 200


async def test_streams_end_when_the_service_does(service: Service, pool: Pool) -> None:
    lease_id = await take(pool, "2%", "key")
    path = "/api/v1/events"
    async with stream(service.socket, path) as all_of_it, stream(service.socket, of(lease_id)) as one:
        await all_of_it.event()
        await one.event()
        await service.end(signal.SIGTERM)
        await all_of_it.ends()
        await one.ends()
    assert "Traceback" not in service.log


async def test_a_stream_ends_after_its_time(children: ForkServer, folder: Path) -> None:
    settings = "c.ServeApp.longest_stream = 0.3\n"
    async with serving(children, folder / "pool", settings) as service:
        await opened_and_ended(service)


async def opened_and_ended(service: Service) -> None:
    async with stream(service.socket, "/api/v1/events") as events:
        await events.event()
        await events.ends()


@pytest.mark.long
async def test_a_stream_ends_with_its_token_and_its_server(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    async with serving_hub(children, hub, folder / "pool", SOON) as behind:
        path = f"{PREFIX}api/v1/events"
        assert await status_of(behind.where, path) == 401
        token, server = await hub.token("ada"), await hub.start_server("ada", "streams")
        for secret, end in ((token, hub.revoke(token)), (server, hub.stop_server("ada", "streams"))):
            async with stream(behind.where, path, Authorization=f"Bearer {secret}") as events:
                await events.event()
                await events.comment()
                await end
                await events.ends()


@pytest.mark.long
async def test_a_reader_that_reads_nothing_is_let_go_and_holds_no_memory(
    children: ForkServer, folder: Path
) -> None:
    settings = "c.ServeApp.taken_within = 1\nc.ServeApp.max_decisions = c.ServeApp.max_requests = 100000\n"
    async with serving(children, folder / "pool", settings) as service, connect(service.url) as pool:
        for number in range(45):
            await take(pool, "2%", f"held-{number}")
        with ExitStack() as stack:
            slow = [stack.enter_context(asks_and_reads_nothing(service)) for _ in range(8)]
            assert service.process
            memory = psutil.Process(service.process.pid).memory_info
            before = memory().rss
            end = asyncio.get_running_loop().time() + 60
            while not all(map(is_let_go, slow)):
                assert asyncio.get_running_loop().time() < end
                await pool.release(await take(pool, "2%", uuid.uuid4().hex))
            assert memory().rss - before < 32 * 1024**2
        async with stream(service.socket, "/api/v1/events") as events:
            await events.event()


@contextmanager
def asks_and_reads_nothing(service: Service) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(service.socket))
        connection.sendall(b"GET /api/v1/events HTTP/1.0\r\n\r\n")
        yield connection


def is_let_go(connection: socket.socket) -> bool:
    """Whether the other end has closed, without reading what it sent before."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    return bool(poll.poll(0))
