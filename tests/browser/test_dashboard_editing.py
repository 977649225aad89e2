"""A course edited in a real browser: by mouse, by keyboard, on a phone, without JavaScript."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Dialog, Page, expect

from support.browsers import SCREENSHOTS, picture
from support.dashboard import Site, showing
from support.looking import PHONE, TOO_FAINT, TOO_WIDE, Open, live, look, press_until

__all__ = ["look"]

COURSE = """\
# The practicals are in room 4.
title: Introduction to Machine Learning
who:
  groups: [intro-ml-2026]
  users: [ada, grace]
instructors: [turing]

slices:
  - name: Small
    request: 2%
    default: true

per_user: {slices: 2}
quota: {share: 1}
longest_lease: 3h
"""
MORE = COURSE.replace("default: true\n", "default: true\n  - name: Large\n    request: 20%\n")
BAD = MORE.replace("20%", "20 percent").replace("longest_lease", "longest_leese")
EDIT = "courses/intro-ml/edit"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "courses").mkdir()
    written = tmp_path / "courses" / "intro-ml.yaml"
    written.write_text(COURSE)
    return written


@pytest.fixture
async def site(tmp_path: Path, file: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 2, courses_dir=str(file.parent)) as site:
        yield site


def said_by(file: Path) -> str:
    return file.read_text()


async def edit(page: Page, text: str, button: str) -> None:
    await page.locator("#text").fill(text)
    await page.get_by_role("button", name=button, exact=True).click()


@pytest.mark.parametrize("script", [True, False], ids=["with script", "without"])
async def test_an_instructor_adds_a_slice_and_a_student_sees_it(
    site: Site, look: Open, file: Path, script: bool
) -> None:
    student = await look("courses/intro-ml", "ada", java_script_enabled=script)
    await expect(student.locator("main table")).not_to_contain_text("Large")
    await expect(student.get_by_role("link", name="Edit")).to_have_count(0)
    page = await look("courses/intro-ml", "turing", java_script_enabled=script)
    await page.get_by_role("link", name="Edit").click()
    await expect(page.locator("#text")).to_have_value(COURSE)
    await page.locator("#students").fill("60")
    await edit(page, MORE, "Check")
    await expect(page.locator(".said")).to_have_text("The file is good. It is not saved yet.")
    await expect(page.locator("#outcome")).to_contain_text("If 60 come at once")
    await expect(page.locator("#outcome table")).to_contain_text("Large")
    assert said_by(file) == COURSE
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.locator(".said")).to_contain_text("in force from now on")
    assert said_by(file) == MORE
    await student.reload()
    await expect(student.locator("main table")).to_contain_text("Large")


async def test_a_slice_with_a_limit_says_what_it_comes_to(site: Site, look: Open, file: Path) -> None:
    page = await look(EDIT, "turing")
    limited = COURSE.replace("request: 2%", "request: 2%..10%")
    await edit(page, limited, "Check")
    outcome = page.locator("#outcome")
    await expect(outcome).to_contain_text("655 MiB, up to 3.2 GiB")
    await expect(outcome).to_contain_text("2% is certain")
    assert await page.evaluate(TOO_WIDE) == 0
    await picture(page, "burst-edit.png", full_page=True)
    await edit(page, limited, "Save")
    await expect(page.locator(".said")).to_contain_text("in force from now on")
    for user in ("ada", "grace"):
        await site.take("2%..10%", user, "intro-ml", "Python 3")
    student = await look("courses/intro-ml", "ada")
    await expect(student.locator("main")).to_contain_text("2%, up to 10% while that is free")
    await picture(student, "burst-course.png", full_page=True)
    page = await look("", "ada")
    await expect(page.locator("main")).to_contain_text("655 MiB, now up to 3.2 GiB")
    await picture(page, "burst-leases.png", full_page=True)


async def test_an_error_leads_to_its_line_by_keyboard(site: Site, look: Open) -> None:
    page = await look(EDIT, "turing")
    await press_until(page, "text")
    await page.keyboard.press("Control+A")
    await page.keyboard.insert_text(BAD)
    for _ in range(3):  # past the two figures, to the first button
        await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("#h-problems")).to_have_text("2 errors in intro-ml.yaml")
    # The browser goes on from what was found.
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    chosen = "document.activeElement.value.slice(document.activeElement.selectionStart, "
    chosen += "document.activeElement.selectionEnd)"
    assert await page.evaluate(chosen) == "    request: 20 percent"
    await expect(page.locator("#text")).to_have_value(BAD)


async def test_nothing_typed_is_left_behind_unasked(site: Site, look: Open) -> None:
    page = await look(EDIT, "turing")
    asked: list[str] = []

    async def leave(dialog: Dialog) -> None:
        asked.append(dialog.type)
        await dialog.accept()

    page.on("dialog", leave)
    await page.get_by_role("link", name="Back to the course").click()
    await expect(page.locator("#h-offers")).to_be_visible()
    assert asked == []
    await page.goto(site.url + EDIT)
    await page.locator("#text").press("x")
    await page.get_by_role("link", name="Back to the course").click()
    await expect(page.locator("#h-offers")).to_be_visible()
    assert asked == ["beforeunload"]


async def test_of_two_who_edit_the_second_sees_both(site: Site, look: Open, file: Path) -> None:
    first, second = [await look(EDIT, "turing") for _ in range(2)]
    await edit(first, MORE, "Save")
    await expect(first.locator(".said")).to_contain_text("in force")
    theirs = COURSE.replace("3h", "5h")
    await edit(second, theirs, "Save")
    await expect(second.locator("[role=alert]")).to_contain_text("changed by somebody else")
    await expect(second.locator("#text")).to_have_value(theirs)
    await expect(second.locator("#theirs")).to_have_value(MORE)
    assert said_by(file) == MORE
    await second.get_by_role("button", name="Save mine instead").click()
    await expect(second.locator(".said")).to_contain_text("in force")
    assert said_by(file) == theirs
    await second.locator("summary").first.click()
    await expect(second.locator(".changes .diff").first).to_contain_text("+longest_lease: 5h")
    await second.get_by_role("link", name="Bring back").first.click()
    await expect(second.locator("#text")).to_have_value(MORE)
    assert said_by(file) == theirs


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_editor_fits_a_phone_and_can_be_read(site: Site, look: Open, scheme: str) -> None:
    page = await look(EDIT, "turing", viewport=PHONE, color_scheme=scheme)
    await edit(page, MORE, "Save")
    await page.locator("#students").fill("60")
    for text in (COURSE, BAD):
        await edit(page, text, "Check")
        await expect(page.locator("#outcome")).to_contain_text("errors" if text == BAD else "come at once")
        await page.locator("summary").first.click()
        assert await page.evaluate(TOO_WIDE) == 0
        assert await page.evaluate(TOO_FAINT) == []


async def test_a_comment_that_turns_what_follows_is_read_as_it_is(site: Site, look: Open) -> None:
    page = await look(EDIT, "turing")
    await edit(page, f"{COURSE}# \u202e 9 :thgiew \u2066 #\n", "Check")
    outcome = page.locator("#outcome")
    await expect(outcome).to_contain_text("U+202E (RIGHT-TO-LEFT OVERRIDE)")
    await expect(outcome).to_contain_text(r"Remove it: # \u202e 9 :thgiew \u2066 #")
    read = await page.locator("body").inner_text()
    assert not {"\u202e", "\u2066"} & {*read}


@pytest.mark.skipif(not SCREENSHOTS, reason="no pictures are asked for")
async def test_pictures_for_the_documentation(site: Site, look: Open) -> None:
    folder = Path(SCREENSHOTS)
    page = await look(EDIT, "turing", viewport={"width": 1000, "height": 900})
    await edit(page, MORE, "Save")
    await page.locator("#students").fill("60")
    await edit(page, MORE.replace("2%", "4%", 1), "Check")
    await expect(page.locator("#outcome")).to_contain_text("come at once")
    await page.locator("summary").first.click()
    await page.screenshot(path=folder / "dashboard-edit.png", full_page=True)
    await edit(page, BAD, "Check")
    await expect(page.locator("#h-problems")).to_be_visible()
    await page.locator("a[data-line]").first.click()
    await page.evaluate("scrollTo(0, 0)")
    await page.screenshot(path=folder / "dashboard-edit-errors.png")
    for user, size in (("ada", "2%"), ("grace", "20%"), ("grace", "2%"), ("ada", "20%")):
        await site.take(size, user, "intro-ml", f"Python 3 (GPU {size})")
    page = await look("courses/intro-ml", "turing")
    await live(page)
    await page.screenshot(path=folder / "dashboard-course.png", full_page=True)
