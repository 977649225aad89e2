"""What a student sees of the line: a cell that waits, and a kernel whose slice was lent to others."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from gpu_pool_client import Holder, LeaseState, connect, parse_request
from support.jupyter_env import eventually
from support.lab import Lab
from support.notebook import NAMES, run_cell, start_notebook

Snap = Callable[[str], Awaitable[None]]

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

    async def is_parked() -> bool:
        return [lease["state"] for lease in (await lab.status())["leases"]] == ["parked"]

    await eventually(is_parked)
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
