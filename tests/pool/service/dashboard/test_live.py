"""Pages that stay live: what is sent when something changes, and what is not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool.service.event_streams import StreamLimits
from support.dashboard import ADMIN, PREFIX, Site, courses_of, showing
from support.pools import eventually
from support.streams import closing


@dataclass
class Stream:
    """The events of one page."""

    reader: asyncio.StreamReader

    async def line(self) -> str:
        return (await asyncio.wait_for(self.reader.readline(), 120)).decode().rstrip("\n")

    async def event(self) -> dict[str, Any]:
        while True:
            line = await self.line()
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found

    async def ends(self) -> bool:
        await asyncio.wait_for(self.reader.read(), 120)
        return self.reader.at_eof()


@asynccontextmanager
async def stream(site: Site, path: str, user: str) -> AsyncIterator[Stream]:
    port = int(site.url.split(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with closing(writer):
        writer.write(f"GET {PREFIX}{path}?live=1 HTTP/1.0\r\nCookie: user={user}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
        assert b" 200 " in head, head
        assert b"text/event-stream" in head
        yield Stream(reader)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 1, courses_of({"ml": "Machine Learning"})) as site:
        yield site


async def test_a_stream_begins_with_the_whole_and_goes_on_with_what_changes(site: Site) -> None:
    async with stream(site, "", "ada") as events:
        first = await events.event()
        assert set(first["parts"]) == {"devices", "mine", "queue"}
        await site.take("20%", "ada", "ml")
        then = await events.event()
        assert set(then["parts"]) == {"devices", "mine"}
        assert "20%, 6.4 GiB" in then["parts"]["mine"]
        assert then["message"] == "Your slice of 20%: held on GPU 0 (simulated)."


async def test_of_others_come_counts_and_no_message(site: Site) -> None:
    async with stream(site, "", "ada") as events:
        await events.event()
        await site.take("20%", "grace", "ml", "train.py")
        then = await events.event()
        assert set(then["parts"]) == {"devices"}
        assert then["message"] == ""
        assert "1 slice" in then["parts"]["devices"]
        assert "grace" not in json.dumps(then)


async def test_an_administrator_s_page_is_live_with_names(site: Site) -> None:
    async with stream(site, "admin", ADMIN) as events:
        await events.event()
        await site.take("20%", "grace", "ml", "train.py")
        assert "grace" in (await events.event())["parts"]["leases"]


async def test_no_token_for_forms_is_in_a_stream(site: Site) -> None:
    async with stream(site, "admin", ADMIN) as events:
        assert 'name="_xsrf" value=""' in (await events.event())["parts"]["devices"]


async def test_something_is_sent_while_nothing_happens(tmp_path: Path) -> None:
    async with (
        showing(tmp_path, streams=StreamLimits(comment_every=0.05)) as site,
        stream(site, "", "ada") as events,
    ):
        await events.event()
        while not (await events.line()).startswith(":"):
            pass


async def test_a_stream_ends_so_that_who_watches_is_asked_anew(tmp_path: Path) -> None:
    async with (
        showing(tmp_path, streams=StreamLimits(longest=0.0)) as site,
        stream(site, "", "ada") as events,
    ):
        await events.event()
        assert await events.ends()


async def test_streams_end_when_the_service_does(site: Site) -> None:
    async with stream(site, "", "ada") as events:
        await events.event()
        site.dashboard.streams.snapshots.stop()
        assert await events.ends()


async def test_one_user_has_so_many_live_pages(tmp_path: Path) -> None:
    async with showing(tmp_path, streams=StreamLimits(most=1)) as site:
        async with stream(site, "", "ada") as events:
            await events.event()
            assert (await site.get("?live=1", "ada")).code == 429
            async with stream(site, "", "grace") as others:
                await others.event()
        # The service has to see that it has gone.
        await eventually(lambda: can_open(site, "ada", 1))


@pytest.mark.long
async def test_a_reader_that_reads_nothing_is_let_go_and_holds_no_memory(tmp_path: Path) -> None:
    async with showing(tmp_path, streams=StreamLimits(most=8), taken_within=1.0) as site:
        for _ in range(45):
            await site.take("2%", "ada")
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(asks_and_reads_nothing(site))
            memory = psutil.Process().memory_info
            before = memory().rss
            # All that one user may have are free again.
            while not await can_open(site, "ada", 8):
                for _ in range(20):
                    await site.pool.release(await site.take("2%", "ada"))
            assert memory().rss - before < 32 * 1024**2


async def can_open(site: Site, user: str, pages: int) -> bool:
    """Whether a user may have so many live pages now."""
    port = int(site.url.split(":")[2].partition("/")[0])
    async with AsyncExitStack() as stack:
        for _ in range(pages):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await stack.enter_async_context(closing(writer))
            writer.write(f"GET {PREFIX}?live=1 HTTP/1.0\r\nCookie: user={user}\r\n\r\n".encode())
            if b" 200 " not in await reader.readuntil(b"\r\n"):
                return False
    return True


@contextmanager
def asks_and_reads_nothing(site: Site) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(site.url.split(":")[2].partition("/")[0])))
        connection.sendall(f"GET {PREFIX}?live=1 HTTP/1.0\r\nCookie: user=ada\r\n\r\n".encode())
        yield connection
