"""The same line in Notebook 7, the other page that Jupyter offers."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.async_api import Page, expect

from gpu_pool_client import Holder, connect, parse_request
from support.jupyter_env import eventually
from support.lab import Lab
from support.notebook import NAMES, choose

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]


async def test_a_cell_waits_for_its_slice_and_runs(page: Page, lab: Lab, tmp_path: Path) -> None:
    kernel = {"name": "python3-gpu-50pct", "display_name": NAMES[2], "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("print('It', 'runs')")], metadata={"kernelspec": kernel}
    )
    nbformat.write(notebook, tmp_path / "notebooks" / "one.ipynb")
    async with connect() as pool:
        held = await pool.request(parse_request("1"), Holder("somebody"), key="held")
        # What is run before the page has its kernel is forgotten, and nothing shows when it has.
        async with page.expect_websocket(lambda found: "/channels" in found.url) as channels:
            await page.goto(lab.url.replace("/lab?", "/notebooks/one.ipynb?"))
        await (await channels.value).wait_for_event("framereceived")
        await page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        await page.locator(".jp-CodeCell .cm-content").first.click()
        await page.keyboard.press("Shift+Enter")
        output = page.locator(".jp-OutputArea-output").first
        await expect(output).to_contain_text("You are next in the queue")
        await pool.release(held.id)
        await expect(output).to_have_text("It runs")
    await choose(page, "Kernel", "Shut Down Kernel")
    await eventually(lab.is_empty)
