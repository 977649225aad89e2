"""The course that a request over TCP names is held to that of the server that asks, as the Hub has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Holder, NotAllowed, connect, parse_request
from support.hub import ADMIN, Hub, HubService, serving_hub
from support.jupyter_env import eventually
from support.service import ForkServer

#: By name, who is in it, as YAML. The Hub's group cs101 has ada in it.
COURSES = {"intro": "{groups: [cs101]}", "thesis": "{users: [ada, bob]}", "secret": "{users: [bob]}"}
FILE = "title: {name}\nwho: {who}\nslices:\n  - {{name: Small, request: 2%}}\n"


def settings(folder: Path) -> str:
    """Write the course files; return the settings of a pool that follows them."""
    for name, who in COURSES.items():
        (folder / f"{name}.yaml").write_text(FILE.format(name=name, who=who))
    return f"c.PoolSettings.courses_dir = {str(folder)!r}\n"


@pytest.fixture
async def behind(children: ForkServer, hub: Hub, folder: Path, tmp_path: Path) -> AsyncIterator[HubService]:
    async with serving_hub(children, hub, folder / "pool", settings(tmp_path)) as behind:
        yield behind


async def ask(behind: HubService, token: str, **more: object) -> tuple[int, Any]:
    """Ask for a slice; return the status, and the course or the refusal."""
    body = {"request": "2%", "key": "key", **more}
    status, answer = await behind.ask(token, "POST", "/leases", body)
    return status, answer["holder"]["course"] if status == 200 else answer["message"]


@pytest.mark.parametrize("named", [{"course": "intro"}, {}, {"course": ""}, {"course": None}])
async def test_a_server_asks_for_its_own_course_even_if_it_names_none(
    behind: HubService, hub: Hub, named: dict[str, object]
) -> None:
    token = await hub.start_server("ada", "lab", course="intro")
    assert await ask(behind, token, **named) == (200, "intro")
    await hub.stop_server("ada", "lab")


async def test_a_server_does_not_ask_for_another_course_of_its_user(behind: HubService, hub: Hub) -> None:
    token = await hub.start_server("ada", "lab", course="intro")
    status, words = await ask(behind, token, course="thesis")
    assert status == 403
    assert words == "This server was started for the course 'intro', but asks for a slice of 'thesis'."
    assert "request 2%: NotAllowed" in behind.service.log
    assert (await behind.ask(token, "GET", "/status"))[1]["leases"] == []
    await hub.stop_server("ada", "lab")


async def test_a_course_in_user_options_that_the_user_is_not_in_is_refused(
    behind: HubService, hub: Hub
) -> None:
    # As a spawner that checks nothing would start it.
    token = await hub.start_server("ada", "lab", course="secret")
    for named in ({"course": "secret"}, {}):
        assert await ask(behind, token, **named) == (403, "You are not in this course.")
    await hub.stop_server("ada", "lab")


async def test_a_server_started_again_for_another_course_asks_for_that_one(
    behind: HubService, hub: Hub
) -> None:
    await hub.start_server("ada", "lab", course="intro")
    await hub.stop_server("ada", "lab")
    token = await hub.start_server("ada", "lab", course="thesis")
    assert await ask(behind, token) == (200, "thesis")
    assert (await ask(behind, token, course="intro", key="more"))[0] == 403
    await hub.stop_server("ada", "lab")


@pytest.mark.parametrize("options", [{}, {"course": ["intro"]}, {"course": ""}, {"profile": "intro"}])
async def test_a_server_for_no_course_asks_for_those_of_its_user(
    behind: HubService, hub: Hub, options: dict[str, object]
) -> None:
    token = await hub.start_server("ada", "free", **options)
    assert await ask(behind, token, course="thesis") == (200, "thesis")
    assert (await ask(behind, token, course="secret", key="more"))[0] == 403
    await hub.stop_server("ada", "free")


async def test_where_the_hub_does_not_tell_the_course_its_members_may_use_it(
    behind: HubService, hub: Hub
) -> None:
    token = await hub.start_server("ada", "untold", course="intro")
    assert await ask(behind, token, course="thesis") == (200, "thesis")
    assert (await ask(behind, token, course="secret", key="more"))[0] == 403
    await hub.stop_server("ada", "untold")


async def test_an_administrator_may_allow_other_courses_of_the_user(
    children: ForkServer, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    allowed = settings(tmp_path) + "c.ServeApp.other_courses = True\n"
    async with serving_hub(children, hub, folder / "pool", allowed) as behind:
        token = await hub.start_server("ada", "lab", course="intro")
        assert await ask(behind, token, course="thesis") == (200, "thesis")
        assert (await ask(behind, token, course="secret", key="more"))[0] == 403
        await hub.stop_server("ada", "lab")


async def test_a_server_learns_what_its_course_offers_now(behind: HubService, hub: Hub) -> None:
    token = await hub.start_server("ada", "lab", course="intro")
    status, found = await behind.ask(token, "GET", "/offers")
    assert (status, found) == (200, ["2%"])
    assert (await behind.ask(token, "GET", "/offers?course=intro"))[1] == found
    assert (await behind.ask(token, "GET", "/offers?course=thesis"))[0] == 403
    assert (await behind.ask(await hub.token("ada"), "GET", "/offers?course=secret"))[0] == 403
    assert await behind.ask(await hub.token("ada"), "GET", "/offers?course=nothing") == (200, None)
    assert await behind.ask(await hub.token("ada"), "GET", "/offers") == (200, None)
    await hub.stop_server("ada", "lab")


async def test_a_forecast_is_held_to_the_same_rules(behind: HubService, hub: Hub) -> None:
    token, admin = await hub.start_server("ada", "lab", course="intro"), await hub.token(ADMIN)
    for given, status in (
        ("", 200),
        ("&course=intro", 200),
        ("&course=thesis", 403),
        ("&anybody=1", 403),
    ):
        assert (await behind.ask(token, "GET", f"/forecast?request=2%25{given}"))[0] == status
    secret = "/forecast?request=2%25&course=secret"
    assert (await behind.ask(await hub.token("ada"), "GET", secret))[0] == 403
    # An administrator may ask what anybody in a course would meet, whom nobody knows yet.
    assert await behind.ask(admin, "GET", f"{secret}&anybody=1") == (200, None)
    assert (await behind.ask(admin, "GET", secret))[0] == 403
    assert (await behind.ask(admin, "GET", "/forecast?course=secret&anybody=1"))[0] == 400
    await hub.stop_server("ada", "lab")


async def test_a_notebook_is_told_of_a_change_of_its_course(
    behind: HubService, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", await hub.start_server("ada", "lab", course="intro"))
    async with connect(behind.url) as pool:
        assert await pool.offers(Holder("")) == (parse_request("2%"),)
        changed = FILE.format(name="intro", who=COURSES["intro"]).replace("2%", "4%")
        (tmp_path / "intro.yaml").write_text(changed)
        await eventually(
            lambda: pool.offers(Holder("", "intro")), lambda seen: seen == (parse_request("4%"),)
        )
        words = (
            "offers 4% .*the course has changed: reload the page, or else stop your server and start it again"
        )
        with pytest.raises(NotAllowed, match=words):
            await pool.request(parse_request("2%"), Holder(""), "key")
    await hub.stop_server("ada", "lab")


async def test_a_notebook_reads_why(behind: HubService, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", await hub.start_server("ada", "lab", course="intro"))
    async with connect(behind.url) as pool:
        with pytest.raises(NotAllowed, match=r"asks for a slice of 'thesis'.* Start a server for that"):
            await pool.request(parse_request("2%"), Holder("", "thesis"), "key")
    await hub.stop_server("ada", "lab")
