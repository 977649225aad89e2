"""The same in Notebook 7, which has no status bar."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from playwright.async_api import Page, expect

from support.lab import Lab
from support.lab_extension import extension, inaccessible, panel, status, told
from support.notebook import NAMES

__all__ = ["extension"]

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]
pytestmark += [pytest.mark.usefixtures("extension")]


async def test_the_toolbar_tells_of_the_slice_and_opens_the_panel(
    page: Page, lab: Lab, tmp_path: Path
) -> None:
    kernel = {"name": "python3-gpu-2pct", "display_name": NAMES[0], "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("1")], metadata={"kernelspec": kernel}
    )
    nbformat.write(notebook, tmp_path / "notebooks" / "one.ipynb")
    await page.goto(lab.url.replace("/lab?", "/notebooks/one.ipynb?"))
    await expect(page.locator(".jp-NotebookPanel-toolbar .jp-GpuSlice-status")).to_have_text("2% · 655 MiB")
    await status(page).focus()
    await page.keyboard.press("Enter")
    await expect(panel(page)).to_be_focused()
    await expect(panel(page)).to_contain_text("V100-SXM2-32GB (simulated)")
    await expect(panel(page)).to_contain_text("one.ipynb")
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    button = panel(page).get_by_role("button", name="Give back when idle")
    await expect(button).not_to_have_class(re.compile("jp-mod-loses"))
    await button.click()
    await expect(status(page)).to_have_text("parked")
    # Who gave it back needs no telling.
    await expect(told(page, "GPU slice")).to_have_count(0)
