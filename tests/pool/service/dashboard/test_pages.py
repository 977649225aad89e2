"""The dashboard's pages as they are sent: who sees what, whole and accessible, and what forms do."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.policy.sharing import Sharing
from gpu_pool.pool import pool
from gpu_pool.service.dashboard.other_ways import OtherWays
from gpu_pool.store import leases
from gpu_pool_client import Activity, EndReason, Failure, LeaseState, PreparedStatus, Process
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
    ("path", "user"),
    [*((path, "ada") for path in PAGES), *((path, ADMIN) for path in [*PAGES, "admin", "admin/other-ways"])],
)
async def test_every_page_is_whole_for_those_who_cannot_see_it(site: Site, path: str, user: str) -> None:
    assert Document(await site.page(path, user)).problems == []
    await fill(site)
    assert Document(await site.page(path, user)).problems == []


async def test_administrators_see_what_there_is_of_prepared_pods(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Prepared pods" not in await site.page("admin", ADMIN)
    found = (PreparedStatus("ml", 5, {"n1": 2}, 1, f"There is {EVIL}."), PreparedStatus("nlp", 1, {}))
    monkeypatch.setattr(site.pool.backend, "prepared_pods", lambda: found)
    page = await site.page("admin", ADMIN)
    assert Document(page).problems == []
    assert "2 of at most 5 ready (n1: 2), 1 starting" in page
    assert f"There is {ESCAPED}" in page
    assert "0 of at most 1 ready" in page


async def test_no_page_calls_a_whole_gpu_by_a_bare_number(site: Site) -> None:
    await site.pool.release(await site.take("1", "ada", "ml"))
    await site.take("2%", "grace", "ml")
    await site.take("1", "grace", "ml")
    await site.take("1", "ada", "ml")
    for path in (*PAGES, "admin"):
        cells = re.findall(r"<(?:td|h3)[^>]*>(.*?)</(?:td|h3)>", await site.page(path, ADMIN), re.DOTALL)
        assert "1" not in [each.strip() for each in cells if path != "courses/ml"], path  # it counts slices
    assert "<td>a whole GPU</td>" in await site.page("history", ADMIN)
    assert "a whole GPU</h3>" in await site.page("", "ada")


@pytest.mark.parametrize("seconds", [3_000_000 * 86_400, 1e18, 1e308, float("inf")])
async def test_a_lease_that_ends_in_no_year_is_shown_beside_the_others(site: Site, seconds: float) -> None:
    await fill(site)
    mine = await site.take("2%", "turing", "nlp")
    with closing(sqlite3.connect(site.store)) as store, store:
        changed = store.execute("UPDATE lease SET ends_by = ? WHERE id = ?", (seconds, mine))
        assert changed.rowcount == 1
    for path in (*PAGES, "admin", f"leases/{mine}"):
        page = await site.page(path, ADMIN)
        assert Document(page).problems == []
    shown = await site.page("admin", ADMIN)
    assert [name for name in ("ada", "grace", "katherine", "turing") if name not in shown] == []


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


async def test_the_page_of_administrators_is_theirs_alone(site: Site) -> None:
    assert (await site.get("admin", "ada")).code == 403


async def test_the_page_of_anothers_lease_is_like_that_of_none(site: Site) -> None:
    lease = await site.take("20%", "grace", "ml")
    refused, absent = [(await site.get(f"leases/{each}", "ada")) for each in (lease, "1-abc")]
    assert refused.code == absent.code == 404
    assert refused.body.replace(lease.encode(), b"") == absent.body.replace(b"1-abc", b"")


async def test_the_page_of_one_lease_is_whole(site: Site) -> None:
    lease = await site.take("20%", "ada", "ml", "train.py")
    page = Document(await site.page(f"leases/{lease}", ADMIN))
    assert page.problems == []
    assert "ada reads it" in page.text
    assert (await site.get("leases/1-absent", ADMIN)).code == 404


async def test_the_page_of_a_lease_says_how_its_kernel_failed(site: Site) -> None:
    lease = await site.take("20%", "ada", "ml")
    failure = Failure(1.0, "It ended with <b>status 1</b>.", "pod-1", "node-7", "lab:1")
    await site.pool.store.run(leases.record_failure, lease, failure)
    own, admins = [Document(await site.page(f"leases/{lease}", user)).text for user in ("ada", ADMIN)]
    assert "Its kernel failed: It ended with <b>status 1</b>." in own
    assert "node-7" not in own
    assert "(pod pod-1 on node-7, image lab:1)" in admins
    await site.pool.release(lease)
    assert "Its kernel failed: It ended with" in Document(await site.page("history", "ada")).text
    assert "Its kernel failed" not in await site.page("history", "grace")


async def test_what_is_not_there_is_a_page_too(site: Site) -> None:
    answer = await site.get("nowhere", "ada")
    assert answer.code == 404
    assert Document(answer.body.decode()).problems == []


async def kernel(site: Site, user: str = "ada") -> str:
    """Hold a slice for what a kernel manager looks after: this process stands for its kernel."""
    lease = await site.take("20%", user, "ml", "Python 3 (GPU 20%)")
    await site.pool.attach(lease, Process.current(), grace=5.0)
    return lease


@pytest.fixture
def uses_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | None], None]:
    """Return what makes kernels have used CUDA, or not, or nobody knows."""

    def use(initialised: bool | None) -> None:
        found = Activity(initialised=initialised, working=False)
        monkeypatch.setattr(pool, "activity_of", lambda *_: found)

    return use


class TestTakingBack:
    """What it does to the kernel stands on the page, and nothing else is done."""

    @pytest.mark.parametrize("user", ["ada", ADMIN])
    async def test_the_page_says_which_kernel_lives_on_and_which_ends(
        self, site: Site, user: str, uses_cuda: Callable[[bool | None], None]
    ) -> None:
        lease = await kernel(site)
        for initialised, says, ends in (
            (False, "has not used the GPU: it lives on with its variables", False),
            (True, "All variables of the kernel are lost.", True),
            (None, "All variables of the kernel are lost.", True),
        ):
            uses_cuda(initialised)
            page = Document(await site.page(f"leases/{lease}", user))
            assert page.problems == []
            assert says in page.text
            assert ("All variables of the kernel are lost." in page.text) is ends
            assert "when idle" in page.text
            assert ("Drain GPU 0 instead" in page.text) is (user == ADMIN)

    async def test_a_kernel_that_has_not_used_cuda_keeps_its_lease(self, site: Site) -> None:
        for user, path, words, reason, said in (
            ("ada", "release", "", EndReason.RELEASED, "given-back-kept"),
            (ADMIN, "revoke", "Exam.", EndReason.REVOKED, "admin?said=revoked-kept"),
        ):
            lease = await kernel(site)
            answer = await site.post(f"leases/{lease}/{path}", user, why=words, effect="keeps-kernel")
            assert answer.headers["Location"].endswith(said)
            found = await site.pool.get_lease(lease)
            assert (found.state, found.asked_back, found.notice) == (LeaseState.PARKED, reason, words)
            shown = Document(await site.page("", "ada")).text
            assert ("An administrator took this kernel's GPU slice back" in shown) is (user == ADMIN)
            assert (await site.pool.status()).devices[0].held_milli == 0
            assert "The slice is lent to others" in Document(await site.page(f"leases/{lease}", "ada")).text
            await site.pool.release(lease)

    @pytest.mark.parametrize(("path", "user"), [("release", "ada"), ("revoke", ADMIN)])
    async def test_what_would_end_a_kernel_meanwhile_is_shown_again(
        self, site: Site, path: str, user: str, uses_cuda: Callable[[bool | None], None]
    ) -> None:
        lease = await kernel(site)
        uses_cuda(True)
        answer = await site.post(f"leases/{lease}/{path}", user, why="My reason.", effect="keeps-kernel")
        page = Document(answer.body.decode())
        assert answer.code == 200
        assert page.problems == []
        assert "Nothing was done, because the situation has changed." in page.text
        assert "All variables of the kernel are lost." in page.text
        assert ('value="My reason."' in answer.body.decode()) is (user == ADMIN)
        assert (await site.pool.get_lease(lease)).state is LeaseState.HELD
        await site.post(f"leases/{lease}/{path}", user, why="My reason.", effect="ends-kernel")
        assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED

    async def test_it_may_wait_until_the_kernel_is_idle(self, site: Site) -> None:
        lease = await kernel(site)
        answer = await site.post(f"leases/{lease}/revoke", ADMIN, why="Exam.", when="idle")
        assert answer.headers["Location"] == f"{PREFIX}admin?said=asked-back"
        found = await site.pool.get_lease(lease)
        assert (found.state, found.asked_back) == (LeaseState.HELD, EndReason.REVOKED)
        page = Document(await site.page(f"leases/{lease}", "ada"))
        assert "An administrator asks for this kernel's GPU slice: it goes back as soon as" in page.text
        assert "“Exam.”" in page.text
        assert "when idle" not in page.text

    async def test_whoever_waits_leaves_the_queue(self, site: Site) -> None:
        await site.take("2", "grace", "ml")
        lease = await site.take("1", "ada", "ml")
        assert (
            "The position in the queue is lost." in Document(await site.page(f"leases/{lease}", "ada")).text
        )
        assert "Remove from the queue" in await site.page(f"leases/{lease}", ADMIN)
        await site.post(f"leases/{lease}/release", "ada", effect="leaves-queue")
        assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED

    async def test_only_administrators_revoke(self, site: Site) -> None:
        lease = await kernel(site, "grace")
        answer = await site.post(f"leases/{lease}/revoke", "ada", why="Mine.")
        assert answer.code == 403
        assert (await site.pool.get_lease(lease)).state is LeaseState.HELD


async def test_a_drained_gpu_looks_drained_and_not_free(site: Site) -> None:
    await site.take("10%", "ada", "ml")
    for path, user in (("", "ada"), ("admin", ADMIN)):
        await site.pool.drain("0")
        page = Document(await site.page(path, user))
        assert "drained 90%, 28.8 GiB of 32 GiB Drained by an administrator since" in page.text
        assert page.text.count(" free ") == 1, "the other one's"
        await site.pool.drain("0", drained=False)


@pytest.mark.parametrize(
    ("days", "texts"), [(1, {"00:00", "06:00", "12:00", "18:00"}), (7, None), (30, None)]
)
async def test_the_plot_has_round_times_and_an_end(site: Site, days: int, texts: set[str] | None) -> None:
    plot = (
        (await site.page(f"history?days={days}", "ada")).partition('<g class="ticks"')[2].partition("</g>")[0]
    )
    *found, last = re.findall(r">([^<>]+)</text>", plot)
    assert last == "now"
    assert len(found) >= 3
    assert all(each in texts if texts else re.fullmatch(r"\d+ [A-Z][a-z][a-z]", each) for each in found)


async def test_only_administrators_see_in_the_plot_when_cells_ran(site: Site) -> None:
    lease = await site.take("1", "ada", "ml")
    await site.pool.report_busy(lease, [(time.time(), 60.0)])
    await site.pool.release(lease)
    page = await site.page("history", ADMIN)
    assert Document(page).problems == []
    assert "by course, and while cells ran." in page
    assert 'class="busy"' in page
    assert 'class="busy"' not in await site.page("history", "ada")


async def test_what_slices_could_use_on_top_is_in_the_history(site: Site) -> None:
    await site.pool.release(await site.take("2%", "ada", "ml"))
    assert "on top" not in await site.page("history", "ada")
    lease = await site.take("2%..10%", "ada", "ml")
    await site.pool.core.reconciler.once()
    await site.pool.release(lease)
    page = await site.page("history", "ada")
    assert Document(page).problems == []
    assert 'class="burst"' in page
    assert "GiB-hours on top" in page
    assert "<td>2.56 GiB</td>" in page


async def test_an_administrator_sees_what_other_ways_would_have_done(site: Site) -> None:
    assert "no lease that was held" in await site.page("admin/other-ways", ADMIN)
    await site.pool.release(await site.take("1", "ada", "ml"))
    assert "No server has said in this time" in await site.page("admin/other-ways", ADMIN)
    lease = await site.take("1", "ada", "ml")
    await site.pool.report_busy(lease, [(time.time(), 60.0)])
    await site.pool.release(lease)
    page = await site.page("admin/other-ways?days=7&more=2", ADMIN)
    assert Document(page).problems == []
    assert "Simulated: 2 leases and 2 cells on 4 GPUs" in page
    assert "yield after 1 min, when somebody waits" in page
    assert "as your courses are now</th>" not in page, "they are as one of those that are shown"
    assert "admin/other-ways" in await site.page("admin", ADMIN)
    assert (await site.get("admin/other-ways", "ada")).code == 403


async def test_what_other_ways_would_have_done_is_not_worked_out_for_long(site: Site) -> None:
    status = await site.pool.status()
    row = {
        "requested_at": 0,
        "held_at": 0,
        "ended_at": 9,
        "held_seconds": 9,
        "request": "1",
        "busy": [[0, 1]],
    }
    asked = OtherWays(seconds=1.0, clock=iter(range(100)).__next__)
    assert "takes more than 1s here" in (await asked.ask([row], status, Sharing(), 0)).why_not


async def test_what_courses_say_of_idle_kernels_is_one_of_the_ways(tmp_path: Path) -> None:
    said = "title: {title}\nslices: [{{name: Small, request: 2%}}]\nidle_limit: 5min\nyield_after: never"
    async with showing(tmp_path, 1, courses_of({"ml": "Machine Learning"}, said)) as site:
        lease = await site.take("1", "ada", "ml")
        await site.pool.report_busy(lease, [(time.time(), 60.0)])
        await site.pool.release(lease)
        page = await site.page("admin/other-ways", ADMIN)
        assert Document(page).problems == []
        assert "as your courses are now</th>" in page


async def test_pages_are_named_after_the_pool(site: Site) -> None:
    page = await site.page("", "ada")
    assert page.partition("<title>")[2].partition("</title>")[0].endswith("GPU pool")
    assert re.search(rf'class="brand" href="{PREFIX}">.*GPU pool</a>', page)
    assert re.search(r'<a href="[^"]*/home">JupyterHub</a>', page)


async def test_no_value_of_an_example_looks_like_a_setting(site: Site) -> None:
    page = Document(await site.page("courses/ml", "turing")).text
    assert "longest_leaseno limitHow long a slice may be kept at most." in page


class TestForms:
    async def test_a_slice_is_given_back(self, site: Site) -> None:
        lease = await site.take("20%", "ada", "ml")
        answer = await site.post(f"leases/{lease}/release", "ada")
        assert (answer.code, answer.headers["Location"]) == (303, f"{PREFIX}?said=given-back")
        assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED
        assert "The slice was given back." in await site.page("?said=given-back", "ada")

    async def test_only_known_words_are_said(self, site: Site) -> None:
        assert (
            "free"
            not in (await site.page("?said=free-money", "ada")).partition("<main")[2].partition("<section")[0]
        )

    async def test_nobody_gives_back_what_is_another_s(self, site: Site) -> None:
        lease = await site.take("20%", "grace", "ml")
        for user in ("ada", "turing"):  # a student, and who teaches the course
            for when in ("now", "idle"):
                answer = await site.post(f"leases/{lease}/release", user, when=when)
                assert answer.code == 404
                assert "There is no lease" in Document(answer.body.decode()).text
        assert (await site.pool.get_lease(lease)).state is LeaseState.HELD

    async def test_what_has_ended_by_itself_has_been_given_back(self, site: Site) -> None:
        lease = await site.take("20%", "ada", "ml")
        await site.pool.release(lease)
        answer = await site.post(f"leases/{lease}/release", "ada")
        assert (answer.code, answer.headers["Location"]) == (303, f"{PREFIX}?said=given-back")

    @pytest.mark.parametrize("path", ["release", "revoke"])
    async def test_a_form_without_its_token_does_nothing(self, site: Site, path: str) -> None:
        lease = await site.take("20%", "ada", "ml")
        answer = await site.post(f"leases/{lease}/{path}", ADMIN, _xsrf="made up", why="none")
        assert answer.code == 403
        assert (await site.pool.get_lease(lease)).state is LeaseState.HELD

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
