"""Kernels are served before the pages for browsers are loaded; a browser that comes sooner waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse

from support.hub import PREFIX
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

#: Loads the pages as soon as a file says how.
_HELD_BACK = """
import pathlib, time
import gpu_pool.service.hub_site as hub_site
load_pages, told = hub_site.load_pages, pathlib.Path({told!r})
def held_back():
    while not told.exists():
        time.sleep(0.01)
    if told.read_text() == "fail":
        raise ImportError("no such pages")
    return load_pages()
hub_site.load_pages = held_back
"""


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Return the file that says whether the pages can be loaded, once it is there."""
    return tmp_path / "told"


@pytest.fixture
def children(told: Path) -> Iterator[ForkServer]:
    made = ForkServer(_HELD_BACK.format(told=str(told)))
    yield made
    made.close()


async def ask(url: str, *, token: str = "") -> HTTPResponse:
    headers = {"Authorization": f"token {token}"} if token else {"Sec-Fetch-Mode": "navigate"}
    request = HTTPRequest(url, headers=headers, follow_redirects=False, request_timeout=120)
    return await AsyncHTTPClient().fetch(request, raise_error=False)


@pytest.mark.parametrize("outcome", ["load", "fail"])
async def test_the_api_answers_at_once_and_a_page_when_it_is_loaded(
    children: ForkServer, told: Path, tmp_path: Path, outcome: str
) -> None:
    async with behind_stand_in(children, tmp_path / "service") as (hub, service):
        hub.users["of-ada"] = "ada"
        url = f"http://127.0.0.1:{service.hub.service_port}{PREFIX}"
        page = asyncio.create_task(ask(f"{url}history?days=7"))
        assert (await ask(f"{url}api/v1/status", token="of-ada")).code == HTTPStatus.OK
        assert not page.done()
        await asyncio.to_thread(told.write_text, outcome)
        answer = await page
        if outcome == "fail":
            assert answer.code == HTTPStatus.SERVICE_UNAVAILABLE
            assert "The pages for browsers cannot be loaded" in service.service.log
            assert (await ask(f"{url}api/v1/status", token="of-ada")).code == HTTPStatus.OK
            return
        assert answer.code == HTTPStatus.TEMPORARY_REDIRECT
        assert answer.headers["Location"] == f"{PREFIX}history?days=7"
        # There it is: who is not known there is sent to the Hub.
        there = await ask(f"{url}history?days=7")
        assert there.code == HTTPStatus.FOUND
        assert "/hub/api/oauth2/authorize" in there.headers["Location"]
