"""On no page does a character that is not seen change how anything is read: every one is written out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_pool.names import undeceiving
from support.course_editing import COURSE, EDIT, field, folder, send, site, text_of
from support.dashboard import ADMIN, Site

__all__ = ["folder", "site"]

#: What turns the direction of the text around it, marks of direction, and what has no width.
UNSEEN = [
    *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
    *"\u200e\u200f\u061c\u200b\u2060\ufeff",
]
#: As in reports of such attacks: all of it is a comment, and reads as if a part of it were not.
WRITTEN = COURSE + "".join(f"# {each}weight: 9{each} #\n" for each in UNSEEN)


def unseen_of(page: str) -> set[str]:
    return set(UNSEEN) & set(page)


async def test_a_file_that_has_them_is_shown_with_each_written_out(site: Site, folder: Path) -> None:
    await site.page(EDIT, "turing")
    (folder / "ml.yaml").write_text(WRITTEN)
    page = await site.page(EDIT, "turing")
    # In the field itself, which is what would be saved, they stay; what is said of each is beside it.
    assert field(page, "text") == WRITTEN
    beside = page.replace(WRITTEN, "")
    assert unseen_of(beside) == set()
    assert all(f"\\u{ord(each):04x}weight: 9" in beside for each in UNSEEN)


async def test_a_change_that_has_them_is_written_out_in_the_history_and_beside_ones_own(
    site: Site, folder: Path
) -> None:
    seen = field(await site.page(EDIT, "turing"), "seen")
    await send(site, COURSE.replace("# The comments stay.", "# Saved here."))
    (folder / "ml.yaml").write_text(WRITTEN)
    history = await site.page(EDIT, "turing")
    assert all(f"+# \\u{ord(each):04x}weight: 9" in history for each in UNSEEN)
    answer = await send(site, COURSE, seen=seen)
    assert answer.code == 409
    page = answer.body.decode()
    assert unseen_of(page) == set()
    assert all(f"\\u{ord(each):04x}weight: 9" in field(page, "theirs") for each in UNSEEN)


async def test_a_file_that_is_only_read_is_written_out(site: Site, folder: Path) -> None:
    data = folder / "..data"
    data.mkdir()
    (data / "ml.yaml").write_text(WRITTEN)
    await site.page(EDIT, "turing")
    (folder / "ml.yaml").unlink()
    (folder / "ml.yaml").symlink_to("..data/ml.yaml")
    page = await site.page(EDIT, "turing")
    assert "Editing is off." in page
    assert unseen_of(page) == set()


@pytest.mark.parametrize("do", ["check", "save"])
async def test_what_is_said_of_a_text_has_none(site: Site, do: str) -> None:
    answer = await send(site, f"{WRITTEN}wei\u202eght: 2\n'\u2066': x\nwho: [\u200fa\n", do=do)
    page = answer.body.decode()
    assert unseen_of(re.sub("(?s)<textarea.*?</textarea>", "", page)) == set()


async def test_what_others_call_their_kernels_turns_no_page(site: Site) -> None:
    lease = await site.take("2%", "ada", "ml", kernel=f"a{''.join(UNSEEN)}b")
    pages = (("", "ada"), (f"leases/{lease}", "ada"), ("courses/ml", "turing"), ("admin", ADMIN))
    for path, user in pages:
        page = await site.page(path, user)
        assert unseen_of(page) == set()
        assert f"a{'?' * len(UNSEEN)}b" in page


def test_what_templates_write_has_none_and_is_else_as_it_was() -> None:
    shown = undeceiving(f"{''.join(UNSEEN)} café, 课程, \u0645\u06cc\u200c\u062e, 👩\u200d💻, a\u00a0b\n\t")
    assert unseen_of(shown) == set()
    assert shown.endswith(" café, 课程, \u0645\u06cc\u200c\u062e, 👩\u200d💻, a\u00a0b\n\t")


async def test_what_was_typed_can_be_copied_from_an_error_as_it_was(site: Site) -> None:
    answer = await send(site, WRITTEN, _xsrf="made up")
    assert field(answer.body.decode(), "typed") == WRITTEN
    assert text_of(answer)
