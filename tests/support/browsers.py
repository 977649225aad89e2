"""A browser for tests that look at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

#: If set, a browser that is missing is a failure and not a reason to skip.
REQUIRED = "GPU_POOL_REQUIRE_BROWSER"

#: If set, the folder that pictures for the documentation are written to.
SCREENSHOTS = os.environ.get("GPU_POOL_SCREENSHOTS", "")
#: Milliseconds in which whatever a test waits for happens, or the test fails.
PATIENCE = 120_000
_OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic", "--no-first-run"),
]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the browser's program."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get(REQUIRED):
        pytest.fail(f"There is no chromium on the PATH, and {REQUIRED} is set.")
    if found is None:
        pytest.skip("there is no chromium on the PATH (on Debian: apt install chromium)")
    return found


@pytest.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """A fresh browser."""
    expect.set_options(timeout=PATIENCE)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=_OPTIONS)
        yield browser
        await browser.close()


async def picture(page: Page, name: str, *, full_page: bool = False) -> None:
    """Write a picture of the page for the documentation, if that is asked for."""
    if SCREENSHOTS:
        await page.screenshot(path=Path(SCREENSHOTS, name), animations="disabled", full_page=full_page)
