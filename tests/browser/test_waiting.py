"""What a student sees of the line: a cell that waits, and a kernel whose slice was lent to others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import nbformat
import pytest
from playwright.async_api import Page, expect

from browser.conftest import Snap
from gpu_pool_client import Holder, LeaseState, connect, parse_request
from gpu_pool_provisioner.jupyter_files import NOTICE_MARK
from support.jupyter_env import eventually
from support.lab import Lab
from support.lab_extension import extension
from support.notebook import NAMES, choose, choose_second_of_two, run_cell, start_notebook

__all__ = ["extension"]

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]
_, _, HALF, WHOLE = NAMES


async def test_a_cell_waits_for_its_slice_and_runs(page: Page, lab: Lab, snap: Snap) -> None:
    async with connect() as pool:
        half = parse_request("50%")
        held = [await pool.request(half, Holder(f"user {n}"), key=f"held-{n}") for n in range(2)]
        before = await pool.request(half, Holder("somebody before"), key="before")
        await start_notebook(page, HALF)
        await run_cell(page, "print('It', 'runs')", HALF)
        output = page.locator(".jp-OutputArea-output").first
        await expect(output).to_contain_text("You are number 2 in the queue")
        await snap("waiting.png")
        await pool.release(before.id)
        await expect(output).to_contain_text("You are next in the queue")
        await pool.release(held[0].id)
        await expect(output).to_have_text("It runs")
        await expect(page.locator(".jp-OutputArea-output")).to_have_count(1)


async def test_a_page_that_is_closed_while_its_cell_waits_leaves_nothing_in_the_file(
    page: Page, lab: Lab, tmp_path: Path, snap: Snap
) -> None:
    file = tmp_path / "notebooks" / "Untitled.ipynb"
    async with connect() as pool:
        held = await pool.request(parse_request("1"), Holder("somebody else"), key="held")
        await start_notebook(page, HALF)
        await run_cell(page, "print('It', 'runs')", HALF)
        await expect(page.locator(".jp-OutputArea-output").first).to_contain_text(
            "The cell then runs by itself"
        )
        await snap("wait-before-closing.png")
        await choose(page, "File", "Save Notebook")
        assert "Waiting" not in await _saved(file, "It")
        await page.goto("about:blank")
        await pool.release(held.id)
        await eventually(lambda: _is_held(lab))
    await page.goto(lab.url.replace("/lab?", "/lab/tree/Untitled.ipynb?"))
    await choose_second_of_two(page)
    await run_cell(page, "print(6 * 7)", HALF)
    await expect(page.locator(".jp-OutputArea-output").last).to_have_text("42")
    await choose(page, "File", "Save Notebook")
    assert "Waiting" not in await _saved(file, "42")
    await snap("wait-after-closing.png")


async def _saved(file: Path, words: str) -> str:
    """Return what is saved in a file once these words are."""
    await eventually(lambda: asyncio.to_thread(file.read_text), lambda found: words in found)
    return await asyncio.to_thread(file.read_text)


async def _is_held(lab: Lab) -> bool:
    return [lease["state"] for lease in (await lab.status())["leases"]] == ["held"]


@pytest.mark.usefixtures("extension")
async def test_what_another_program_has_saved_of_a_wait_goes_when_the_notebook_is_opened(
    page: Page, lab: Lab, tmp_path: Path
) -> None:
    notice = nbformat.v4.new_output(
        "display_data", {"text/plain": "Waiting for a GPU slice of 2%."}, metadata=NOTICE_MARK
    )
    other = nbformat.v4.new_output("stream", text="well\n")
    cell = nbformat.v4.new_code_cell("1", outputs=[notice, other])
    kernel = {"name": "python3-gpu-2pct", "display_name": NAMES[0], "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "notebooks" / "one.ipynb")
    await page.goto(lab.url.replace("/lab?", "/lab/tree/one.ipynb?"))
    await expect(page.locator(".jp-OutputArea-output")).to_have_text(["well"])


@pytest.fixture
def lent(tmp_path: Path) -> None:
    """Lend the slices of idle kernels; before the launcher opens the pool."""
    settings = {"PoolSettings": {"default_course": {"idle_limit": "1s"}}}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gpu_pool_config.json").write_text(json.dumps(settings))


async def test_a_parked_kernel_comes_back_with_its_variables(
    lent: None, page: Page, lab: Lab, snap: Snap
) -> None:
    await start_notebook(page, WHOLE)
    await run_cell(page, "kept = 42", WHOLE)
    await eventually(lab.status, lambda status: [lease["state"] for lease in status["leases"]] == ["parked"])
    async with connect() as pool:
        other = await pool.request(parse_request("1"), Holder("somebody else"), key="other")
        assert other.state is LeaseState.HELD
        await run_cell(page, "print(kept)", WHOLE)
        output = page.locator(".jp-OutputArea-output").first
        words = "was idle, and its GPU slice was lent to others; its variables are kept"
        await expect(output).to_contain_text(words)
        await snap("parked.png")
        await pool.release(other.id)
        await expect(output).to_have_text("42")
