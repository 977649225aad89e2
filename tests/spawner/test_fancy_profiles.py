"""Courses as profiles in the form of jupyterhub-fancy-profiles, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from playwright.async_api import Browser, Route, expect

from support.browsers import browser, chromium
from support.kube_profile_lists import PROFILES, TITLE, folder, made, share, start

__all__ = ["browser", "chromium", "folder"]

fancy = pytest.importorskip(
    "jupyterhub_fancy_profiles", reason="jupyterhub-fancy-profiles is not installed: no extra has it"
)
pytestmark = [pytest.mark.browser, pytest.mark.long]

#: What JupyterHub puts around a form, in short.
_PAGE = '<!DOCTYPE html><form id="spawn_form" method="post" action="/hub/spawn/ada">{}</form>'


async def test_a_course_and_its_slice_are_chosen_in_that_form(folder: Path, browser: Browser) -> None:
    spawner = made(folder, PROFILES[:1], courses_as_profiles=True)
    spawner.additional_profile_form_template_paths = fancy.TEMPLATE_PATHS
    form = await spawner.get_options_form()
    sent: dict[str, Any] = {}

    async def answer(route: Route) -> None:
        static = route.request.url.partition("/hub/fancy-profiles/static/")[2]
        if route.request.method == "POST":
            sent.update(parse_qs(route.request.post_data or ""))
            await route.fulfill(body="Thank you.")
        elif static:
            await route.fulfill(path=Path(fancy.HERE, "static", static))
        else:
            await route.fulfill(body=_PAGE.format(form), content_type="text/html")

    page = await browser.new_page()
    await page.route("**/*", answer)
    await page.goto("http://hub.test/hub/spawn/ada")
    titles = page.locator("fieldset h2")
    # What a teacher wrote is text, and nothing in it is escaped twice.
    await expect(titles).to_have_text(["CPU only", "Art", TITLE])
    await page.locator("#profile-course-ml").click()
    await page.get_by_role("combobox", name="GPU").click()
    await page.get_by_role("option", name="A \u201dlarge\u201d one: 50% of a GPU, 4 free now").click()
    await page.get_by_role("button", name="Start").click()
    await expect(page.get_by_text("Thank you.")).to_be_visible()

    options = spawner.options_from_form(sent)
    assert options == {"profile": "course-ml", "slice": "50%"}
    assert share(await start(spawner, options)) == "50"
