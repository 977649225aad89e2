"""What two students see who share one GPU: the slice of who idles goes to who waits, and comes back."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from gpu_pool_provisioner.session.view import GAVE_WAY
from support.browsers import PATIENCE, picture
from support.lab import Lab
from support.lab_extension import course, extension, inaccessible, panel, status
from support.notebook import NAMES, card, run_cell, start_notebook

__all__ = ["course", "extension"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
WHOLE = NAMES[3]
#: Keeps all that the page notifies of, however short it is shown, and all that the status bar says.
FOLLOW = """
window.told = [];
window.shown = [];
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  for (const toast of document.querySelectorAll(".Toastify__toast")) window.told.push(toast.textContent);
  const text = document.querySelector(".jp-GpuSlice-status")?.textContent;
  if (text && window.shown.at(-1) !== text) window.shown.push(text);
}).observe(document.body, {childList: true, characterData: true, subtree: true}));
"""


async def other_page(browser: Browser, lab: Lab) -> Page:
    """Open the launcher as somebody else does, beside the first page."""
    page = await (await browser.new_context(viewport={"width": 1100, "height": 700})).new_page()
    page.set_default_timeout(PATIENCE)
    await page.goto(lab.url.replace("/lab?", "/lab/workspaces/other?"))
    await card(page, WHOLE).wait_for()
    return page


@pytest.mark.parametrize("course", [{"yield_after": "3s"}], indirect=True)
async def test_an_idle_notebook_gives_way_quietly_and_goes_on_with_its_next_cell(
    course: None, new_page: Page, browser: Browser, lab: Lab
) -> None:
    page = new_page
    await page.add_init_script(FOLLOW)
    await page.goto(lab.url)
    await card(page, WHOLE).wait_for()
    await start_notebook(page, WHOLE)
    await run_cell(page, "kept = 42", WHOLE)
    await status(page).click()
    other = await other_page(browser, lab)
    await start_notebook(other, WHOLE)
    await expect(status(page)).to_have_text("parked")
    await expect(panel(page)).to_contain_text(GAVE_WAY)
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-act")).to_have_count(0)
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await picture(page, "yielding-parked.png")
    await expect(status(other)).to_have_text("whole GPU · 32 GiB")
    await run_cell(other, "print('mine')", WHOLE)
    await expect(other.locator(".jp-OutputArea-output").first).to_have_text("mine")
    await picture(other, "yielding-granted.png")
    await run_cell(page, "print(kept)", WHOLE)
    await expect(page.locator(".jp-OutputArea-output").first).to_have_text("42")
    await expect(status(page)).to_have_text("whole GPU · 32 GiB")
    await expect(status(other)).to_have_text("parked")
    await picture(page, "yielding-again.png")
    assert await page.evaluate("told") == []
    assert "parked" in await page.evaluate("shown")
    assert await other.locator(".Toastify__toast").count() == 0
