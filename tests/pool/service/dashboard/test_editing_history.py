"""Course files that several change: nothing is overwritten unseen, and every version can be brought back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sqlite3
from pathlib import Path

import pytest

from gpu_pool.courses import CourseFolder
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.store.records import MOST_VERSIONS
from gpu_pool_client import NotAllowed
from support.course_editing import COURSE, EDIT, LARGER, field, folder, names, send, site, text_of
from support.dashboard import ADMIN, Site
from support.pages import Document
from support.pools import running

__all__ = ["folder", "site"]


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
        versions = await site.pool.core.course_versions("ml", 10)
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
        courses = CourseFolder(folder).current()
        assert (sorted(courses.usable), courses.problems) == (["ml", "nlp"], ())
        assert (folder / "ml.yaml").read_text() == COURSE
        assert (await send(site, LARGER)).code == 303
        assert names(folder) == ["ml.yaml", "nlp.yaml"]

    async def test_what_cannot_be_recorded_is_not_saved(self, site: Site, folder: Path) -> None:
        seen = field(await site.page(EDIT, "turing"), "seen")
        with contextlib.closing(sqlite3.connect(site.store)) as store, store:
            store.execute("DROP TABLE course_version")
        answer = await site.post(EDIT, "turing", text=LARGER, seen=seen, do="save")
        assert answer.code >= 500
        assert (folder / "ml.yaml").read_text() == COURSE
        assert names(folder) == ["ml.yaml", "nlp.yaml"]

    async def test_what_could_not_be_put_in_place_is_in_no_history(
        self, site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise NotAllowed("ml.yaml cannot be written: the file itself is a mount.")

        # As where a container mounts the file alone, which only root can bring about.
        monkeypatch.setattr("gpu_pool.service.course_editor.put_in_place", refuse)
        answer = await send(site, LARGER)
        assert answer.code == 403
        assert "Not saved: ml.yaml cannot be written" in text_of(answer)
        assert field(answer.body.decode(), "text") == LARGER
        assert [each.user for each in await site.pool.core.course_versions("ml", 10)] == [""]
        assert names(folder) == ["ml.yaml", "nlp.yaml"]


_ENDS_BEFORE_RENAMING = """
import sys
from pathlib import Path
from gpu_pool.courses.folder import write_beside
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
        versions = await site.pool.core.course_versions("ml", 10)
        assert [each.user for each in versions] == ["turing", "", "turing", ""]

    async def test_it_is_read_by_those_who_may_edit_alone(self, site: Site) -> None:
        await send(site, LARGER)
        number = (await site.pool.core.course_versions("ml", 1))[0].number
        stranger = await site.page(f"courses/nlp/edit?version={number}", "hopper")
        assert "5%" not in stranger
        assert "That version is no longer kept" in stranger

    @pytest.mark.parametrize(
        "asked", ["version=x", "version=-1", f"version={10**30}", "before=0", "version=٣"]
    )
    async def test_odd_numbers_lead_nowhere(self, site: Site, asked: str) -> None:
        assert (
            field(await site.page(f"{EDIT}?{asked.encode().decode('latin-1')}", "turing"), "text") == COURSE
        )

    async def test_so_many_versions_are_kept_and_shown_by_pages(self, site: Site) -> None:
        versions = [CourseVersion("turing", COURSE + f"# {n}\n", float(n)) for n in range(MOST_VERSIONS + 20)]
        await site.pool.core.keep_versions("ml", versions)
        await site.pool.core.keep_versions("nlp", versions[:1])
        path, found = f"{EDIT}?before=999", []
        while path:
            page = await site.page(path, "turing")
            found += re.findall(r"edit\?version=(\d+)", page)
            older = re.search(r'href="/services/gpu-pool/([^"]*before=\d+)', page)
            path = older[1] if older else ""
        assert len(found) == len(set(found)) == MOST_VERSIONS
        assert len(await site.pool.core.course_versions("nlp", 10)) == 1
