"""What a student does in JupyterLab."""

from __future__ import annotations

import re

from playwright.async_api import Locator, Page, expect

NAMES = ["Python 3 (GPU 2%)", "Python 3 (GPU 10%)", "Python 3 (GPU 50%)", "Python 3 (whole GPU)"]


def card(page: Page, kernel: str) -> Locator:
    """Return what starts a notebook: in a section of our own, where our extension is installed."""
    return page.locator(f'.jp-LauncherCard:not([data-category="Console"])[title^="{kernel}"]')


async def start_notebook(page: Page, kernel: str) -> None:
    await card(page, kernel).click()
    await page.locator(".jp-NotebookPanel").wait_for()


async def choose(page: Page, menu: str, *items: str) -> None:
    """Choose something in the main menu, by what leads there."""
    await page.get_by_role("menuitem", name=menu, exact=True).click()
    for item in items:
        await page.locator(".lm-Menu").get_by_text(item, exact=True).click()


async def choose_second_of_two(page: Page) -> None:
    """Make the second of two cells of a notebook that has just been opened the active one.

    JupyterLab adds the cells of a file one by one: which is the last is known once all are there.
    """
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    await expect(cells).to_have_count(2)
    await cells.nth(1).locator(".cm-content").click()
    await expect(cells.nth(1)).to_have_class(re.compile("jp-mod-active"))


async def run_cell(page: Page, code: str, kernel: str = NAMES[0]) -> None:
    # Until the kernel is there, JupyterLab may still take the focus away.
    await expect(page.get_by_text(f"{kernel} | Idle")).to_be_visible()
    cell = page.locator(".jp-Notebook .jp-Cell.jp-mod-active .cm-content")
    await expect(cell).to_have_text("")
    await cell.click()
    await page.keyboard.type(code)
    await expect(cell).to_have_text(code)
    await page.keyboard.press("Shift+Enter")
