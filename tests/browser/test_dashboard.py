"""The dashboard in a real browser: live, by keyboard, on a phone, in light and dark."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from gpu_pool_client import LeaseState, Process
from support.browsers import SCREENSHOTS, picture
from support.dashboard import ADMIN, Site, courses_of, showing
from support.looking import PHONE, TOO_FAINT, TOO_WIDE, Open, live, look, press_until

__all__ = ["look"]

#: What a wide table is about, where that is not to be read whole without moving it.
CUT_CAPTIONS = """() => [...document.querySelectorAll("caption")]
    .filter(each => each.getBoundingClientRect().right > innerWidth).map(each => each.textContent)"""
TITLES = {
    "intro-ml": "Introduction to Machine Learning",
    "language": "Language and computation",
    "thesis": "Theses and projects",
    "vision": "Computer vision",
}

#: Whether nothing lies over an element.
IS_ON_TOP = """link => {
    const at = link.getBoundingClientRect();
    return document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2) === link;
}"""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 3, courses_of(TITLES)) as site:
        yield site


async def fill(site: Site) -> None:
    """Have a class at work."""
    for number in range(6):
        await site.take("5%", f"student{number}", "intro-ml", "Python 3 (GPU 5%)")
    await site.take("50%", "katherine", "thesis", "python train.py")
    await site.take("60%", "alan", "language", "R (GPU 40%)")
    await site.take("20%", "ada", "vision", "Python 3 (GPU 20%)")
    await site.pool.drain("2")
    await site.take("1", "katherine", "thesis", "python evaluate.py")
    await site.take("50%", "ada", "intro-ml", "Python 3 (GPU 50%)")


async def test_a_slice_appears_by_itself_and_is_given_back_by_keyboard(site: Site, look: Open) -> None:
    page = await look("", "ada")
    await live(page)
    await page.evaluate("window.loadedOnce = true")
    lease = await site.take("20%", "ada", "vision", "Python 3 (GPU 20%)")
    await expect(page.locator("#mine h3")).to_contain_text("20%, 6.4 GiB of GPU 0 (simulated)")
    await expect(page.locator("#message")).to_have_text("Your slice of 20%: held on GPU 0 (simulated).")
    assert await page.evaluate("window.loadedOnce")
    await press_until(page, f"ask-{lease}")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Give back a slice")).to_be_visible()
    await press_until(page, "now")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said")).to_have_text("The slice was given back.")
    assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED


async def test_changes_leave_focus(site: Site, look: Open) -> None:
    lease = await site.take("20%", "ada", "vision")
    page = await look("", "ada")
    await live(page)
    await page.locator(f"#ask-{lease}").focus()
    for number in range(3):
        await site.take("2%", "ada", "vision")
        await expect(page.locator("#mine .lease")).to_have_count(number + 2)
        assert await page.evaluate("document.activeElement.id") == f"ask-{lease}"


async def test_a_form_that_has_come_by_itself_is_accepted(site: Site, look: Open) -> None:
    page = await look("admin", ADMIN)
    await live(page)
    await site.pool.drain("0")
    await page.get_by_role("button", name="Undrain GPU 0").click()
    await expect(page.locator(".said")).to_have_text("The GPU is in use again.")


async def test_focus_goes_to_the_heading_when_what_had_it_is_gone(site: Site, look: Open) -> None:
    lease = await site.take("20%", "ada", "vision")
    page = await look("", "ada")
    await live(page)
    await page.locator(f"#ask-{lease}").focus()
    await site.pool.release(lease)
    await expect(page.locator("#mine .empty")).to_be_visible()
    assert await page.evaluate("document.activeElement.id") == "h-mine"


async def test_an_administrator_revokes_in_words(site: Site, look: Open) -> None:
    page = await look("admin", ADMIN)
    await live(page)
    lease = await site.take("20%", "ada", "vision", "Python 3 (GPU 20%)")
    student = await look("", "ada")
    await page.locator("#leases a", has_text="Revoke").click()
    await page.get_by_label("Reason").fill("The exam begins at ten.")
    await page.get_by_role("button", name="Revoke this slice").click()
    await expect(page.locator(".said")).to_have_text("The slice was revoked.")
    said = "an administrator took it back: “The exam begins at ten.”"
    await expect(student.locator("#mine .notice")).to_contain_text(said)
    await expect(student.locator("#message")).to_contain_text(said)
    await student.goto(site.url + "history")
    await expect(student.locator("table").last).to_contain_text(said)
    assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED


async def test_without_javascript_all_of_it_works(site: Site, look: Open) -> None:
    await site.take("20%", "ada", "vision")
    page = await look("", "ada", java_script_enabled=False)
    await page.get_by_role("link", name="Give back").click()
    await page.get_by_role("button", name="Give back this slice now").click()
    await expect(page.locator(".said")).to_have_text("The slice was given back.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_fits_a_phone_and_can_be_read(site: Site, look: Open, scheme: str) -> None:
    await fill(site)
    lease = await site.take("2%", "ada", "vision", "Python 3 (GPU 2%)")
    await site.pool.attach(lease, Process.current(), grace=5.0)
    await have_had_a_week(site)
    ways = "admin/other-ways?days=30&more=4"
    for path in ("", "history", "courses", "courses/intro-ml", "admin", ways, f"leases/{lease}"):
        page = await look(path, ADMIN, viewport=PHONE, color_scheme=scheme)
        assert await page.evaluate(TOO_WIDE) == 0, path
        assert await page.evaluate(TOO_FAINT) == [], path
        assert await page.evaluate(CUT_CAPTIONS) == [], path
        await page.context.close()


async def test_what_can_be_done_is_in_sight_on_a_phone(site: Site, look: Open) -> None:
    await fill(site)
    page = await look("admin", ADMIN, viewport=PHONE)
    for rows in ("#leases tbody tr", "#waiting tbody tr"):
        row = page.locator(rows).first
        await row.locator("th").scroll_into_view_if_needed()  # up and down, and not aside
        link = row.locator("a")
        await expect(link).to_be_in_viewport(ratio=1)
        assert await link.evaluate(IS_ON_TOP)


async def test_an_administrator_finds_what_four_gpus_more_would_have_done(site: Site, look: Open) -> None:
    await have_had_a_week(site)
    page = await look("admin", ADMIN)
    await page.get_by_role("link", name="What more GPUs").click()
    await page.get_by_role("link", name="4 more").click()
    await page.get_by_role("link", name="7 days").click()
    await expect(page.locator("main")).to_contain_text("Simulated: 34 leases and 102 cells on 7 GPUs.")
    ways = ["reservation", "idle limit 15 min", "yield after 1 min, when somebody waits", "per cell"]
    await expect(page.locator("tbody th")).to_have_text(ways)
    await picture(page, "other-ways.png", full_page=True)
    await page.set_viewport_size(PHONE)
    await picture(page, "other-ways-phone.png", full_page=True)


async def test_below_the_history_are_round_times_of_the_reader_s_clock(site: Site, look: Open) -> None:
    page = await look("history?days=1", ADMIN, timezone_id="Asia/Kolkata")
    ticks = await page.locator("g.ticks text").all_text_contents()
    assert ticks[-1] == "now"
    assert len(ticks) >= 3
    assert {tick[2:] for tick in ticks[:-1]} == {":00"}
    assert {int(tick[:2]) % 6 for tick in ticks[:-1]} == {0}


async def have_had_a_week(site: Site) -> None:
    """Write a week of lessons and of nights of training into the store's history."""
    await site.pool.status()  # the store is there then
    now, number = time.time(), 0
    rows = []
    for day in range(7):
        for hour, length, milli, user, course in (
            (8, 2, 600, "ada", "intro-ml"), (9, 3, 400, "grace", "language"), (14, 2, 800, "hedy", "vision"),
            (18, 12, 1000, "katherine", "thesis"), (10, 6, 300 + 100 * day, "alan", "language"),
        ):  # fmt: skip
            number += 1
            ended = now - 86_400 * (6 - day) - 3_600 * (24 - hour - length) - 1_800
            held = 3_600 * length
            reason, note = ("revoked", "The exam began.") if number % 9 == 0 else ("process-gone", "")
            of = (
                "Python 3 (GPU)",
                ended - held - 60 * day,
                ended - held,
                ended,
                held,
                held * milli,
                reason,
                note,
                # Students' kernels idle, and others could have a third of that.
                held * milli / 3 if course == "intro-ml" else 0.0,
            )
            rows.append(
                (-number, f"past-{number}", f"past-{number}", f"{milli / 10:g}%", milli, user, course, *of)
            )
    past = [row for row in rows if row[10] < now]
    with contextlib.closing(sqlite3.connect(site.store)) as store, store:
        store.executemany(
            "INSERT INTO history (number, id, key, request, milli, user, course, kernel, requested_at,"
            f" held_at, ended_at, held_seconds, used, reason, note, lent, slices) VALUES ({'?, ' * 16}'[]')",
            past,
        )
        # Each worked three times, for a tenth of the time that it was held.
        store.executemany(
            "INSERT INTO busy (number, began, seconds) VALUES (?, ?, ?)",
            [(row[0], row[9] + part * row[11], row[11] / 10) for row in past for part in (0.0, 0.3, 0.6)],
        )


@pytest.mark.skipif(not SCREENSHOTS, reason="no pictures are asked for")
async def test_pictures_for_the_documentation(site: Site, look: Open) -> None:
    await fill(site)
    await have_had_a_week(site)
    kernel = await site.take("2%", "grace", "vision", "Python 3 (GPU 2%)")
    await site.pool.attach(kernel, Process.current(), grace=5.0)
    pictures: dict[str, tuple[str, str, dict[str, Any]]] = {
        "dashboard.png": ("", "ada", {}),
        "dashboard-dark.png": ("", "ada", {"color_scheme": "dark"}),
        "dashboard-phone.png": ("", "ada", {"viewport": PHONE, "device_scale_factor": 2}),
        "dashboard-history.png": ("history", ADMIN, {"viewport": {"width": 1000, "height": 850}}),
        "dashboard-admin.png": ("admin", ADMIN, {}),
        "dashboard-revoke.png": (f"leases/{kernel}", ADMIN, {}),
    }
    for name, (path, user, how) in pictures.items():
        page = await look(path, user, **how)
        if path in ("", "admin"):
            await live(page)
        await page.screenshot(path=Path(SCREENSHOTS, name), full_page=path != "history")
