"""Our extension in JupyterLab and Notebook 7, as somebody sees it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page

from gpu_pool_client import Holder, connect, parse_request
from support.browsers import REQUIRED

ROOT = Path(__file__).parents[2]
EXTENSION = Path(sys.prefix, "share", "jupyter", "labextensions", "jupyter-gpu-pool")
AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
#: What axe finds wrong within an element: rule and place.
_CHECK = """async (selector) => (await axe.run(selector, {resultTypes: ["violations"]})).violations
    .flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html} ${node.failureSummary}`))"""


@pytest.fixture(scope="session")
def extension() -> Path:
    """Return the folder of the installed extension."""
    if not (EXTENSION / "package.json").exists():
        why = "JupyterLab's extension is not installed: make labextension builds it, with Node.js"
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(why)
    return EXTENSION


def set_up(folder: Path, **settings: Any) -> None:
    """Write the extension's settings in a lab's ``folder``, as the settings editor does."""
    file = folder / "settings" / "jupyter-gpu-pool" / "plugin.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(settings))


@pytest.fixture
def course(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Set what the pool grants to everybody; before the launcher opens it."""
    content = {"PoolSettings": {"default_course": request.param}}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gpu_pool_config.json").write_text(json.dumps(content))


async def hold(size: str) -> str:
    """Hold a slice in somebody else's name; return the lease's id."""
    async with connect() as pool:
        return (
            await pool.request(parse_request(size), Holder("somebody else"), key=size.replace(" ", "-"))
        ).id


async def release(lease: str) -> None:
    """Give it back."""
    async with connect() as pool:
        await pool.release(lease)


def status(page: Page) -> Locator:
    return page.locator(".jp-GpuSlice-status")


def panel(page: Page) -> Locator:
    return page.locator(".jp-GpuSlice-panel")


def told(page: Page, words: str) -> Locator:
    """Return the notification that has these words."""
    return page.locator(".Toastify__toast", has_text=words)


async def inaccessible(page: Page, *selectors: str) -> list[str]:
    """Return what axe finds wrong within these elements."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in labextension/ installs it")
    await page.add_script_tag(path=AXE)
    return [problem for each in selectors for problem in await page.evaluate(_CHECK, each)]
