"""Kernels that a server has left on disk by a real CRIU, as the next JupyterLab offers them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from support.browsers import PATIENCE, browser, chromium, picture
from support.hub_with_proxy import DEVICES, Hub, need_proxy
from support.kernels_on_disk import CRIU, NEEDS_CRIU
from support.lab import Lab, environment, running_lab
from support.lab_extension import extension, inaccessible, panel, status, told
from support.left_kernels import cull, culler, gpu_kernel, images, output, start, write
from support.notebook import run_cell

__all__ = ["browser", "chromium", "culler", "extension"]

pytestmark = [
    *NEEDS_CRIU,
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
HELD = "2% · 655 MiB"


def configure(folder: Path, asleep: Path) -> None:
    """Let the kernels of servers with this folder of settings outlive them, in the folder ``asleep``."""
    kernels = {"hibernate_with_server": True, "criu": CRIU, "hibernation_folder": str(asleep)}
    config = {"GPUPoolProvisioner": kernels, "GPUPoolServer": {"leave_within": 300}}
    (folder / "jupyter_server_config.json").write_text(json.dumps(config))


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let kernels outlive their server; return the folder of the images."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config").mkdir()
    configure(tmp_path / "config", tmp_path / "asleep")
    (tmp_path / "notebooks").mkdir()
    for name in ("week1", "week2", "week3"):
        write(tmp_path / "notebooks" / f"{name}.ipynb", "python3-gpu-2pct")
    return tmp_path / "asleep"


@asynccontextmanager
async def opened(browser: Browser, lab: Lab, name: str) -> AsyncIterator[Page]:
    """Open a notebook in a browser, and in a workspace that no other notebook is in."""
    context = await browser.new_context(viewport={"width": 1100, "height": 700}, device_scale_factor=2)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE)
    await page.goto(lab.url.replace("/lab?", f"/lab/workspaces/{name}/tree/{name}.ipynb?"))
    yield page
    await context.close()


async def start_fresh(page: Page, button: Locator) -> None:
    """Start fresh, once that was thought better of."""
    for answer in ("Cancel", "Start fresh"):
        await expect(status(page)).to_have_text("asleep")
        await button.click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("The kernel starts anew: all variables are lost, on disk, too.")
        await dialog.get_by_role("button", name=answer).click()
        await expect(dialog).to_have_count(0)


async def test_the_next_server_offers_to_continue_and_to_start_fresh(
    browser: Browser, left: Path, tmp_path: Path
) -> None:
    async with running_lab(tmp_path, ["2%"]) as lab:
        for name in ("week1", "week2", "week3"):
            async with opened(browser, lab, name) as page:
                await run_cell(page, "kept = 42; print('kept:', kept)")
                await expect(output(page)).to_have_text("kept: 42")
    assert images(left) == 3
    code = "print('kept:', globals().get('kept'))"
    async with running_lab(tmp_path, ["2%"]) as lab:
        async with opened(browser, lab, "week1") as page:
            toast = told(page, "week1.ipynb: Your kernel from today ")
            await expect(toast).to_contain_text("(1 variable, ")
            await expect(status(page)).to_have_text("asleep")
            await status(page).click()
            for label in ("Continue", "Start fresh"):
                await expect(panel(page).get_by_role("button", name=label)).to_be_visible()
            assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
            await picture(page, "left-kernel.png")
            await toast.get_by_role("button", name="Continue").click()
            await expect(status(page)).to_have_text(HELD)
            await expect(toast).to_have_count(0)
            await run_cell(page, code)
            await expect(output(page)).to_have_text("kept: 42")
        assert images(left) == 2
        async with opened(browser, lab, "week2") as page:
            toast = told(page, "week2.ipynb: Your kernel from today ")
            await start_fresh(page, toast.get_by_role("button", name="Start fresh"))
            await expect(status(page)).to_have_text(HELD)
            await expect(toast).to_have_count(0)
            await run_cell(page, code)
            await expect(output(page)).to_have_text("kept: None")
        assert images(left) == 1
        async with opened(browser, lab, "week3") as page:
            toast = told(page, "week3.ipynb: Your kernel from today ")
            await toast.get_by_role("button", name="Hide notification").click()
            await expect(toast).to_have_count(0)
            await status(page).click()
            await start_fresh(page, panel(page).get_by_role("button", name="Start fresh"))
            await expect(panel(page).get_by_role("status")).to_have_text("The kernel was started afresh.")
            await expect(status(page)).to_have_text(HELD)
            await run_cell(page, code)
            await expect(output(page)).to_have_text("kept: None")
        assert images(left) == 0


async def test_why_one_could_not_be_woken_is_told_without_a_cell(
    browser: Browser, left: Path, tmp_path: Path
) -> None:
    read = tmp_path / "read"
    read.write_text("one\ntwo\n")
    async with running_lab(tmp_path, ["2%"]) as lab, opened(browser, lab, "week1") as page:
        await run_cell(page, f"file = open({str(read)!r}); print('kept:', file.readline())")
        await expect(output(page)).to_contain_text("kept: one")
    read.write_text("one\n")
    async with running_lab(tmp_path, ["2%"]) as lab, opened(browser, lab, "week1") as page:
        await told(page, "Your kernel from today ").get_by_role("button", name="Continue").click()
        toast = told(page, "could not be woken: the file ")
        await expect(toast).to_be_visible()
        await expect(status(page)).to_have_text("asleep")
        await status(page).click()
        await expect(panel(page)).to_contain_text(f"the file {read} changed, or went, while it slept.")
        await picture(page, "not-woken.png")
        # The panel's button tries again, and says the same again.
        await toast.get_by_role("button", name="Hide notification").click()
        await expect(toast).to_have_count(0)
        await panel(page).get_by_role("button", name="Continue").click()
        await expect(toast).to_be_visible()
        await start_fresh(page, toast.get_by_role("button", name="Start fresh"))
        await expect(status(page)).to_have_text(HELD)
        await expect(toast).to_have_count(0)
        assert images(left) == 0


async def run_active(page: Page, code: str) -> None:
    """Run the active cell of a page that does not say whether its kernel is idle."""
    await expect(status(page)).to_have_text(HELD)
    cell = page.locator(".jp-Notebook .jp-Cell.jp-mod-active .cm-content")
    await expect(cell).to_have_text("")
    await cell.fill(code)
    await expect(cell).to_have_text(code)
    await page.keyboard.press("Shift+Enter")


async def test_so_does_notebook_7(browser: Browser, left: Path, tmp_path: Path) -> None:
    """It has no status bar: a notebook's toolbar says that its kernel is asleep."""

    @asynccontextmanager
    async def shown(lab: Lab, name: str) -> AsyncIterator[Page]:
        async with opened(browser, lab, name) as page:
            await page.goto(lab.url.replace("/lab?", f"/notebooks/{name}.ipynb?"))
            yield page

    async with running_lab(tmp_path, ["2%"]) as lab:
        for name in ("week1", "week2"):
            async with shown(lab, name) as page:
                await run_active(page, "kept = 42; print('kept:', kept)")
                await expect(output(page)).to_have_text("kept: 42")
    code = "print('kept:', globals().get('kept'))"
    async with running_lab(tmp_path, ["2%"]) as lab:
        async with shown(lab, "week1") as page:
            toast = told(page, "week1.ipynb: Your kernel from today ")
            await expect(page.locator(".jp-NotebookPanel-toolbar .jp-GpuSlice-status")).to_have_text("asleep")
            await status(page).click()
            await expect(panel(page).get_by_role("button", name="Start fresh")).to_be_visible()
            assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
            await picture(page, "left-kernel-in-notebook.png")
            await toast.get_by_role("button", name="Continue").click()
            await expect(status(page)).to_have_text(HELD)
            await run_active(page, code)
            await expect(output(page)).to_have_text("kept: 42")
        async with shown(lab, "week2") as page:
            toast = told(page, "week2.ipynb: Your kernel from today ")
            await start_fresh(page, toast.get_by_role("button", name="Start fresh"))
            await expect(status(page)).to_have_text(HELD)
            await run_active(page, code)
            await expect(output(page)).to_have_text("kept: None")
        assert images(left) == 0


async def test_the_idle_culler_stops_the_server_at_night_and_the_next_one_goes_on_in_the_morning(
    browser: Browser, tmp_path: Path, culler: Path
) -> None:
    need_proxy()
    course = "title: Introduction\nwho: {users: [ada]}\nslices: [{name: Small, request: 2%}]\n"
    # A machine with other work: whoever stops it waits for longer.
    config = "c.Spawner.interrupt_timeout = 300\n"
    hub = Hub(
        tmp_path / "hub", {}, {"intro": course}, config=config, environment={"GPU_POOL_DEVICES": DEVICES}
    )
    asleep = tmp_path / "asleep"
    configure(hub.folder, asleep)
    await hub.start()
    try:
        await hub.api("POST", "users/ada")
        await start(hub, "ada")
        kernel, shown = await gpu_kernel(hub, "ada")
        write(hub.folder / "homes" / "ada" / "week1.ipynb", kernel)
        context = await browser.new_context(viewport={"width": 1100, "height": 700})
        context.set_default_timeout(PATIENCE)
        page = await context.new_page()
        await page.goto(f"{hub.url}/hub/login?next=/hub/home")
        await page.fill("#username_input", "ada")
        await page.fill("#password_input", "any")
        await page.click("#login_submit")
        await page.wait_for_url("**/hub/home")
        await page.goto(f"{hub.url}/user/ada/lab/tree/week1.ipynb")
        await run_cell(page, "kept = 42; print('kept:', kept)", shown)
        await expect(output(page)).to_have_text("kept: 42")
        await page.close()
        await cull(hub, culler, "ada")
        assert images(asleep) == 1
        await start(hub, "ada")
        page = await context.new_page()
        await page.goto(f"{hub.url}/user/ada/lab/tree/week1.ipynb")
        toast = told(page, "Your kernel from today ")
        await expect(toast).to_be_visible()
        await picture(page, "left-kernel-after-the-culler.png")
        await toast.get_by_role("button", name="Continue").click()
        await expect(status(page)).to_have_text(HELD)
        await run_cell(page, "print('kept:', kept)", shown)
        await expect(output(page)).to_have_text("kept: 42")
        assert images(asleep) == 0
    finally:
        await hub.end()
