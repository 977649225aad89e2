"""What a student does and sees: the launcher, ``%gpu``, restart, shutdown, a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from browser.conftest import Snap
from support.jupyter_env import eventually
from support.lab import Lab
from support.notebook import NAMES, card, choose, run_cell, start_notebook

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]


async def test_a_student_takes_a_slice_and_gives_it_back(page: Page, lab: Lab, snap: Snap) -> None:
    for name in NAMES:
        await expect(card(page, name)).to_be_visible()
    cards = page.locator('.jp-LauncherCard:not([data-category="Console"])')
    titles = await cards.evaluate_all("cards => cards.map(card => card.title.split('\\n')[0])")
    assert [title for title in titles if title in NAMES] == NAMES, "sorted by size"

    await start_notebook(page, NAMES[0])
    await run_cell(page, "%gpu")
    output = page.locator(".jp-OutputArea-output").first
    for fact in ("2%", "V100-SXM2-32GB (simulated)", "655 MiB", "accounting only"):
        await expect(output).to_contain_text(fact)
    await snap("gpu-magic.png")
    (before,) = (await lab.status())["leases"]
    assert before["state"] == "held"

    await choose(page, "Kernel", "Restart Kernel and Clear Outputs of All Cells…")
    await page.get_by_role("button", name="Confirm Kernel Restart").click()
    await expect(page.locator(".jp-OutputArea-output")).to_have_count(0)
    await run_cell(page, "%gpu")
    await expect(page.locator(".jp-OutputArea-output").first).to_contain_text("655 MiB")
    (after,) = (await lab.status())["leases"]
    assert (after["id"], after["held_at"]) == (before["id"], before["held_at"])
    assert after["pid"] != before["pid"]

    await choose(page, "Kernel", "Shut Down Kernel")
    await eventually(lab.is_empty)


@pytest.fixture
def small(tmp_path: Path) -> None:
    """Allow no large slices; before the launcher opens the pool."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gpu_pool_config.py").write_text("c.PoolSettings.max_share = 0.1\n")


async def test_what_the_pool_does_not_allow_is_refused_in_words(
    small: None, page: Page, lab: Lab, snap: Snap
) -> None:
    await start_notebook(page, NAMES[2])
    dialog = page.locator(".jp-Dialog")
    await expect(dialog).to_contain_text("10 percent of a GPU")
    await expect(dialog).not_to_contain_text("%%")
    words = dialog.locator("pre", has_text="this pool gives to one lease")
    assert await words.evaluate("shown => shown.scrollWidth <= shown.clientWidth"), "the text is cut off"
    await snap("refusal.png")
    assert await lab.is_empty()
