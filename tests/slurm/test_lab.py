"""A kernel that is a job, in a real JupyterLab and a real browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from support.browsers import PATIENCE, browser, chromium, picture
from support.lab import environment, running_lab
from support.lab_extension import extension, panel, status
from support.notebook import run_cell, start_notebook
from support.slurm import Slurm

__all__ = ["browser", "chromium", "extension"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("extension")]
#: The request, and what its kernel is called.
SIZE, KERNEL = "1 model=t4", "Python 3 (whole GPU, t4)"


@pytest.fixture
async def lab_page(
    slurm: Slurm, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Page]:
    """JupyterLab's launcher on a login node, with a kernel on a GPU of Slurm's."""
    variables = {**environment(tmp_path), "GPU_POOL_URL": f"slurm:{tmp_path}/store.db"}
    variables |= {name: slurm.environment[name] for name in ("PATH", "SLURM_CONF")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gpu_pool_config.py").write_text('c.SlurmSettings.gpu_memory = {"t4": 16}\n')
    async with running_lab(tmp_path, (SIZE,)) as lab:
        page = await browser.new_page(viewport={"width": 1100, "height": 700}, device_scale_factor=2)
        page.set_default_timeout(PATIENCE)
        await page.goto(lab.url)
        yield page


async def test_the_cell_shows_slurms_queue_and_the_panel_the_job(lab_page: Page, slurm: Slurm) -> None:
    taken = slurm.submit("sleep 600", "--gres=gpu:t4:1", "--time=20")
    slurm.until(taken, "RUNNING")
    before = slurm.submit("sleep 600", "--gres=gpu:t4:1", "--time=20", "--nice=-10")
    await start_notebook(lab_page, KERNEL)
    await run_cell(lab_page, "print('It', 'runs')", KERNEL)
    output = lab_page.locator(".jp-OutputArea-output").first
    await expect(output).to_contain_text("It is number 2 in the queue of partition gpu")
    await expect(output).to_contain_text("perhaps about")
    await status(lab_page).click()
    await expect(panel(lab_page)).to_contain_text("Waiting forless than a minute")
    await expect(panel(lab_page)).to_contain_text(re.compile(r"JobSlurm job \d+"))
    await expect(status(lab_page)).to_have_text("in the queue")
    await picture(lab_page, "slurm-waiting.png")
    slurm.run("scancel", before)
    await expect(output).to_contain_text("It is next in the queue of partition gpu")
    slurm.run("scancel", taken)
    await expect(output).to_have_text("It runs")
    await expect(lab_page.locator(".jp-OutputArea-output")).to_have_count(1)
    await expect(panel(lab_page)).to_contain_text(re.compile("Time left2\\d min"))
    await picture(lab_page, "slurm-running.png")
