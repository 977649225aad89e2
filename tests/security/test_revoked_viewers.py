"""Whoever may not look any more sees nothing more, also on a page or a question that goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.service.event_streams import StreamLimits
from gpu_pool.service.hub import HubApi, HubIdentity
from gpu_pool_client._processes import boot_id
from gpu_pool_client._remote.exchange import ServerAddress
from support.dashboard import PREFIX, Site, showing
from support.service import ForkServer
from support.stand_in_hub import StandInHub, ask_from, behind_stand_in, standing_in
from support.streams import closing

COURSE = """
title: Machine Learning
who: {{groups: [ml-students], users: [grace]}}
instructors: {instructors}
slices:
  - {{name: Small, request: 2%}}
"""


@dataclass
class Page:
    """A live page, as a browser reads it."""

    reader: asyncio.StreamReader

    async def line(self) -> str:
        return (await asyncio.wait_for(self.reader.readline(), 120)).decode()

    async def parts(self) -> dict[str, str]:
        """Return the parts that come next."""
        while not (line := await self.line()).startswith("data: "):
            assert line, "the page has ended"
        found: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return dict(found["parts"])

    async def goes_on(self) -> None:
        """Return after it was asked anew who looks, some times."""
        for _ in range(3):
            while not (line := await self.line()).startswith(": nothing new"):
                assert line, "the page has ended"

    async def ends(self) -> str:
        """Return what is sent until the end."""
        return (await asyncio.wait_for(self.reader.read(), 120)).decode()


@asynccontextmanager
async def live(site: Site, path: str, token: str) -> AsyncIterator[Page]:
    port = int(site.url.split(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with closing(writer):
        writer.write(f"GET {PREFIX}{path}?live=1 HTTP/1.0\r\nCookie: user={token}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
        assert b" 200 " in head, head
        yield Page(reader)


@pytest.fixture
async def hub() -> AsyncIterator[tuple[StandInHub, int]]:
    async with standing_in() as (hub, port):
        hub.users = {name: name for name in ("ada", "boss", "turing")}
        hub.admins = {"boss"}
        hub.groups = {"ada": ["ml-students"], "turing": ["ml-students"]}
        yield hub, port


@pytest.fixture
def course(tmp_path: Path) -> Path:
    folder = tmp_path / "courses"
    folder.mkdir()
    file = folder / "ml.yaml"
    file.write_text(COURSE.format(instructors="[turing]"))
    return file


@pytest.fixture
async def site(hub: tuple[StandInHub, int], course: Path, tmp_path: Path) -> AsyncIterator[Site]:
    # No answer of the Hub holds for any time here.
    hours = itertools.count(0, 10)
    place = HubApi(ServerAddress("127.0.0.1", hub[1]), "/hub/api", "gpu-pool")
    identity = HubIdentity(place, [], boot_id(), clock=lambda: float(next(hours)))
    often = StreamLimits(comment_every=0.05)
    async with showing(tmp_path, 1, identity=identity, streams=often, courses_dir=str(course.parent)) as site:
        yield site


async def test_an_administrator_s_page_ends_with_their_office(
    site: Site, hub: tuple[StandInHub, int]
) -> None:
    async with live(site, "admin", "boss") as page:
        assert "leases" in await page.parts()
        await page.goes_on()
        hub[0].admins.clear()
        await page.ends()
        await site.take("2%", "secretive", kernel="private.ipynb")
    assert (await site.get("admin", "boss")).code == 403


async def test_a_page_ends_with_the_login(site: Site, hub: tuple[StandInHub, int]) -> None:
    async with live(site, "", "ada") as page:
        await page.parts()
        await page.goes_on()
        del hub[0].users["ada"]
        await page.ends()


async def test_events_of_the_pool_do_not_put_off_the_question_who_looks(
    site: Site, hub: tuple[StandInHub, int]
) -> None:
    async with live(site, "admin", "boss") as page:
        await page.parts()
        hub[0].admins.clear()

        async def act() -> None:
            while True:
                await site.take("1%", "grace")

        acting = asyncio.create_task(act())
        await page.ends()
        acting.cancel()
        await asyncio.wait([acting])


async def test_a_page_goes_on_while_the_hub_does_not_answer(site: Site, hub: tuple[StandInHub, int]) -> None:
    async with live(site, "", "ada") as page:
        await page.parts()
        hub[0].is_well = False
        await page.goes_on()


async def test_a_course_s_page_ends_for_who_is_in_it_no_more(site: Site, hub: tuple[StandInHub, int]) -> None:
    async with live(site, "courses/ml", "ada") as page:
        assert set(await page.parts()) == {"now"}
        await page.goes_on()
        hub[0].groups.clear()
        await page.ends()


async def test_who_instructs_no_more_sees_no_names_any_more(site: Site, course: Path) -> None:
    not_theirs = COURSE.format(instructors="[lovelace]")
    await site.take("2%", "grace", "ml")
    async with live(site, "courses/ml", "turing") as page:
        assert "grace" in (await page.parts())["leases"]
        await asyncio.to_thread(course.write_text, not_theirs)
        while (parts := await page.parts()).get("leases") != "":
            pass
        assert "grace" not in str(parts)


async def test_a_wait_tells_nothing_after_its_token_has_ended(
    children: ForkServer, open_folder: Path
) -> None:
    async with behind_stand_in(children, open_folder / "pool", "c.ServeApp.comment_every = 0.01") as (
        hub,
        service,
    ):
        hub.users = {"ada": "ada"}
        lease = (await service.take("ada"))["id"]
        version = await ask_from(service, "127.0.0.1", "ada", path=f"api/v1/leases/{lease}/watch?seen=x")
        seen = version.headers["Etag"].strip('"')
        path = f"api/v1/leases/{lease}/watch?seconds=20&seen={seen}"
        waiting = asyncio.create_task(ask_from(service, "127.0.0.1", "ada", path=path))
        # The pool is asked for one after the other: by then it waits.
        for _ in range(5):
            assert (await ask_from(service, "127.0.0.1", "ada")).status == 200
        # Whose token it is is asked anew after a wait that is longer than ``comment_every``.
        await asyncio.sleep(0.02)
        hub.users.clear()
        # What changes something is asked anew, and so finds out that the token has ended.
        assert (await ask_from(service, "127.0.0.1", "ada", "DELETE", f"api/v1/leases/{lease}")).status == 401
        assert not waiting.done()
        await service.service.end()
        assert (await waiting).status == 401
