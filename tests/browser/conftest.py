"""A browser, and a JupyterLab for it to open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from support.browsers import PATIENCE, SCREENSHOTS, browser, chromium, picture
from support.lab import SIZES, Lab, environment, running_lab

__all__ = ["browser", "chromium"]

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
async def new_page(browser: Browser) -> Page:
    """A page that has not been anywhere."""
    page = await browser.new_page(viewport={"width": 1100, "height": 700}, device_scale_factor=2)
    page.set_default_timeout(PATIENCE)
    return page


@pytest.fixture
async def page(new_page: Page, lab: Lab) -> Page:
    """JupyterLab's launcher."""
    await new_page.goto(lab.url)
    await new_page.locator(".jp-LauncherCard").first.wait_for()
    return new_page


@pytest.fixture
def snap(page: Page) -> Snap:
    """Write a picture of the page for the documentation, if that is asked for."""

    async def write(name: str) -> None:
        if SCREENSHOTS:
            await page.mouse.move(0, 0)
        await picture(page, name)

    return write
