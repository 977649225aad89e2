"""What a student sees whose slice may use more while that is free, as it comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from playwright.async_api import Page, expect

from browser.conftest import Snap
from support.lab_extension import extension, hold, inaccessible, panel, release, status
from support.notebook import card, run_cell, start_notebook

__all__ = ["extension"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
KERNEL = "Python 3 (GPU 2%, up to 10%)"
AT_MOST = "3.2 GiB while nobody else needs that"


@pytest.fixture
def sizes() -> Sequence[str]:
    """The sizes of the kernels."""
    return ["2%..10%", "2%"]


async def test_what_may_be_used_on_top_shows_as_it_comes_and_goes(page: Page, snap: Snap) -> None:
    await expect(card(page, KERNEL)).to_contain_text("up to 10%")
    await snap("burst-launcher.png")
    await start_notebook(page, KERNEL)
    await run_cell(page, "%gpu", KERNEL)
    shown = page.locator(".jp-OutputArea-output").first
    await expect(shown).to_contain_text("2%, up to 10%")
    await expect(shown).to_contain_text(AT_MOST)
    await expect(status(page)).to_have_text("2%, up to 10% · 3.2 GiB")
    await status(page).click()
    await expect(panel(page)).to_contain_text("655 MiB, now up to 3.2 GiB")
    await expect(panel(page)).to_contain_text(AT_MOST)
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await snap("burst-panel.png")
    held = await hold("98%")
    await expect(status(page)).to_have_text("2%, up to 10% · 655 MiB")
    await expect(panel(page)).not_to_contain_text("now up to")
    await expect(panel(page)).to_contain_text(AT_MOST)
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-act")).to_have_count(0)
    await snap("burst-taken-back.png")
    await run_cell(page, "%gpu", KERNEL)
    await expect(page.locator(".jp-OutputArea-output").last).to_contain_text("655 MiB granted;")
    await release(held)
    await expect(status(page)).to_have_text("2%, up to 10% · 3.2 GiB")
    await page.set_viewport_size({"width": 480, "height": 640})
    assert await panel(page).evaluate("node => node.scrollWidth <= node.clientWidth")
