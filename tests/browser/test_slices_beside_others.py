"""Slices where JupyterLab has its own: the launcher, the Running panel, a notebook's toolbar."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Locator, Page, Request, expect

from browser.conftest import Snap
from support.jupyter_env import eventually
from support.lab import Lab
from support.lab_extension import course, extension, hold, inaccessible, release, status
from support.notebook import NAMES, card, choose, run_cell, start_notebook

__all__ = ["course", "extension"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
]
SMALL, _, HALF, WHOLE = NAMES
GPU_CARDS = '.jp-LauncherCard[data-category="GPU"]'
#: Keeps what the status bar says of the kernel, as often as that changes.
FOLLOW = """() => {
  window.shown = [];
  new MutationObserver(() => {
    const texts = [...document.querySelectorAll(".jp-StatusBar-TextItem")].map(item => item.textContent);
    const found = texts.find(text => text.includes(" | "));
    if (found && window.shown.at(-1) !== found) window.shown.push(found);
  }).observe(document.body, {childList: true, characterData: true, subtree: true});
}"""
#: What is asked for a slice by a button.
_ANSWER = re.compile("/gpu-pool/api/slices/[^/]+/(give-back|leave-queue)")
#: Lets a page's connections to kernels be lost, as a bad network does.
SOCKETS = """
window.sockets = [];
const Real = window.WebSocket;
window.WebSocket = class extends Real {
  constructor(...how) { super(...how); if (how[0].includes("/channels")) window.sockets.push(this); }
};
"""


def running(page: Page, notebook: str = "") -> Locator:
    """Return the slices in the Running panel, or that of one notebook."""
    return page.locator(".jp-GpuSlice-running", has_text=notebook)


async def open_running(page: Page) -> None:
    await page.locator('.lm-TabBar-tab[data-id="jp-running-sessions"]').click()
    await expect(page.get_by_text("GPU slices", exact=True)).to_be_visible()


async def press(page: Page, notebook: str, button: str) -> None:
    """Press the button of a slice in the Running panel."""
    await running(page, notebook).hover()
    await running(page, notebook).locator(f'[title="{button}"]').click()


async def answer_to(page: Page, notebook: str, button: str) -> str:
    """Press such a button, and return what the server answers its user."""
    async with page.expect_response(_ANSWER) as answered:
        await press(page, notebook, button)
    body = await (await answered.value).json()
    assert "message" in body, body
    return str(body["message"])


async def until_it_keeps_variables(page: Page, lab: Lab) -> None:
    """Wait until it is known that no kernel loses anything; before that, a page asks whether one may."""

    async def does() -> bool:
        answer = await page.request.get(lab.url.replace("/lab?", "/gpu-pool/api/slices?"))
        offered = [each["actions"].get("give-back") for each in (await answer.json())["slices"]]
        return all(each["keeps_variables"] for each in offered if each is not None)

    await eventually(does)


async def test_gpu_kernels_have_a_section_and_say_what_is_free(page: Page, snap: Snap) -> None:
    cards = page.locator(GPU_CARDS)
    await expect(cards).to_have_count(4)
    await expect(cards.first).to_contain_text("50 free now")
    titles = await cards.evaluate_all("cards => cards.map(card => card.title.split('\\n')[0])")
    assert titles == NAMES, "sorted by size"
    for name in NAMES:
        await expect(card(page, name)).to_have_count(1)
    consoles = page.locator('.jp-LauncherCard[data-category="Console"][title*="GPU"]')
    titles = await consoles.evaluate_all("cards => cards.map(card => card.title.split('\\n')[0])")
    assert titles == NAMES, "sorted by size"
    # The pool is another's for half; a launcher that stays open learns of it.
    held = await hold("50%")
    await expect(cards.first).to_contain_text("25 free now")
    await expect(cards.last).to_contain_text("none free now")
    assert await inaccessible(page, f".jp-Launcher-section:has({GPU_CARDS})") == []
    await snap("launcher.png")
    await page.set_viewport_size({"width": 480, "height": 640})
    await expect(cards.last).to_be_visible()
    await release(held)
    await expect(cards.last).to_contain_text("1 free now")
    # By keys alone.
    await cards.first.focus()
    await page.keyboard.press("Enter")
    await page.locator(".jp-NotebookPanel").wait_for()
    await expect(status(page)).to_contain_text("2%")


async def test_what_is_free_is_asked_once_for_all_and_only_while_it_is_seen(page: Page, lab: Lab) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        if request.url.split("?")[0].endswith("gpu-pool/api/offers"):
            asked.append(request.url)

    page.on("request", note)
    await page.clock.install()
    await page.goto(lab.url)
    await expect(page.locator(GPU_CARDS).first).to_contain_text("free now")
    assert len(asked) == 1

    async def is_asked_again() -> bool:
        await page.clock.fast_forward(11_000)
        return len(asked) > 1

    await eventually(is_asked_again)
    await start_notebook(page, SMALL)
    await expect(status(page)).to_contain_text("2%")
    before = len(asked)
    await page.clock.fast_forward(120_000)
    await run_cell(page, "1", SMALL)
    assert len(asked) == before


async def test_without_an_answer_the_launcher_starts_kernels_all_the_same(page: Page, lab: Lab) -> None:
    await page.route("**/gpu-pool/api/**", lambda route: route.fulfill(status=404, body="{}"))
    await page.goto(lab.url)
    await expect(page.locator(GPU_CARDS)).to_have_count(4)
    await expect(page.locator(GPU_CARDS).first).not_to_contain_text("free now")
    await start_notebook(page, SMALL)
    await run_cell(page, "print(6 * 7)", SMALL)
    await expect(page.locator(".jp-OutputArea-output").first).to_have_text("42")


# A slice can then be given back, and the kernel kept.
@pytest.mark.parametrize("course", [{"idle_limit": "1h"}], indirect=True)
async def test_the_running_panel_gives_slices_back(course: None, page: Page, snap: Snap, lab: Lab) -> None:
    await start_notebook(page, HALF)
    await run_cell(page, "kept = 42", HALF)
    await choose(page, "File", "New Launcher")
    await card(page, WHOLE).click()
    await expect(page.locator(".jp-NotebookPanel")).to_have_count(2)
    await open_running(page)
    await expect(running(page)).to_have_count(2)
    await expect(running(page, "Untitled.ipynb")).to_contain_text("50%")
    await expect(running(page, "Untitled1.ipynb")).to_contain_text("next in the queue")
    assert await inaccessible(page, "#jp-running-sessions .jp-GpuSlice-running") == []
    for said in ("itemLabel", "itemDetail"):
        shown = running(page).locator(f".jp-RunningSessions-{said}")
        cut_off = (
            "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
        )
        assert await shown.evaluate_all(cut_off) == []
    await snap("running.png")
    # A click opens the notebook.
    await running(page, "Untitled.ipynb").locator(".jp-RunningSessions-itemLabel").click()
    await expect(page.locator(".jp-mod-current .lm-TabBar-tabLabel").first).to_have_text("Untitled.ipynb")
    await answer_to(page, "Untitled1.ipynb", "Leave the queue")
    await expect(running(page, "Untitled1.ipynb")).to_have_count(0)
    await until_it_keeps_variables(page, lab)
    answer = await answer_to(page, "Untitled.ipynb", "Give back when idle")
    assert answer.endswith("its variables are kept.")
    await expect(running(page, "Untitled.ipynb")).to_contain_text("parked")
    assert [lease["state"] for lease in (await lab.status())["leases"]] == ["parked"]


async def test_a_slice_that_nobody_takes_back_is_given_back_and_variables_are_kept(
    page: Page, lab: Lab
) -> None:
    await start_notebook(page, SMALL)
    await run_cell(page, "kept = 6 * 7", SMALL)
    await open_running(page)
    await until_it_keeps_variables(page, lab)
    await answer_to(page, "Untitled.ipynb", "Give back when idle")
    await expect(running(page, "Untitled.ipynb")).to_contain_text("parked")
    await run_cell(page, "print(kept)", SMALL)
    await expect(page.locator(".jp-OutputArea-output").last).to_have_text("42")
    await expect(running(page, "Untitled.ipynb")).not_to_contain_text("parked")


async def test_a_kernel_in_the_queue_is_told_as_such(page: Page, lab: Lab, snap: Snap) -> None:
    await page.add_init_script(SOCKETS)
    await page.goto(lab.url)
    await page.evaluate(FOLLOW)
    held = await hold("1")
    await start_notebook(page, HALF)
    waits = page.locator(".jp-NotebookPanel-toolbar .jp-GpuSlice-queue")
    await expect(waits).to_have_text("Queue: 1")
    await expect(waits).to_have_attribute("title", re.compile("^next in the queue"))
    await expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_be_visible()
    assert await inaccessible(page, ".jp-GpuSlice-queue") == []
    await expect(page.get_by_text(f"{HALF} | Idle")).to_be_visible()
    await snap("queue.png")
    # The network fails, with a cell that waits and without one; neither is unknown or starts.
    await _reconnected(page, f"{HALF} | Idle")
    await run_cell(page, "print(6 * 7)", HALF)
    await expect(page.get_by_text(f"{HALF} | Busy")).to_be_visible()
    await _reconnected(page, f"{HALF} | Busy")
    await choose(page, "Kernel", "Restart Kernel…")
    await page.locator(".jp-Dialog .jp-mod-accept").click()
    await expect(page.get_by_text(f"{HALF} | Idle")).to_be_visible()
    await expect(waits).to_have_text("Queue: 1")
    await release(held)
    await expect(waits).to_be_hidden()
    await run_cell(page, "print(6 * 7)", HALF)
    await expect(page.locator(".jp-OutputArea-output").last).to_have_text("42")
    await expect(page.get_by_text(f"{HALF} | Idle")).to_be_visible()
    shown = {each.rpartition(" | ")[2] for each in await page.evaluate("shown")}
    assert "Starting" not in shown, shown


async def _reconnected(page: Page, then: str) -> None:
    """Lose the page's connections to its kernel, and wait until it has new ones."""
    count = await page.evaluate("sockets.length")
    await page.evaluate("sockets.forEach(socket => socket.close())")
    await page.wait_for_function(f"sockets.length > {count} && sockets.at(-1).readyState === WebSocket.OPEN")
    await expect(page.get_by_text(then)).to_be_visible()


async def test_notebook_7_lists_slices_among_what_runs(page: Page, lab: Lab, snap: Snap) -> None:
    await page.goto(lab.url.replace("/lab?", "/tree?"))
    await page.get_by_text("New", exact=True).click()
    async with page.context.expect_page() as opened:
        await page.locator(".lm-Menu-itemLabel", has_text=SMALL).click()
    notebook = await opened.value
    await expect(notebook.locator(".jp-GpuSlice-status")).to_contain_text("2%")
    await page.get_by_role("tab", name="Running").click()
    await expect(running(page, "Untitled.ipynb")).to_contain_text("2%")
    await snap("notebook-running.png")
    await until_it_keeps_variables(page, lab)
    await answer_to(page, "Untitled.ipynb", "Give back when idle")
    await expect(running(page, "Untitled.ipynb")).to_contain_text("parked")
    await expect(notebook.locator(".jp-GpuSlice-status")).to_have_text("parked")
