"""Times and hidden characters in the editor: what is saved has units, and is what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.course_editing import COURSE, EDIT, folder, send, site, text_of
from support.dashboard import Site
from support.pages import Document

__all__ = ["folder", "site"]


async def test_a_time_without_a_unit_is_not_saved_and_every_time_is_read_back(
    site: Site, folder: Path
) -> None:
    bare = COURSE + "longest_lease: 90\n"
    answer = await send(site, bare)
    assert answer.code == 422
    page = text_of(answer)
    assert "'90' has no unit, and is read as 1 minute 30 seconds." in page
    assert "Write 90s, 90min or 90h." in page
    assert (folder / "ml.yaml").read_text() == COURSE
    checked = await send(site, bare.replace("90", "90min"), do="check")
    assert Document(checked.body.decode()).problems == []
    words = " ".join(text_of(checked).split())
    assert (
        "longest_lease1 hour 30 minutes yield_after1 minute (default) warn_before5 minutes (default)" in words
    )
    assert (await send(site, bare.replace("90", "90min"))).code == 303


async def test_an_offer_says_for_how_long_and_not_for_longer_than_a_lease_lasts(
    site: Site, folder: Path
) -> None:
    long = COURSE.replace("request: 2%", "request: 2% for 6h") + "longest_lease: 4h\n"
    answer = await send(site, long)
    assert answer.code == 422
    page = text_of(answer)
    assert "'2% for 6h' is for longer than longest_lease (4 hours): it ends with that." in page
    assert "Write 2% for 4h, or a longer longest_lease." in page
    assert (await send(site, long.replace("6h", "20min"))).code == 303
    assert "2% for 20min" in (folder / "ml.yaml").read_text()
    assert "2% for 20min" in await site.page("courses/ml", "ada")
    await site.pool.core.reread_course("ml.yaml")
    lease = await site.pool.get_lease(await site.take("2% for 20min", "ada", "ml"))
    assert lease.terms.ends_at == pytest.approx(lease.held_at + 1200, abs=1)


async def test_an_old_file_without_units_is_in_force_and_says_so_in_the_editor(
    site: Site, folder: Path
) -> None:
    (folder / "nlp.yaml").write_text((folder / "nlp.yaml").read_text() + "longest_lease: 90\n")
    assert site.dashboard.editor is not None
    await site.pool.core.reread_course("nlp.yaml")
    page = await site.page("courses/nlp/edit", "hopper")
    assert "has no unit" in page
    lease = await site.take("2%", "grace", "nlp")
    [found] = [each for each in (await site.pool.status()).leases if each.id == lease]
    assert found.terms.ends_at is not None


async def test_what_is_not_seen_is_not_saved_and_is_written_out_in_every_change(
    site: Site, folder: Path
) -> None:
    hidden = COURSE + "# as agreed\u2028priority: 9\n# left \u202e right\n"
    answer = await send(site, hidden)
    assert answer.code == 422
    assert "has U+2028 (LINE SEPARATOR), which is not seen" in text_of(answer)
    # One that is there already, and was changed elsewhere.
    (folder / "ml.yaml").write_text(hidden)
    await site.pool.core.reread_course("ml.yaml")
    assert (await send(site, COURSE + "# new\n", "root")).code == 303
    page = await site.page(EDIT, "turing")
    changes = page[page.index('id="h-changes"') :]
    assert "as agreed\\u2028priority: 9" in changes
    assert "left \\u202e right" in changes
    assert not {"\u2028", "\u202e"} & {*changes}
