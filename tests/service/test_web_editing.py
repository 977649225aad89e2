"""Course files on the dashboard: who may edit what, and that neither file nor typed text is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse

from gpu_pool.coursefiles import CourseFolder
from gpu_pool.coursefiles.editing import RESERVED
from gpu_pool.courses import CourseVersion
from gpu_pool.ledger.versions import MOST_VERSIONS
from gpu_pool_client import Holder, NotAllowed, parse_request
from support.dashboard import ADMIN, PREFIX, Site, courses_of, showing
from support.pages import Document
from support.pools import running

COURSE = """\
# The comments stay.
title: Machine Learning
who: {users: [ada]}
instructors: [turing]
slices:
  - {name: Small, request: 2%}
quota: {share: 50%}
weight: 2
"""
LARGER = COURSE.replace("2%}", "5%}")
EDIT = "courses/ml/edit"
#: A text of YAML that would need some 10^9 items, were references read.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "courses"
    made.mkdir()
    (made / "ml.yaml").write_text(COURSE)
    (made / "nlp.yaml").write_text(COURSE.replace("turing", "hopper").replace("ada", "grace"))
    return made


@pytest.fixture
async def site(tmp_path: Path, folder: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 1, courses_dir=str(folder)) as site:
        yield site


def field(page: str, name: str) -> str:
    """Return what a field of the form on a page has in it."""
    found = re.search(rf'name="{name}"[^>]*value="([^"]*)"', page)
    if found is None:
        found = re.search(rf'<textarea id="{name}"[^>]*>\n?([^<]*)</textarea>', page)
    assert found, page
    return unescape(found[1])


async def send(site: Site, text: str, user: str = "turing", do: str = "save", **more: str) -> HTTPResponse:
    """Open the editor, type a text over what is there, and send it."""
    path = more.pop("path", EDIT)
    seen = more.pop("seen", None) or field(await site.page(path, user), "seen")
    return await site.post(path, user, text=text.replace("\n", "\r\n"), seen=seen, do=do, **more)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def text_of(answer: HTTPResponse) -> str:
    return Document(answer.body.decode()).text


class TestSaving:
    async def test_what_an_instructor_saves_is_in_force_at_once(self, site: Site, folder: Path) -> None:
        answer = await send(site, LARGER)
        assert (answer.code, answer.headers["Location"]) == (303, f"{PREFIX}{EDIT}?said=saved")
        assert (folder / "ml.yaml").read_text() == LARGER
        assert "<td>5%</td>" in await site.page("courses/ml", "ada")
        with pytest.raises(NotAllowed, match="Machine Learning offers 5%"):
            await site.pool.request(parse_request("2%"), Holder("ada", "ml"), "key")
        page = await site.page(f"{EDIT}?said=saved", "turing")
        assert Document(page).problems == []
        assert "in force from now on" in page

    async def test_the_editor_shows_the_file_as_it_is(self, site: Site) -> None:
        page = await site.page(EDIT, "turing")
        assert field(page, "text") == COURSE
        assert Document(page).problems == []

    async def test_mode_and_line_ends_stay(self, site: Site, folder: Path) -> None:
        (folder / "ml.yaml").write_bytes(COURSE.replace("\n", "\r\n").encode())
        (folder / "ml.yaml").chmod(0o640)
        assert field(await site.page(EDIT, "turing"), "text") == COURSE
        assert (await send(site, LARGER)).code == 303
        assert (folder / "ml.yaml").read_bytes() == LARGER.replace("\n", "\r\n").encode()
        assert (folder / "ml.yaml").stat().st_mode & 0o777 == 0o640
        assert names(folder) == ["ml.yaml", "nlp.yaml"]

    async def test_a_text_with_errors_is_not_saved_and_not_lost(self, site: Site, folder: Path) -> None:
        bad = COURSE.replace("weight", "wieght") + "idle_limit: never\n"
        answer = await send(site, bad)
        assert answer.code == 422
        page = answer.body.decode()
        assert Document(page).problems == []
        assert field(page, "text") == bad
        for words in ("the file stays as it was", "Did you mean weight?", 'data-line="8"', "idle_limit"):
            assert words in page
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_the_same_text_is_no_change(self, site: Site) -> None:
        answer = await send(site, COURSE)
        assert answer.headers["Location"].endswith("?said=unchanged")
        assert await site.pool.course_versions("ml", 10) == ()

    async def test_every_save_is_logged_like_other_decisions(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        await send(site, LARGER)
        await send(site, "title: [")
        logged = [each.getMessage() for each in caplog.records if "ml.yaml" in each.getMessage()]
        assert logged == [
            "turing[hub:]: save the course file ml.yaml: 1 line added, 1 removed",
            "turing[hub:]: save the course file ml.yaml: BadCourseFile",
        ]

    async def test_the_audit_log_tells_who_changed_a_course(self, tmp_path: Path, folder: Path) -> None:
        log = tmp_path / "audit.log"
        async with showing(tmp_path, 1, courses_dir=str(folder), audit_log=str(log)) as site:
            await send(site, LARGER)
            await send(site, COURSE.replace("weight: 2", "weight: 3"))
            await send(site, COURSE, do="check")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        told = [{name: line.get(name) for name in ("event", "course", "change", "by")} for line in lines]
        assert told == [
            {"event": "course", "course": "ml", "change": "changed", "by": "turing"},
            {"event": "refused", "course": None, "change": None, "by": "turing"},
        ]
        assert "only an administrator may change this" in lines[1]["words"]


class TestWhoMay:
    @pytest.mark.parametrize("user", ["ada", "hopper", "mallory"])
    async def test_others_neither_read_nor_write_it(self, site: Site, folder: Path, user: str) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        refused = await site.get(EDIT, user)
        absent = await site.get("courses/absent/edit", user)
        assert refused.code == absent.code == 403
        assert refused.body.replace(b"courses/ml/", b"") == absent.body.replace(b"courses/absent/", b"")
        for do in ("check", "save"):
            assert (await site.post(EDIT, user, text=LARGER, seen=seen, do=do)).code == 403
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_only_those_who_may_are_led_to_the_editor(self, site: Site) -> None:
        link = f'href="{PREFIX}{EDIT}"'
        for user in ("turing", ADMIN):
            assert link in await site.page("courses/ml", user)
        assert link not in await site.page("courses/ml", "ada")

    async def test_a_form_without_its_token_saves_nothing(self, site: Site, folder: Path) -> None:
        answer = await send(site, LARGER, _xsrf="made up")
        assert answer.code == 403
        assert (folder / "ml.yaml").read_text() == COURSE
        assert field(answer.body.decode(), "typed") == LARGER

    @pytest.mark.parametrize(
        ("was", "becomes"),
        [
            ("instructors: [turing]\n", ""),
            ("[turing]", "[turing, mallory]"),
            ("quota: {share: 50%}\n", ""),
            ("50%", "100%"),
            ("weight: 2", "weight: 200"),
            ("weight: 2", "weight: 2\npriority: 9"),
            ("weight: 2", "weight: 2\nkubernetes: {cpu: 64}"),
        ],
    )
    async def test_what_is_an_administrator_s_stays(
        self, site: Site, folder: Path, was: str, becomes: str
    ) -> None:
        changed = COURSE.replace(was, becomes)
        answer = await send(site, changed)
        assert answer.code == 422
        assert "only an administrator may change this" in text_of(answer)
        assert field(answer.body.decode(), "text") == changed
        assert (folder / "ml.yaml").read_text() == COURSE
        assert (await send(site, changed, ADMIN)).code == 303
        assert (folder / "ml.yaml").read_text() == changed

    async def test_how_to_put_it_back_is_said(self, site: Site) -> None:
        answer = await send(site, COURSE.replace("50%", "90%").replace("2\n", "7\n") + "priority: 1\n")
        for words in ("quota: {share: 50%}", "weight: 2", "Remove it."):
            assert words in text_of(answer)
        page = await site.page(EDIT, "turing")
        assert all(f"<code>{name}</code>" in page for name in RESERVED)

    async def test_an_instructor_who_was_removed_meanwhile_saves_nothing(
        self, site: Site, folder: Path
    ) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        (folder / "ml.yaml").write_text(COURSE.replace("turing", "hopper"))
        answer = await send(site, LARGER, seen=seen)
        assert answer.code == 403
        assert field(answer.body.decode(), "typed") == LARGER

    @pytest.mark.parametrize(
        "name", ["..%2F..%2Fsecret", "%2Fetc%2Fpasswd", "..", "ml%00", "ml.yaml%0a", "a" * 200]
    )
    @pytest.mark.parametrize("user", ["turing", ADMIN])
    async def test_no_name_leads_out_of_the_folder(self, site: Site, user: str, name: str) -> None:
        before = site.ledger.parent / "secret.yaml"
        before.write_text(COURSE)
        assert (await site.get(f"courses/{name}/edit", user)).code in (400, 403, 404)
        answer = await site.post(f"courses/{name}/edit", user, text=LARGER, seen="", do="save")
        assert answer.code in (400, 403, 404)
        assert before.read_text() == COURSE


class TestMeanwhile:
    async def test_a_change_by_somebody_else_is_not_overwritten_unseen(
        self, site: Site, folder: Path
    ) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        theirs = COURSE.replace("Machine", "Deep")
        (folder / "ml.yaml").write_text(theirs)
        answer = await send(site, LARGER, seen=seen)
        assert answer.code == 409
        page = answer.body.decode()
        assert Document(page).problems == []
        assert (field(page, "text"), field(page, "theirs")) == (LARGER, theirs)
        assert '<span class="removed">-title: Deep Learning</span>' in page
        assert (folder / "ml.yaml").read_text() == theirs
        # Now that both are seen, the same button saves.
        assert (await send(site, LARGER, seen=field(page, "seen"))).code == 303
        assert (folder / "ml.yaml").read_text() == LARGER
        versions = await site.pool.course_versions("ml", 10)
        assert [(each.user, each.text) for each in versions] == [("turing", LARGER), ("", theirs)]

    async def test_of_many_who_save_at_once_one_is_the_first(self, site: Site, folder: Path) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        texts = [COURSE.replace("Small", f"Small {number}") for number in range(12)]
        answers = await asyncio.gather(*(send(site, text, seen=seen) for text in texts))
        assert sorted(each.code for each in answers) == [303, *[409] * 11]
        saved = (folder / "ml.yaml").read_text()
        assert answers[texts.index(saved)].code == 303
        for answer, text in zip(answers, texts, strict=True):
            if answer.code == 409:
                page = answer.body.decode()
                assert (field(page, "text"), field(page, "theirs")) == (text, saved)

    async def test_a_file_that_was_removed_is_not_made_again(self, site: Site, folder: Path) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        (folder / "ml.yaml").unlink()
        answer = await send(site, LARGER, seen=seen)
        assert answer.code == 403
        assert "cannot be read" in text_of(answer)
        assert field(answer.body.decode(), "text") == LARGER
        assert not (folder / "ml.yaml").exists()

    async def test_an_end_before_the_renaming_leaves_the_old_file_whole(
        self, site: Site, folder: Path
    ) -> None:
        with running(_ENDS_BEFORE_RENAMING.format(folder=str(folder), data=LARGER.encode())) as process:
            assert process.stdout
            await asyncio.to_thread(process.stdout.readline)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert (folder / ".ml.yaml.new").read_text() == LARGER
        courses = CourseFolder(folder).look()
        assert (sorted(courses.usable), courses.problems) == (["ml", "nlp"], ())
        assert (folder / "ml.yaml").read_text() == COURSE
        assert (await send(site, LARGER)).code == 303
        assert names(folder) == ["ml.yaml", "nlp.yaml"]

    async def test_what_cannot_be_recorded_is_not_saved(self, site: Site, folder: Path) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        with contextlib.closing(sqlite3.connect(site.ledger)) as ledger, ledger:
            ledger.execute("DROP TABLE course_version")
        answer = await site.post(EDIT, "turing", text=LARGER, seen=seen, do="save")
        assert answer.code >= 500
        assert (folder / "ml.yaml").read_text() == COURSE
        assert names(folder) == ["ml.yaml", "nlp.yaml"]

    async def test_what_could_not_be_put_in_place_is_in_no_history(
        self, site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise NotAllowed("ml.yaml cannot be written: it is mounted by itself.")

        # As where a container mounts the file alone, which only root can bring about.
        monkeypatch.setattr("gpu_pool.service.editing.put_in_place", refuse)
        answer = await send(site, LARGER)
        assert answer.code == 403
        assert "Not saved: ml.yaml cannot be written" in text_of(answer)
        assert field(answer.body.decode(), "text") == LARGER
        assert [each.user for each in await site.pool.course_versions("ml", 10)] == [""]
        assert names(folder) == ["ml.yaml", "nlp.yaml"]


_ENDS_BEFORE_RENAMING = """
import sys
from pathlib import Path
from gpu_pool.coursefiles.writing import write_beside
write_beside(Path({folder!r}), "ml.yaml", {data!r})
print("written", flush=True)
sys.stdin.read()
"""


class TestHistory:
    async def test_it_tells_who_changed_what_when(self, site: Site) -> None:
        await send(site, LARGER)
        await send(site, LARGER.replace("weight: 2", "weight: 3"), ADMIN)
        page = await site.page(EDIT, "turing")
        assert Document(page).problems == []
        text = Document(page).text
        assert text.index("root 1 line added, 1 removed as it is now") < text.index("turing 1 line added")
        assert '<span class="removed">-weight: 2</span>' in page
        assert '<span class="added">+  - {name: Small, request: 5%}</span>' in page
        assert "as it was found" in text

    async def test_bringing_back_a_version_only_fills_the_editor(self, site: Site, folder: Path) -> None:
        await send(site, LARGER)
        (oldest,) = set(re.findall(r"edit\?version=(\d+)", await site.page(EDIT, "turing")))
        page = await site.page(f"{EDIT}?version={oldest}", "turing")
        assert field(page, "text") == COURSE
        assert "Nothing is changed until you save it" in page
        assert (folder / "ml.yaml").read_text() == LARGER
        assert (await send(site, COURSE, seen=field(page, "seen"))).code == 303
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_a_change_by_other_means_is_told_and_kept(self, site: Site, folder: Path) -> None:
        await send(site, LARGER)
        (folder / "ml.yaml").write_text(COURSE)
        assert "changed outside of this page" in await site.page(EDIT, "turing")
        await send(site, LARGER)
        versions = await site.pool.course_versions("ml", 10)
        assert [each.user for each in versions] == ["turing", "", "turing", ""]

    async def test_it_is_read_by_those_who_may_edit_alone(self, site: Site) -> None:
        await send(site, LARGER)
        number = (await site.pool.course_versions("ml", 1))[0].number
        stranger = await site.page(f"courses/nlp/edit?version={number}", "hopper")
        assert "5%" not in stranger
        assert "That version is not kept" in stranger

    @pytest.mark.parametrize(
        "asked", ["version=x", "version=-1", f"version={10**30}", "before=0", "version=٣"]
    )
    async def test_odd_numbers_lead_nowhere(self, site: Site, asked: str) -> None:
        assert (
            field(await site.page(f"{EDIT}?{asked.encode().decode('latin-1')}", "turing"), "text") == COURSE
        )

    async def test_so_many_versions_are_kept_and_shown_by_pages(self, site: Site) -> None:
        versions = [CourseVersion("turing", COURSE + f"# {n}\n", float(n)) for n in range(MOST_VERSIONS + 20)]
        await site.pool.keep_versions("ml", versions)
        await site.pool.keep_versions("nlp", versions[:1])
        path, found = f"{EDIT}?before=999", []
        while path:
            page = await site.page(path, "turing")
            found += re.findall(r"edit\?version=(\d+)", page)
            older = re.search(r'href="/services/gpu-pool/([^"]*before=\d+)', page)
            path = older[1] if older else ""
        assert len(found) == len(set(found)) == MOST_VERSIONS
        assert len(await site.pool.course_versions("nlp", 10)) == 1


class TestEditingIsOff:
    async def test_where_the_file_is_a_link_as_in_a_configmap(self, site: Site, folder: Path) -> None:
        data = folder / "..data"
        data.mkdir()
        shutil.move(folder / "ml.yaml", data / "ml.yaml")
        (folder / "ml.yaml").symlink_to("..data/ml.yaml")
        page = await site.page(EDIT, "turing")
        assert "Editing is off." in page
        assert "is a link, as where a ConfigMap is mounted" in page
        assert "Editing is off. ml.yaml is a link" in await site.page("courses/ml", "turing")
        assert 'value="save"' not in page
        assert field(page, "text") == COURSE
        answer = await send(site, LARGER)
        assert answer.code == 403
        assert (folder / "ml.yaml").is_symlink()
        assert (data / "ml.yaml").read_text() == COURSE

    async def test_where_it_is_not_utf_8(self, site: Site, folder: Path) -> None:
        await site.page(EDIT, "turing")
        (folder / "ml.yaml").write_bytes(COURSE.encode() + b"# \xff\n")
        page = await site.page(EDIT, "turing")
        assert "is not UTF-8" in page
        assert (await send(site, LARGER, seen="any")).code == 403

    async def test_where_there_are_no_course_files(self, tmp_path: Path) -> None:
        async with showing(tmp_path, 1, courses_of({"ml": "Machine Learning"})) as site:
            assert "/edit" not in await site.page("courses/ml", "turing")
            assert (await site.get(EDIT, "turing")).code == 403


class TestHostileTexts:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (BOMB, "references (* and &) are not read"),
            ("[" * 5_000, "too many levels"),
            ("title: \x07", "cannot be printed"),
            ("", "is empty"),
            ("!!python/object/apply:os.system ['true']", "is not read"),
            ("title: x\n---\ntitle: y", "a second document"),
            (COURSE + "#" * 65_536, "is larger than 64 KiB"),
            ("</textarea><script>alert(1)</script>", "1 error in ml.yaml"),
        ],
        ids=["bomb", "deep", "bell", "empty", "tag", "two", "large", "script"],
    )
    @pytest.mark.parametrize("do", ["check", "save"])
    async def test_they_are_refused_in_words(
        self, site: Site, folder: Path, do: str, text: str, words: str
    ) -> None:
        answer = await send(site, text, do=do)
        assert answer.code == (200 if do == "check" else 422)
        page = answer.body.decode()
        assert words in unescape(page)
        assert page.count("<script") == 1
        assert field(page, "text") == text
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_what_is_not_utf_8_is_refused(self, site: Site, folder: Path) -> None:
        answer = await send_bytes(site, b"title: \xff\xfe")
        assert answer.code == 422
        assert "is not UTF-8" in text_of(answer)
        assert (folder / "ml.yaml").read_text() == COURSE

    async def test_a_form_as_browsers_send_it_is_read(self, site: Site, folder: Path) -> None:
        assert (await send_bytes(site, LARGER.replace("\n", "\r\n").encode())).code == 303
        assert (folder / "ml.yaml").read_text() == LARGER

    async def test_a_body_larger_than_any_form_is_not_taken(self, site: Site, folder: Path) -> None:
        answer = await send_bytes(site, b"#" * 1_000_000)
        assert answer.code in (400, 599)
        assert (folder / "ml.yaml").read_text() == COURSE

    @pytest.mark.parametrize(
        ("students", "stay"), [("0", "1h"), ("501", "1h"), ("x", "1h"), ("5", "soon"), ("٣", "1h")]
    )
    async def test_odd_figures_are_refused_in_words(self, site: Site, students: str, stay: str) -> None:
        answer = await send(site, LARGER, do="check", students=students, stay=stay)
        assert answer.code == 400
        assert "Accepted" in text_of(answer)
        assert field(answer.body.decode(), "text") == LARGER


class TestChecking:
    async def test_it_does_the_arithmetic_and_saves_nothing(self, site: Site, folder: Path) -> None:
        answer = await send(site, LARGER, do="check", students="30", stay="30min")
        page = answer.body.decode()
        assert Document(page).problems == []
        text = text_of(answer)
        assert "The file is good. It is not saved yet." in text
        cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", page)
        row = "Small (default)|5%|1 x V100-SXM2-32GB (simulated)|20|10 by quota, of 20|1.6 GiB|1.26 GiB"
        assert row in "|".join(cells)
        assert "If 30 come at once (each keeps Small for 30min; simulated): 10 (33%)" in text
        assert (folder / "ml.yaml").read_text() == COURSE

    @pytest.mark.parametrize("stay", ["0", "1s", "999d"])
    async def test_any_time_may_be_stayed(self, site: Site, stay: str) -> None:
        answer = await send(site, LARGER, do="check", students="500", stay=stay)
        assert answer.code == 200
        assert "If 500 come at once" in text_of(answer)

    async def test_a_slice_that_nobody_can_have_is_told(self, site: Site) -> None:
        answer = await send(site, COURSE.replace("2%}", "60%}"), do="check")
        assert "it is more than the quota allows" in text_of(answer)


class TestAdministrators:
    async def test_they_mend_a_file_that_has_never_been_good(self, site: Site, folder: Path) -> None:
        (folder / "new.yaml").write_text("title: New\n")
        async with showing(site.ledger.parent / "other", 1, courses_dir=str(folder)) as fresh:
            link = f"{PREFIX}courses/new/edit"
            assert f'href="{link}"' in await fresh.page("admin", ADMIN)
            assert "slices is missing" in await fresh.page("courses/new/edit", ADMIN)
            assert (await fresh.get("courses/new/edit", "turing")).code == 403
            assert (await send(fresh, LARGER, ADMIN, path="courses/new/edit")).code == 303
            assert "Machine Learning" in await fresh.page("courses/new", ADMIN)


async def send_bytes(site: Site, text: bytes) -> HTTPResponse:
    """Save bytes, in a form as browsers send it."""
    shown = await site.get(EDIT, "turing")
    page = shown.body.decode()
    token = re.findall(r'name="form-token" content="([^"]+)"', page)[0]
    cookie = next(each for each in shown.headers.get_list("Set-Cookie") if each.startswith("_xsrf="))
    fields = {"_xsrf": token.encode(), "seen": field(page, "seen").encode(), "do": b"save", "text": text}
    body = b"".join(
        b'--limit\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
        for name, value in fields.items()
    )
    headers = {
        "Cookie": f"user=turing; {cookie.partition(';')[0]}",
        "Content-Type": "multipart/form-data; boundary=limit",
    }
    request = HTTPRequest(
        site.url + EDIT, "POST", headers=headers, body=body + b"--limit--\r\n", follow_redirects=False
    )
    return await AsyncHTTPClient(force_instance=True).fetch(request, raise_error=False)
