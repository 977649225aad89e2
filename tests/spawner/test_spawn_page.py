"""The spawn page in a real browser: by keyboard, without a script, on a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

from gpu_pool_client import Holder, connect, parse_request
from support.hub_with_proxy import Hub
from support.jupyter_env import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

THESES = """\
title: Theses and projects
who:
  users: [ada]
slices:
  - {name: To try things out, request: 4GiB}
  - {name: To train, request: 1}
"""


@pytest_asyncio.fixture(loop_scope="module", params=[True])
async def page(request: pytest.FixtureRequest, hub: Hub) -> AsyncIterator[Page]:
    """Show ada the spawn page, with scripts or without."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        words = "there is no chromium on the PATH (on Debian: apt install chromium)"
        pytest.fail(words) if os.environ.get("GPU_POOL_REQUIRE_BROWSER") else pytest.skip(words)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(
            viewport={"width": 1000, "height": 620}, device_scale_factor=2, java_script_enabled=request.param
        )
        await page.goto(f"{hub.url}/hub/login")
        await page.get_by_label("Username").fill("ada")
        await page.get_by_label("Password").fill("any")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("group", name="Choose a course")).to_be_visible()
        yield page
        await browser.close()


@pytest.mark.parametrize("page", [False], indirect=True)
async def test_a_course_is_chosen_by_keyboard_and_without_a_script(hub: Hub, page: Page) -> None:
    intro = page.get_by_role("radio", name="Introduction")
    await expect(intro).not_to_be_checked()
    await expect(intro).to_have_accessible_description(
        "Small: 2% of a GPU, 50 free now Large: 50% of a GPU, 2 free now"
    )
    await intro.focus()
    await page.keyboard.press("Space")
    await expect(intro).to_be_checked()
    await page.keyboard.press("ArrowDown")
    await expect(intro).not_to_be_checked()
    await expect(
        page.get_by_role("radio", name='<script>alert("theses")</script> & projects')
    ).to_be_checked()


async def test_a_full_pool_tells_the_wait(hub: Hub, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in hub.environment.items():
        monkeypatch.setenv(variable, value)
    grace = Holder("grace", "intro")
    async with connect(hub.pool) as pool:
        for number in range(30):
            await pool.release((await pool.request(parse_request("2%"), grace, f"{number}")).id)
        leases = [await pool.request(parse_request("60%"), grace, key) for key in ("held", "waits")]
        (hub.courses / "thesis.yaml").write_text(THESES)
        await eventually(lambda: _shows(page, "none free now, a wait of perhaps about"))
        await eventually(lambda: _shows(page, "Theses and projects"))
        folder = os.environ.get("GPU_POOL_SCREENSHOTS")
        if folder:
            await page.get_by_role("radio", name="Introduction").check()
            await page.mouse.move(0, 0)
            await page.screenshot(path=Path(folder, "spawn.png"))
        for lease in leases:
            await pool.release(lease.id)


async def _shows(page: Page, words: str) -> bool:
    """Load the page again, and return whether these words are on it."""
    await page.reload()
    return words in await page.locator("#gpu-pool-courses").inner_text()


async def test_it_fits_on_a_phone(page: Page) -> None:
    await page.set_viewport_size({"width": 360, "height": 740})
    # Measured together, and again until it is laid out: a bar for scrolling may come and go.
    await page.wait_for_function("""() => {
        const body = document.body.getBoundingClientRect();
        const choices = document.querySelector("#gpu-pool-courses").getBoundingClientRect();
        return choices.width > 0 && choices.right <= body.width && body.width <= 360;
    }""")
