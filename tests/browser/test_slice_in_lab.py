"""What JupyterLab shows of the slice of the notebook in front, and what it tells."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Request, WebSocket, WebSocketRoute, expect

from browser.conftest import Snap
from support.browsers import picture
from support.lab import Lab
from support.lab_extension import course, extension, hold, inaccessible, panel, release, set_up, status, told
from support.notebook import NAMES, card, choose, run_cell, start_notebook

__all__ = ["course", "extension"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
SMALL, _, HALF, WHOLE = NAMES
#: A browser whose person looks at something else, and has allowed notifications.
ELSEWHERE = """
window.outside = [];
window.Notification = class { constructor(title, how) { window.outside.push(`${title} | ${how.body}`); } };
window.Notification.permission = "granted";
Object.defineProperty(document, "hidden", { get: () => true });
"""


async def test_the_status_bar_tells_of_the_slice_and_opens_the_panel(page: Page) -> None:
    await expect(status(page)).to_have_count(0)
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    await expect(status(page)).to_have_text("2% · 655 MiB")
    await status(page).click()
    await expect(panel(page)).to_contain_text("V100-SXM2-32GB (simulated)")
    await expect(panel(page)).to_contain_text("none (accounting only): nothing stops a program")
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await choose(page, "File", "New Launcher")
    await expect(status(page)).to_be_hidden()
    await expect(panel(page)).to_contain_text("No notebook or console with a kernel is in front.")


async def test_keys_open_the_panel_and_lead_back(page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    await status(page).focus()
    await page.keyboard.press("Enter")
    await expect(panel(page)).to_be_focused()
    await expect(panel(page).locator("select").first).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(panel(page).locator("select").first).to_be_focused()
    await page.keyboard.press("Escape")
    inside = "document.querySelector('.jp-NotebookPanel').contains(document.activeElement)"
    await page.wait_for_function(inside)


async def test_the_panel_can_be_read_in_the_dark_and_in_a_narrow_window(page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    await choose(page, "Settings", "Theme", "JupyterLab Dark")
    await expect(page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    await status(page).click()
    await expect(panel(page)).to_contain_text("Compute")
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await page.set_viewport_size({"width": 480, "height": 640})
    await expect(status(page)).to_be_visible()
    assert await panel(page).evaluate("node => node.scrollWidth <= node.clientWidth")


async def test_a_wait_shows_and_its_end_is_told(page: Page, snap: Snap, lab: Lab, tmp_path: Path) -> None:
    set_up(tmp_path, longWait=0)
    await page.add_init_script(ELSEWHERE)
    await page.goto(lab.url)
    held = await hold("1")
    await start_notebook(page, WHOLE)
    await expect(status(page)).to_contain_text("next in the queue")
    live = page.locator(".jp-GpuSlice-live")
    await expect(live).to_have_attribute("aria-live", "polite")
    await expect(live).to_have_text("GPU slice: next in the queue")
    await status(page).click()
    await expect(panel(page)).to_contain_text("Waiting for")
    assert await inaccessible(page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await snap("slice-waiting.png")
    await release(held)
    await expect(told(page, "Your GPU slice is here")).to_be_visible()
    assert await inaccessible(page, ".Toastify__toast") == []
    assert await page.evaluate("outside.map(each => each.split(' | ')[0])") == ["Your GPU slice is here"]
    await expect(status(page)).to_have_text("whole GPU · 32 GiB")


@pytest.mark.parametrize("course", [{"idle_limit": "1s"}], indirect=True)
async def test_a_slice_that_was_lent_is_told(course: None, page: Page) -> None:
    await start_notebook(page, WHOLE)
    await run_cell(page, "kept = 42", WHOLE)
    await expect(told(page, "its GPU slice was lent to others")).to_be_visible()
    await expect(status(page)).to_have_text("parked")
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-act")).to_have_count(0)


@pytest.mark.parametrize("course", [{"longest_lease": "30s"}], indirect=True)
async def test_the_end_of_a_slice_is_told_before_and_after(course: None, page: Page) -> None:
    await start_notebook(page, SMALL)
    await expect(told(page, "Your GPU slice ends in less than a minute")).to_be_visible()
    await expect(status(page)).to_have_text("2% · ends in less than a minute")
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-act")).to_be_visible()
    await expect(told(page, "The kernel was ended")).to_be_visible()


@pytest.mark.parametrize("course", [{"longest_lease": "20s"}], indirect=True)
async def test_what_is_switched_off_is_not_told(course: None, page: Page, lab: Lab, tmp_path: Path) -> None:
    set_up(tmp_path, ending=False)
    await page.goto(lab.url)
    await start_notebook(page, SMALL)
    await expect(status(page)).to_contain_text("ends in")
    # The one is switched off, and the other comes later.
    await expect(told(page, "The kernel was ended")).to_be_visible()
    await expect(told(page, "Your GPU slice ends in")).to_have_count(0)


async def test_the_settings_editor_has_each_kind(page: Page) -> None:
    await choose(page, "Settings", "Settings Editor")
    await page.locator(".jp-PluginList").get_by_role("searchbox").fill("GPU slices")
    await page.get_by_role("tab", name="GPU slices").click()
    for kind in (
        "Your slice is here",
        "Before a slice ends",
        "Lent to others",
        "Taken away",
        "Outside of the page",
    ):
        await expect(page.get_by_label(kind).first).to_be_visible()


class Traffic:
    """What a page asks of our server extension."""

    def __init__(self, page: Page) -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._request)
        page.on("websocket", self._socket)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _request(self, request: Request) -> None:
        if "gpu-pool/api" in request.url:
            self.asked.append(request.url.partition("gpu-pool/api/")[2].partition("?")[0])

    def _socket(self, socket: WebSocket) -> None:
        if "gpu-pool/api" in socket.url:
            self.asked.append("socket")


async def open_and_run(page: Page, lab: Lab, kernel: str) -> None:
    await page.goto(lab.url)
    await page.locator(".jp-LauncherCard").first.wait_for()
    await start_notebook(page, kernel)
    await run_cell(page, "1", kernel)


async def test_one_socket_is_open_for_all_notebooks(new_page: Page, lab: Lab) -> None:
    traffic = Traffic(new_page)
    await open_and_run(new_page, lab, SMALL)
    await expect(status(new_page)).to_be_visible()
    await choose(new_page, "File", "New Launcher")
    await card(new_page, NAMES[1]).click()
    await expect(status(new_page)).to_contain_text("10%")
    assert (traffic.asked.count("slices"), traffic.asked.count("socket")) == (1, 1)
    assert traffic.complaints == []


async def test_without_gpu_kernels_nothing_is_asked(new_page: Page, lab: Lab, tmp_path: Path) -> None:
    for kernelspec in (tmp_path / "share" / "jupyter" / "kernels").iterdir():
        shutil.rmtree(kernelspec)
    traffic = Traffic(new_page)
    await open_and_run(new_page, lab, "Python 3 (ipykernel)")
    assert traffic.asked == []
    assert traffic.complaints == []
    await expect(panel(new_page)).to_have_count(0)


@pytest.fixture
def without_server_extension(lab_config: dict[str, Any]) -> None:
    lab_config["ServerApp"] = {"jpserver_extensions": {"gpu_pool_provisioner": False}}


async def test_without_the_server_extension_all_works_as_before(
    new_page: Page, without_server_extension: None, lab: Lab
) -> None:
    traffic = Traffic(new_page)
    await open_and_run(new_page, lab, SMALL)
    assert [each for each in traffic.asked if each != "offers"] == ["slices"]
    assert traffic.complaints == []
    await expect(status(new_page)).to_have_count(0)


@pytest.mark.parametrize("course", [{"idle_limit": "1h"}], indirect=True)
async def test_a_slice_is_kept_and_its_size_changed(course: None, page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    await status(page).click()
    await panel(page).get_by_label("Keep: For how long").select_option("2 h")
    await panel(page).get_by_role("button", name="Keep").click()
    await expect(panel(page).get_by_role("status")).not_to_be_empty()
    await expect(panel(page)).to_contain_text("Kept for")
    assert await inaccessible(page, ".jp-GpuSlice-panel") == []
    await panel(page).get_by_label("Restart on this size: Size").select_option("10%")
    await panel(page).get_by_role("button", name="Restart on this size").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("all variables are lost")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(status(page)).to_contain_text("2% ·")
    await panel(page).get_by_role("button", name="Restart on this size").click()
    await dialog.get_by_role("button", name="Restart on this size").click()
    await expect(status(page)).to_contain_text("10% · 3.2 GiB")


@pytest.mark.parametrize("course", [{"idle_limit": "1h"}], indirect=True)
async def test_a_kernel_is_called_by_the_size_that_it_has(course: None, page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "kept = 42", SMALL)
    await status(page).click()
    await expect(panel(page)).to_contain_text("Idle for")
    await panel(page).get_by_label("Change the size: Size").select_option("1")
    await panel(page).get_by_role("button", name="Change the size").click()
    try:
        await expect(status(page)).to_have_text("whole GPU · 32 GiB")
    except AssertionError as error:
        said = await panel(page).get_by_role("alert").all_text_contents()
        raise AssertionError(f"The panel says {said}. {error}") from error
    await expect(page.get_by_text(f"{WHOLE} | Idle")).to_be_visible()
    await expect(page.get_by_text(SMALL)).to_have_count(0)


async def test_a_cell_that_runs_is_told_of_a_restart_for_another_size(page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    await page.keyboard.type("import time; print('begun'); time.sleep(3600)")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".jp-OutputArea-output").last).to_have_text("begun")
    await status(page).click()
    await panel(page).get_by_label("Restart on this size: Size").select_option("10%")
    await panel(page).get_by_role("button", name="Restart on this size").click()
    await page.get_by_role("dialog").get_by_role("button", name="Restart on this size").click()
    await expect(panel(page).get_by_role("status")).to_have_text("The kernel was restarted on 10%.")
    await expect(status(page)).to_contain_text("10% · 3.2 GiB")
    await expect(page.locator(".jp-InputPrompt").last).not_to_contain_text("*")


async def test_nothing_is_restarted_for_a_size_that_is_not_free(page: Page, snap: Snap) -> None:
    await hold("80%")
    await start_notebook(page, SMALL)
    await run_cell(page, "kept = 42", SMALL)
    await status(page).click()
    await panel(page).get_by_label("Restart on this size: Size").select_option("50%")
    await panel(page).get_by_role("button", name="Restart on this size").click()
    await page.get_by_role("dialog").get_by_role("button", name="Restart on this size").click()
    refusal = panel(page).get_by_role("alert")
    await expect(refusal).to_contain_text("The kernel was not restarted: it keeps 2% of a GPU and all its")
    await expect(refusal).to_contain_text("At this moment it could have up to 20% of a GPU.")
    assert await inaccessible(page, ".jp-GpuSlice-panel") == []
    await snap("restart-refused.png")
    await run_cell(page, "print(kept)", SMALL)
    await expect(page.locator(".jp-OutputArea-output").last).to_have_text("42")
    await expect(status(page)).to_contain_text("2% ·")
    await panel(page).get_by_role("button", name="Dismiss").click()
    await expect(refusal).to_be_empty()


@pytest.mark.parametrize("course", [{"idle_limit": "1h"}], indirect=True)
async def test_a_slice_that_was_given_back_is_taken_again(course: None, page: Page, snap: Snap) -> None:
    await start_notebook(page, WHOLE)
    await run_cell(page, "kept = 42", WHOLE)
    await status(page).click()
    button = panel(page).get_by_role("button", name="Give back when idle")
    # Before it is known what the kernel does with the GPU, its variables may be lost, and that is asked.
    await expect(button).not_to_have_class(re.compile("jp-mod-loses"))
    await button.click()
    await expect(status(page)).to_have_text("parked")
    await expect(panel(page)).to_contain_text("You gave this kernel's GPU slice back; its variables")
    await expect(panel(page).locator(".jp-mod-loses")).to_have_count(0)
    await expect(told(page, "lent to others")).to_have_count(0)
    await snap("given-back.png")
    await panel(page).get_by_role("button", name="Take the slice again").click()
    await expect(status(page)).to_have_text("whole GPU · 32 GiB")


@pytest.mark.parametrize("course", [{"idle_limit": "1h", "keep_at_most": "10min"}], indirect=True)
async def test_what_an_idle_kernel_of_ones_own_holds_can_be_given_back(
    course: None, page: Page, snap: Snap
) -> None:
    await start_notebook(page, HALF)
    await run_cell(page, "kept = 42", HALF)
    await status(page).click()
    choices = panel(page).get_by_label("Keep: For how long").locator("option")
    await expect(choices).to_have_text(["10 min"])
    await choose(page, "File", "New Launcher")
    await card(page, WHOLE).click()
    await expect(status(page)).to_contain_text("next in the queue")
    await expect(panel(page)).to_contain_text("It is yours, idle, and holds 50%. Its variables are kept")
    await snap("own-idle-kernel.png")
    await panel(page).get_by_role("button", name="Give back the slice of Untitled.ipynb").click()
    await expect(panel(page).get_by_role("status")).not_to_be_empty()
    await expect(status(page)).to_have_text("whole GPU · 32 GiB")


async def test_a_student_leaves_the_queue(page: Page) -> None:
    await hold("1")
    await start_notebook(page, WHOLE)
    await status(page).click()
    button = panel(page).get_by_role("button", name="Leave the queue")
    await button.focus()
    await page.keyboard.press("Enter")
    await expect(status(page)).to_have_text("no GPU slice")
    await expect(button).to_have_count(0)
    # Whoever works by the keyboard is still where the button was.
    await expect(panel(page)).to_be_focused()


async def test_what_is_shown_is_marked_once_the_server_is_gone(page: Page, tmp_path: Path) -> None:
    await start_notebook(page, SMALL)
    await expect(status(page)).to_have_text("2% · 655 MiB")
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-stale")).to_have_count(0)
    (server,) = (tmp_path / "runtime").glob("jpserver-*.json")
    os.kill(json.loads(server.read_text())["pid"], signal.SIGKILL)
    await expect(page.locator(".jp-GpuSlice-status.jp-mod-stale")).to_be_visible()
    await expect(status(page)).to_have_accessible_name(re.compile("The server does not answer"))
    assert await inaccessible(page, ".jp-GpuSlice-item") == []


@pytest.mark.parametrize("course", [{"idle_limit": "1h"}], indirect=True)
async def test_a_refusal_is_shown_by_what_it_says(course: None, page: Page) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "1", SMALL)
    refused = {"message": "The pool is closed.", "advice": "Come back tomorrow."}
    await page.route("**/gpu-pool/api/slices/*/keep*", lambda route: route.fulfill(status=409, json=refused))
    await status(page).click()
    await panel(page).get_by_role("button", name="Keep").click()
    await expect(panel(page).get_by_role("alert")).to_have_text("The pool is closed. Come back tomorrow.")


async def test_a_kernel_that_another_page_has_ended_is_not_said_to_be_started_afresh(
    new_page: Page, lab: Lab
) -> None:
    """A server leaves kernels on disk only with CRIU: these states are made on their way."""

    def left(text: str | bytes) -> str:
        state = json.loads(text)
        for each in state["slices"]:
            each["left_kernel"] = "from today 10:00"
        return json.dumps(state)

    async def leave(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(lambda text: socket.send(left(text)))

    await new_page.route_web_socket(re.compile("gpu-pool/api/events"), leave)
    await open_and_run(new_page, lab, SMALL)
    await (
        told(new_page, "Your kernel from today 10:00 is here")
        .get_by_role("button", name="Start fresh")
        .click()
    )
    dialog = new_page.get_by_role("dialog")
    await expect(dialog).to_contain_text("all variables are lost, on disk, too")
    server, _, token = lab.url.partition("lab?token=")
    asks = {"Authorization": f"token {token}"}
    (kernel,) = await (await new_page.request.get(f"{server}api/kernels", headers=asks)).json()
    ended = await new_page.request.delete(f"{server}api/kernels/{kernel['id']}", headers=asks)
    assert ended.ok
    await dialog.get_by_role("button", name="Start fresh").click()
    await expect(told(new_page, "The kernel was not started afresh")).to_be_visible()


async def test_memory_is_drawn_where_it_is_measured(new_page: Page, lab: Lab) -> None:
    """The use of a simulated device is not measured: the server's states are given some on their way."""

    def with_use(text: str | bytes) -> str:
        state = json.loads(text)
        for each in state["slices"]:
            each["memory"]["used_mib"] = 640 if each["memory"]["granted_mib"] else None
        return json.dumps(state)

    async def add_use(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(lambda text: socket.send(with_use(text)))

    history = {"samples": [[time.time() - 300, 100], [time.time() - 60, 400]], "granted_mib": 655}
    await new_page.route_web_socket(re.compile("gpu-pool/api/events"), add_use)
    await new_page.route("**/gpu-pool/api/slices/*/memory*", lambda route: route.fulfill(json=history))
    await open_and_run(new_page, lab, SMALL)
    await expect(status(new_page)).to_have_text("2% · 640 of 655 MiB")
    await expect(new_page.locator(".jp-GpuSlice-status.jp-mod-act")).to_be_visible()
    await status(new_page).click()
    plot = panel(new_page).get_by_role("img")
    words = "GPU memory in the last ten minutes: now 640 of 655 MiB, at most 640 of 655 MiB"
    await expect(plot).to_have_attribute("aria-label", words)
    # Two samples from before, and what is in use now.
    line = await plot.locator(".jp-GpuSlice-line").get_attribute("d")
    assert line is not None
    assert line.count("L") == 5
    assert await inaccessible(new_page, ".jp-GpuSlice-panel", ".jp-GpuSlice-item") == []
    await picture(new_page, "slice-memory.png")
