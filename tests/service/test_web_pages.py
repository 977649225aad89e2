"""The dashboard's pages as they are sent: who sees what, whole and accessible, and what forms do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool_client import LeaseState
from support.dashboard import ADMIN, PREFIX, Site, courses_of, showing
from support.pages import Document

EVIL = "<script>alert(1)</script>\"'&"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"
PAGES = ["", "history", "courses", "courses/ml"]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 2, courses_of({"ml": "Machine Learning", "nlp": "Language"})) as site:
        yield site


async def fill(site: Site) -> None:
    """Have something of everything: held, waiting, drained, ended."""
    await site.take("50%", "grace", "ml", "train.py")
    await site.take("20%", "ada", "nlp", "Python 3 (GPU 20%)")
    await site.pool.release(await site.take("2%", "ada", "ml"))
    await site.pool.release(await site.take("2%", "grace", "ml"))
    await site.pool.drain("1")
    await site.take("1", "ada", "ml", "waits")
    await site.take("1", "katherine", "nlp")


@pytest.mark.parametrize(
    ("path", "user"), [*((path, "ada") for path in PAGES), *((path, ADMIN) for path in [*PAGES, "admin"])]
)
async def test_every_page_is_whole_for_those_who_cannot_see_it(site: Site, path: str, user: str) -> None:
    assert Document(await site.page(path, user)).problems == []
    await fill(site)
    assert Document(await site.page(path, user)).problems == []


async def test_a_student_reads_no_other_name_anywhere(site: Site) -> None:
    await fill(site)
    for path in (*PAGES, "courses/nlp"):
        page = (await site.get(path, "ada")).body.decode()
        assert "ada" in page
        assert [name for name in ("grace", "katherine", "train.py") if name in page] == []


async def test_an_administrator_reads_all_names(site: Site) -> None:
    await fill(site)
    page = await site.page("admin", ADMIN)
    assert [name for name in ("ada", "grace", "katherine", "train.py") if name not in page] == []
    assert "grace" in await site.page("history", ADMIN)


async def test_the_instructor_of_a_course_reads_its_names_and_its_file(site: Site) -> None:
    await fill(site)
    page = await site.page("courses/ml", "turing")
    assert "grace" in page
    assert "katherine" not in page
    assert "keep_at_most" in page
    assert "keep_at_most" not in await site.page("courses/ml", "ada")


async def test_a_course_is_nothing_to_those_who_are_not_in_it(site: Site) -> None:
    assert "Machine Learning" not in await site.page("courses", "mallory")
    refused, absent = [await site.get(f"courses/{name}", "mallory") for name in ("ml", "absent")]
    assert refused.code == absent.code == 403
    assert refused.body.replace(b"courses/ml", b"") == absent.body.replace(b"courses/absent", b"")


async def test_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    courses = courses_of(
        {"ml": json.dumps(EVIL)}, "title: {title}\nslices: [{{name: '<script>', request: 2%}}]"
    )
    async with showing(tmp_path, 1, courses, courses={EVIL: {}}) as site:
        await site.take("10%", "ada", EVIL, EVIL)
        await site.take("1", "ada", EVIL, EVIL)
        await site.pool.release(await site.take("10%", "ada", EVIL, EVIL))
        for path, user in (*((path, "ada") for path in PAGES), ("admin", ADMIN)):
            page = await site.page(path, user)
            assert ESCAPED in page
            assert page.count("<script") == 1
            assert Document(page).problems == []


async def test_pages_load_nothing_from_elsewhere_and_run_no_script_but_their_own(site: Site) -> None:
    answer = await site.get("", "ada")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Frame-Options"] == "DENY"
    page = Document(answer.body.decode())
    loaded = [
        each.get("src") or each.get("href") for tag, each in page.elements if tag in ("script", "img", "link")
    ]
    assert loaded
    for address in loaded:
        assert address
        assert address.startswith(f"{PREFIX}static/")
        assert (await site.get(address.removeprefix(PREFIX), "ada")).code == 200


@pytest.mark.parametrize("path", ["admin", "leases/1-abc"])
async def test_pages_of_administrators_are_theirs_alone(site: Site, path: str) -> None:
    assert (await site.get(path, "ada")).code == 403


async def test_the_page_of_one_lease_is_whole(site: Site) -> None:
    lease = await site.take("20%", "ada", "ml", "train.py")
    page = Document(await site.page(f"leases/{lease}", ADMIN))
    assert page.problems == []
    assert "ada reads it" in page.text
    assert (await site.get("leases/1-absent", ADMIN)).code == 404


async def test_what_is_not_there_is_a_page_too(site: Site) -> None:
    answer = await site.get("nowhere", "ada")
    assert answer.code == 404
    assert Document(answer.body.decode()).problems == []


class TestForms:
    async def test_a_slice_is_given_back(self, site: Site) -> None:
        lease = await site.take("20%", "ada", "ml")
        answer = await site.post(f"leases/{lease}/release", "ada")
        assert (answer.code, answer.headers["Location"]) == (303, f"{PREFIX}?said=given-back")
        assert (await site.pool.lease(lease)).state is LeaseState.ENDED
        assert "The slice was given back." in await site.page("?said=given-back", "ada")

    async def test_only_known_words_are_said(self, site: Site) -> None:
        assert (
            "free"
            not in (await site.page("?said=free-money", "ada")).partition("<main")[2].partition("<section")[0]
        )

    async def test_nobody_gives_back_what_is_another_s(self, site: Site) -> None:
        lease = await site.take("20%", "grace", "ml")
        await site.post(f"leases/{lease}/release", "ada")
        assert (await site.pool.lease(lease)).state is LeaseState.HELD

    @pytest.mark.parametrize("path", ["release", "revoke"])
    async def test_a_form_without_its_token_does_nothing(self, site: Site, path: str) -> None:
        lease = await site.take("20%", "ada", "ml")
        answer = await site.post(f"leases/{lease}/{path}", ADMIN, _xsrf="made up", why="none")
        assert answer.code == 403
        assert (await site.pool.lease(lease)).state is LeaseState.HELD

    async def test_a_device_is_drained_and_used_again(self, site: Site) -> None:
        (device, *_) = (await site.pool.status()).devices
        for verb, is_drained in (("drain", True), ("undrain", False)):
            answer = await site.post(f"devices/{device.device.uuid}/{verb}", ADMIN, page="admin")
            assert answer.headers["Location"] == f"{PREFIX}admin?said={verb}ed"
            assert (await site.pool.status()).devices[0].drained is is_drained

    async def test_only_administrators_drain(self, site: Site) -> None:
        (device, *_) = (await site.pool.status()).devices
        assert (await site.post(f"devices/{device.device.uuid}/drain", "ada")).code == 403
        assert not (await site.pool.status()).devices[0].drained
