"""The spawn page's text, and what is free. No Hub, no pool."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from typing import Any

import pytest

from gpu_pool.courses import parse_course
from gpu_pool_client import DeviceStatus, parse_request
from gpu_pool_client._free import free_now
from gpu_pool_spawner.choices import OwnCourses
from gpu_pool_spawner.page import ServerChoice, SpawnPage, dashboard_of, say_size, spawn_page
from gpu_pool_spawner.pool_view import PoolSupply
from support.pools import V100, device

NOW = datetime(2026, 10, 12, 10, tzinfo=timezone.utc)
EMPTY = DeviceStatus(V100, 0, 0, 0, 0)
FULL = DeviceStatus(V100, 1000, 32768, 0, 1)
ML = parse_course("ml.yaml", b"title: ML\nslices: [{name: Small, request: 2%}]")
ART = parse_course("art.yaml", b"title: Art\nslices: [{name: '<b>', request: 50%}]")


class Tags(HTMLParser):
    """The tags of a page with what they say, as a browser reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page(*statuses: DeviceStatus, **facts: object) -> str:
    supply = PoolSupply(statuses, **facts)  # type: ignore[arg-type]
    return spawn_page(SpawnPage(OwnCourses({"ml": ML}), supply, NOW))


def test_the_only_course_is_chosen_already() -> None:
    assert " checked" in page(EMPTY)
    assert " checked" not in spawn_page(SpawnPage(OwnCourses({"ml": ML, "art": ART}), PoolSupply(), NOW))


def test_the_course_of_the_last_time_is_chosen_already() -> None:
    both = spawn_page(SpawnPage(OwnCourses({"ml": ML, "art": ART}), PoolSupply(), NOW, last="art"))
    assert 'value="art" required checked' in both
    assert both.count("checked") == 1


@pytest.mark.parametrize("last", [["art"], {"a": 1}, None, "gone"])
def test_what_was_chosen_long_ago_may_be_anything(last: object) -> None:
    assert "checked" not in spawn_page(
        SpawnPage(OwnCourses({"ml": ML, "art": ART}), PoolSupply(), NOW, last=last)
    )


def test_a_course_says_until_when_it_is_open() -> None:
    lab = parse_course(
        "lab.yaml", b"title: Lab\nslices: [{name: S, request: 2%}]\nhours: Mon 10:00-12:00\ntime_zone: UTC"
    )
    assert "open until Mon 2026-10-12 at 12:00 (UTC)" in spawn_page(
        SpawnPage(OwnCourses({"lab": lab}), None, NOW)
    )
    assert "open" not in page(EMPTY)


def test_what_describes_a_choice_is_found_whatever_its_name_is() -> None:
    """Screen readers look for it: ``aria-describedby`` is a list of ids with spaces between."""
    names = ["Lab place", "Lab", "place", "<b>", 'a "b"', "Übung\t1"]
    choices = [ServerChoice(f"ml/{name}", name, f"about {number}") for number, name in enumerate(names)]
    # The second course is named as what describes the first could be.
    courses = {"ml": ML, "art": ART, "art-about": ART}
    html = spawn_page(SpawnPage(OwnCourses(courses), None, NOW, without=True, servers={"ml": choices}))
    read = Tags()
    read.feed(html)
    ids = [each["id"] or "" for _, each in read.found if "id" in each]
    assert len(ids) == len(set(ids)) == 1 + 2 * (len(names) + 3)
    assert [each.split() for each in ids] == [[each] for each in ids]
    fields = [each for tag, each in read.found if tag == "input"]
    assert [each["value"] for each in fields] == [*(each.value for each in choices), "art", "art-about", ""]
    assert {each["aria-describedby"] for each in fields} < set(ids)
    assert [each["id"] for each in fields] == [each["for"] for tag, each in read.found if tag == "label"]


def test_the_name_of_a_slice_is_no_html() -> None:
    assert "&lt;b&gt;: 50% of a GPU" in spawn_page(SpawnPage(OwnCourses({"art": ART}), PoolSupply(), NOW))


def test_a_pool_that_does_not_answer_is_told_and_stops_nobody() -> None:
    silent = spawn_page(SpawnPage(OwnCourses({"ml": ML}), None, NOW))
    assert "The pool does not answer at the moment" in silent
    assert 'type="radio"' in silent
    assert "free now" not in silent


@pytest.mark.parametrize(
    ("status", "wait", "words"),
    [
        (FULL, "", "none free now</span>"),
        (FULL, "a wait of perhaps about 4 min", "none free now, a wait of perhaps about 4 min"),
        (EMPTY, "a wait of perhaps about 4 min", "none free for you now, a wait of perhaps about 4 min"),
        (EMPTY, "", "50 free now"),
        (FULL, "<b>", "none free now, &lt;b&gt;"),
    ],
)
def test_where_none_is_free_the_wait_is_told(status: DeviceStatus, wait: str, words: str) -> None:
    waits = {("ml", parse_request("2%")): wait, ("art", parse_request("2%")): "wait a day"}
    assert words in page(status, waits=waits)


@pytest.mark.parametrize("status", [EMPTY, FULL, replace(EMPTY, drained=True, drained_at=0.0)])
def test_what_would_be_refused_is_told_in_sentences_of_their_own(status: DeviceStatus) -> None:
    refusals = {("ml", parse_request("2%")): "You asked for 2%; the most here is 1%. Ask for less."}
    html = page(status, refusals=refusals)
    assert (
        '2% of a GPU<span class="text-body-secondary">, not available now: '
        "You asked for 2%; the most here is 1%. Ask for less.</span>" in html
    )
    assert "free" not in html


def test_what_is_free_in_anothers_queue_is_not_guessed() -> None:
    elsewhere = replace(EMPTY, device=replace(V100, unbounded=True))
    assert free_now(parse_request("2%"), [elsewhere]) is None
    assert "free now" not in page(elsewhere)
    waits = {("ml", parse_request("2%")): "a wait of perhaps about 4 min"}
    assert '2% of a GPU<span class="text-body-secondary">, a wait of perhaps' in page(elsewhere, waits=waits)


def test_an_offer_that_is_called_by_its_size_is_told_once() -> None:
    text = "title: X\nslices: [{name: A whole GPU, request: 1}, {name: Small, request: 2%}]"
    course = parse_course("ml.yaml", text.encode())
    shown = spawn_page(SpawnPage(OwnCourses({"ml": course}), PoolSupply((EMPTY,)), NOW))
    assert "<li>A whole GPU<span" in shown
    assert "<li>Small: 2% of a GPU<span" in shown


def test_what_an_administrator_has_drained_is_told() -> None:
    drained = replace(EMPTY, drained=True, drained_at=0.0)
    assert "none free now. An administrator has drained GPU 0 (since" in page(drained)


def test_who_is_in_no_course_is_told_whom_to_ask() -> None:
    nobody = spawn_page(SpawnPage(OwnCourses(), None, NOW, contact="<ada>"))
    assert "You are in no course. Ask &lt;ada&gt;." in nobody
    assert "radio" not in nobody


def test_without_a_course_where_that_is_allowed() -> None:
    only = spawn_page(SpawnPage(OwnCourses(), None, NOW, without=True))
    assert 'value="" required checked' in only
    assert "display: none" not in only
    assert spawn_page(SpawnPage(OwnCourses({"ml": ML}), PoolSupply(), NOW, without=True)).count("radio") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2%", "2% of a GPU"),
        ("2x50%", "50% of each of 2 GPUs"),
        ("1", "a whole GPU"),
        ("4 model=A100", "4 whole GPUs (model=A100)"),
        ("1.5GiB", "1.5 GiB of the memory of a GPU"),
        ("2% for 20min", "2% of a GPU for 20min"),
        ("2%..10%", "2% of a GPU, up to 10% of its memory while that is free"),
        ("4 model=A100 for 2h", "4 whole GPUs (model=A100) for 2h"),
    ],
)
def test_a_size_in_words(text: str, words: str) -> None:
    assert say_size(parse_request(text)) == words


TWO = (EMPTY, DeviceStatus(device(1), 0, 0, 0, 0))
MIG = replace(EMPTY, device=replace(V100, mig_profile="1g.5gb", milli=142, memory_mib=4864))


@pytest.mark.parametrize(
    ("text", "statuses", "free"),
    [
        ("2%", [EMPTY], 50),
        ("2%", [FULL], 0),
        ("2%", TWO, 100),
        ("2%", [replace(EMPTY, held_milli=970)], 1),
        ("2%", [replace(EMPTY, held_memory_mib=32768)], 0),
        ("2%", [replace(EMPTY, milli=2000)], 50),
        ("2%", [replace(EMPTY, drained=True)], 0),
        ("2%", [replace(EMPTY, device=replace(V100, contexts=48), held_contexts=40)], 8),
        ("4GiB", [EMPTY], 8),
        ("64GiB", [EMPTY], 0),
        ("1", TWO, 2),
        ("2", TWO, 1),
        ("2", [EMPTY], 0),
        ("2x50%", [EMPTY, replace(TWO[1], held_milli=500)], 1),
        ("10%", [MIG], 1),
        ("20%", [MIG], 0),
        ("10%", [replace(MIG, leases=1)], 0),
        ("2% model=v100 index=1", TWO, 50),
        ("2% model=A100", TWO, 0),
        ("2% driver>=550.60", [EMPTY], 0),
        ("2% memory>=40GiB", [EMPTY], 0),
    ],
)
def test_how_many_are_free(text: str, statuses: list[DeviceStatus], free: int) -> None:
    assert free_now(parse_request(text), statuses) == free


def test_a_device_of_one_size_is_free_for_that_size() -> None:
    shared = DeviceStatus(replace(V100, one_size=True), 200, 2 * 3276, 0, 2)
    assert [free_now(parse_request(text), [shared]) for text in ("10%", "2%")] == [8, 0]


@pytest.mark.parametrize(
    ("pool_url", "path"),
    [
        ("http://127.0.0.1:8000/services/gpu-pool", "/services/gpu-pool/"),
        ("https://hub.example/base/services/pool/", "/base/services/pool/"),
        ("unix:/run/gpu-pool/socket", ""),
        ("http://pool.example:10101", ""),
        ("unix:", ""),
        ("", ""),
    ],
)
def test_the_dashboard_is_where_the_hub_has_it_as_a_service(pool_url: str, path: str) -> None:
    assert dashboard_of(pool_url) == path


@pytest.mark.parametrize("courses", [{}, {"ml": ML}])
def test_the_page_leads_to_the_dashboard_also_who_is_in_no_course(courses: dict[str, Any]) -> None:
    facts = SpawnPage(OwnCourses(courses), PoolSupply(), NOW, dashboard='/services/"pool"/')
    tags = Tags()
    tags.feed(spawn_page(facts))
    assert [found["href"] for tag, found in tags.found if tag == "a"] == ['/services/"pool"/']
    assert "<a " not in spawn_page(replace(facts, dashboard=""))
