"""Two instructors check their courses at once, one of them with a class that is simulated for very long."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
import tornado
from tornado.httpclient import HTTPResponse

from gpu_pool.service.class_simulations import SimulationLimits
from support.course_editing import COURSE, EDIT, field, folder, send, text_of
from support.dashboard import Site, showing
from support.pages import Document

__all__ = ["folder"]

#: Of a course that has a GPU for one student at a time: each of 500 is decided about by itself.
FREE = COURSE.replace("quota: {share: 50%}\n", "")
HEAVY = FREE.replace("2%}", "100%}")
OTHERS = COURSE.replace("turing", "hopper").replace("ada", "grace").replace("2%}", "5%}")
NLP = "courses/nlp/edit"


class HeldClock:
    """A clock whose hands the test moves, and which lets no simulation go on until it is released."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked, self.is_released = threading.Event(), threading.Event()
        self.looks = 0

    def __call__(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.looks += 1
            self.asked.set()
            assert self.is_released.wait(120)
        return self.now

    async def holds_a_simulation(self) -> None:
        assert await asyncio.to_thread(self.asked.wait, 20)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@asynccontextmanager
async def serving(tmp_path: Path, folder: Path, clock: HeldClock, waiting: float) -> AsyncIterator[Site]:
    (folder / "ml.yaml").write_text(FREE)
    limits = SimulationLimits(seconds=5.0, waiting=waiting, clock=clock)
    async with showing(tmp_path, 1, courses_dir=str(folder), limits=limits) as site:
        try:
            yield site
        finally:
            clock.is_released.set()


def check(site: Site, text: str, user: str, path: str, students: str = "500") -> asyncio.Task[HTTPResponse]:
    return asyncio.create_task(send(site, text, user, "check", path=path, students=students))


async def test_the_other_checks_and_saves_while_the_first_takes_too_long(
    tmp_path: Path, folder: Path, clock: HeldClock
) -> None:
    async with serving(tmp_path, folder, clock, waiting=0.0) as site:
        first = check(site, HEAVY, "turing", EDIT)
        await clock.holds_a_simulation()
        plain = await check(site, OTHERS, "hopper", NLP, students="")
        assert "The file is good." in text_of(plain)
        with_class = text_of(await check(site, OTHERS, "hopper", NLP))
        assert "The file is good. It is not saved yet." in with_class
        assert "not simulated: others are checking their courses, too" in with_class
        assert (await send(site, OTHERS, "hopper", path=NLP)).code == 303
        assert (folder / "nlp.yaml").read_text() == OTHERS

        clock.now = 5.0
        clock.is_released.set()
        page = (await first).body.decode()
        assert Document(page).problems == []
        assert field(page, "text") == HEAVY
        text = Document(page).text
        for words in (
            "The file is good. It is not saved yet.",
            "V100-SXM2-32GB (simulated)",
            "What happens when all come at once was not simulated: that takes more than 5s. "
            "All else on this page holds, and the file can be saved.",
        ):
            assert words in text
        assert "If 500 come at once" not in text
        assert (await send(site, HEAVY)).code == 303


async def leave_during_a_check(site: Site, clock: HeldClock) -> None:
    """Send a form as a browser does whose page is closed before the answer has come."""
    shown = await site.get(EDIT, "turing")
    token = re.findall(r'name="form-token" content="([^"]+)"', shown.body.decode())[0]
    cookie = next(each for each in shown.headers.get_list("Set-Cookie") if each.startswith("_xsrf="))
    body = urlencode({"_xsrf": token, "seen": "", "do": "check", "text": HEAVY, "students": "500"})
    address = urlsplit(site.url + EDIT)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = (
        f"POST {address.path} HTTP/1.1",
        f"Host: {address.netloc}",
        f"User-Agent: Tornado/{tornado.version}",  # the token is for one browser
        f"Cookie: user=turing; {cookie.partition(';')[0]}",
        "Content-Type: application/x-www-form-urlencoded",
        f"Content-Length: {len(body)}",
    )
    writer.write("\r\n".join((*head, "", body)).encode())
    try:
        await clock.holds_a_simulation()
    finally:
        writer.close()
        await writer.wait_closed()
    await site.page(EDIT, "turing")  # by then the service knows


async def test_a_check_ends_when_its_page_is_closed(
    tmp_path: Path, folder: Path, clock: HeldClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, folder, clock, waiting=60.0) as site:
        await leave_during_a_check(site, clock)
        second = check(site, OTHERS, "hopper", NLP, students="1")
        clock.is_released.set()
        assert "If 1 come at once" in text_of(await second)
    # Of the first one, which would have gone on for hundreds of looks, nothing more was decided.
    assert clock.looks < 10
    assert [each for each in caplog.records if each.levelname in ("ERROR", "WARNING")] == []
