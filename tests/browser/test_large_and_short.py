"""What is seen of a large request for which GPUs are kept free, and of a slice whose length was said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from browser.conftest import Snap
from gpu_pool_client import Holder, LeaseState, connect, parse_request
from support.lab_extension import extension, hold, panel, release, status, told
from support.notebook import card, run_cell, start_notebook

__all__ = ["extension"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
BOTH, SHORT = "Python 3 (whole GPU\N{MULTIPLICATION SIGN}2)", "Python 3 (GPU 2%, for 50s)"


@pytest.fixture
def gpus(tmp_path: Path) -> int:
    """Two GPUs of a pool that keeps some free for whoever has waited for a second."""
    (tmp_path / "config").mkdir()
    settings = {"PoolSettings": {"drain_after": "1s"}}
    (tmp_path / "config" / "gpu_pool_config.json").write_text(json.dumps(settings))
    return 2


@pytest.fixture
def sizes() -> Sequence[str]:
    return ["2", "2% for 50s"]


async def test_who_waits_for_whole_gpus_is_told_from_when_on_they_are_kept_free(
    page: Page, snap: Snap
) -> None:
    small = [await hold(f"60% for {minutes}min") for minutes in (20, 40)]
    await start_notebook(page, BOTH)
    await run_cell(page, "print('Both', 'run')", BOTH)
    # Beside what the cell prints, before or after it.
    output = page.locator(".jp-OutputArea").first
    told = "2 GPUs are kept free for you; the leases that are still there end within 40 min."
    await expect(output).to_contain_text(told)
    await status(page).click()
    await expect(panel(page)).to_contain_text(told)
    await snap("kept-free.png")
    # Who will have given the slice back by then is let in, and nobody else.
    async with connect() as pool:
        long = await pool.request(parse_request("10%"), Holder("newcomer"), key="long")
        short = await pool.request(parse_request("10% for 5min"), Holder("newcomer"), key="short")
        assert (long.state, short.state) == (LeaseState.WAITING, LeaseState.HELD)
    for lease in small:
        await release(lease)
    await expect(output).to_contain_text("within 5 min")
    await release(short.id)
    await expect(output).to_have_text("Both run")


async def test_a_length_that_was_said_shows_in_the_name_before_the_end_and_at_the_end(
    page: Page, snap: Snap
) -> None:
    await expect(card(page, SHORT)).to_be_visible()
    await snap("short-launcher.png")
    await start_notebook(page, SHORT)
    await run_cell(page, "1", SHORT)
    # Beside what the cell prints, before or after it.
    output = page.locator(".jp-OutputArea").first
    why = "and the kernel with it, because nothing longer was asked for. Save what you need."
    await expect(output).to_contain_text(why)
    await expect(told(page, "Your GPU slice ends in less than a minute")).to_be_visible()
    await status(page).click()
    await snap("short-warned.png")
    await expect(
        told(page, "The kernel was ended: its GPU slice had been held for as long as was asked for.")
    ).to_be_visible()
    await snap("short-ended.png")
