"""Course files on the dashboard: who may edit what, and that neither file nor typed text is ever lost."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from gpu_pool.courses.admission import CourseAdmission
from gpu_pool.courses.editing import RESERVED
from gpu_pool.enforcement.watchdog import OwnStore
from gpu_pool.settings import PoolSettings
from gpu_pool_client import EndReason, Holder, NotAllowed, parse_request
from support.course_editing import COURSE, EDIT, LARGER, field, folder, names, send, site, text_of
from support.dashboard import ADMIN, PREFIX, Site, courses_of, showing
from support.pages import Document

__all__ = ["folder", "site"]


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
        assert await site.pool.core.course_versions("ml", 10) == ()

    async def test_whatever_is_granted_from_then_on_is_granted_by_the_new_text(
        self, site: Site, folder: Path
    ) -> None:
        first, second = await site.take("1", "bob"), await site.take("2%", "ada", "ml")
        rules = PoolSettings(courses_dir=str(folder))
        watchdog = OwnStore(site.store, rules, CourseAdmission(rules))
        assert len(watchdog.held()) == 1
        await send(site, COURSE.replace("weight: 2", "weight: 2\nlongest_lease: 1h"), user=ADMIN)
        watchdog.end(first, EndReason.OVER_MEMORY)
        [lease] = watchdog.held()
        watchdog.close()
        assert lease.id == second
        assert lease.terms.ends_at is not None

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
            await send(site, f"# Of this term.\n{LARGER}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        told = [{name: line.get(name) for name in ("event", "course", "change", "by")} for line in lines]
        assert told == [
            {"event": "course", "course": "ml", "change": "changed", "by": "turing"},
            {"event": "refused", "course": None, "change": None, "by": "turing"},
            {"event": "course", "course": "ml", "change": "text", "by": "turing"},
        ]
        assert "only an administrator may change this" in lines[1]["message"]


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
        before = site.store.parent / "secret.yaml"
        before.write_text(COURSE)
        assert (await site.get(f"courses/{name}/edit", user)).code in (400, 403, 404)
        answer = await site.post(f"courses/{name}/edit", user, text=LARGER, seen="", do="save")
        assert answer.code in (400, 403, 404)
        assert before.read_text() == COURSE


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

    async def test_it_says_what_a_limit_means(self, site: Site) -> None:
        answer = await send(site, LARGER.replace("5%", "5%..20%"), do="check")
        assert Document(answer.body.decode()).problems == []
        text = text_of(answer)
        assert "The file is good." in text
        assert "1.6 GiB, up to 6.4 GiB" in text
        assert "Small: 5% is certain: that is what is counted, here and by quotas. Up to 20%" in text

    async def test_a_file_that_offers_what_nobody_can_have_is_not_called_good(self, site: Site) -> None:
        text = text_of(await send(site, LARGER.replace("5%", "40GiB"), do="check"))
        assert "The file has no error, but not every slice can be granted. It is not saved yet." in text
        assert "Small fits on no GPU here." in text

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
        async with showing(site.store.parent / "other", 1, courses_dir=str(folder)) as fresh:
            link = f"{PREFIX}courses/new/edit"
            assert f'href="{link}"' in await fresh.page("admin", ADMIN)
            assert "slices is missing" in await fresh.page("courses/new/edit", ADMIN)
            assert (await fresh.get("courses/new/edit", "turing")).code == 403
            assert (await send(fresh, LARGER, ADMIN, path="courses/new/edit")).code == 303
            assert "Machine Learning" in await fresh.page("courses/new", ADMIN)
