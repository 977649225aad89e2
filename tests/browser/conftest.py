"""A browser, and a JupyterLab for it to open."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect

from support.browsers import chromium
from support.lab import SIZES, Lab, environment, running_lab

__all__ = ["chromium"]

#: If set, the folder that pictures for the documentation are written to.
SCREENSHOTS = "GPU_POOL_SCREENSHOTS"
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
]
#: Milliseconds in which whatever a test waits for happens, or the test fails.
PATIENCE = 120_000

Snap = Callable[[str], Awaitable[None]]


@pytest.fixture
def lab_config() -> dict[str, Any]:
    """The Jupyter server's configuration; a test's own fixtures may fill it."""
    return {}


@pytest.fixture
def sizes() -> Sequence[str]:
    """The sizes of the kernels."""
    return SIZES


@pytest.fixture
def gpus() -> int:
    """How many GPUs there are, simulated."""
    return 1


@pytest.fixture
async def lab(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lab_config: dict[str, Any],
    sizes: Sequence[str],
    gpus: int,
) -> AsyncIterator[Lab]:
    for name, value in environment(tmp_path, gpus).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config").mkdir(exist_ok=True)  # a test's own fixtures may have filled it
    (tmp_path / "config" / "jupyter_server_config.json").write_text(json.dumps(lab_config))
    async with running_lab(tmp_path, sizes) as lab:
        yield lab


@pytest.fixture
async def page(chromium: str, lab: Lab) -> AsyncIterator[Page]:
    """JupyterLab's launcher, in a fresh browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        page = await browser.new_page(viewport={"width": 1100, "height": 700}, device_scale_factor=2)
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        await page.goto(lab.url)
        await page.locator(".jp-LauncherCard").first.wait_for()
        yield page
        await browser.close()


@pytest.fixture
def snap(page: Page) -> Snap:
    """Write a picture of the page for the documentation, if that is asked for."""

    async def write(name: str) -> None:
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            await page.mouse.move(0, 0)
            await page.screenshot(path=Path(folder, name), animations="disabled")

    return write
