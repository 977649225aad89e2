"""The example Hub as its four people use it: a class on the pool, from the login to a revoked slice."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from support.browsers import picture
from support.hub_with_proxy import need_proxy
from support.jupyter_env import eventually
from support.notebook import card
from support.ports import free_ports

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PORTS = ("PORT", "HUB_PORT", "PROXY_PORT", "SERVICE_PORT")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[str]:
    """Run what ``make hub`` runs; give its address."""
    need_proxy()
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    path = [str(Path(sys.executable).parent), str(ROOT / "node_modules/.bin"), os.environ["PATH"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPU_POOL_")}
    environment |= {**ports, "PATH": os.pathsep.join(path), "GPU_POOL_DEVICES": "V100-SXM2-32GB:1"}
    log = tmp_path / "log"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jupyterhub"),
            *("-f", str(ROOT / "examples/jupyterhub/jupyterhub_config.py")),
            cwd=tmp_path,
            env=environment,
            stdout=written,
            stderr=written,
        )

    async def runs() -> bool:
        assert process.returncode is None, log.read_text()
        return "JupyterHub is now running" in log.read_text()

    try:
        await eventually(runs)
        yield f"http://127.0.0.1:{ports['PORT']}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def visit(browser: Browser, hub: str, user: str, where: str) -> Page:
    """Log in as one of the four and go there."""
    page = await (await browser.new_context(viewport={"width": 1100, "height": 700})).new_page()
    page.set_default_timeout(60_000)
    await page.goto(f"{hub}{where}")
    await page.locator("#username_input").fill(user)
    await page.locator("#password_input").fill("gpu")
    await page.locator("#login_submit").click()
    await page.wait_for_url(f"**{where}*")
    return page


async def until_idle(page: Page, kernel: str) -> None:
    """Wait until the page shows that its kernel is idle; load it anew, as a student would, if it does not.

    Twice in long runs a page went on to show *Starting* of a kernel that had answered. Why is
    not known; Jupyter Server's own question to a kernel (``nudge``) may have taken the status.
    """
    idle = page.get_by_text(f"{kernel} | Idle")
    try:
        await expect(idle).to_be_visible(timeout=120_000)
    except AssertionError:
        await page.reload()
        await expect(idle).to_be_visible()


async def teach(browser: Browser, hub: str) -> None:
    """Add a slice to the course as its instructor, and wait until a student is offered it."""
    instructor = await visit(browser, hub, "turing", "/services/gpu-pool/courses/intro")
    await instructor.get_by_role("link", name="Edit").click()
    text = instructor.locator("#text")
    before = await text.input_value()
    more = "  - name: Medium\n    request: 5%\n  - name: Elastic\n    request: 2%..10%\n  - name: Large"
    await text.fill(before.replace("  - name: Large", more))
    await instructor.get_by_role("button", name="Save", exact=True).click()
    await expect(instructor.locator(".said")).to_contain_text("in force from now on")
    student = await visit(browser, hub, "grace", "/hub/spawn")

    async def is_offered() -> bool:
        await student.reload()
        return await student.get_by_text("Medium").count() > 0

    await eventually(is_offered)
    await expect(
        student.get_by_text("2% of a GPU, up to 10% of its memory while that is free")
    ).to_be_visible()
    await picture(student, "burst-spawn.png", full_page=True)
    for page in (instructor, student):
        await page.context.close()


async def test_a_class_on_the_pool(browser: Browser, hub: str) -> None:
    # The student starts a server for the course, and a kernel on 2% of the GPU.
    student = await visit(browser, hub, "ada", "/hub/spawn")
    await expect(student.get_by_text("Introduction to Machine Learning")).to_be_visible()
    await expect(student.get_by_text("Theses and projects")).to_have_count(0)
    await student.get_by_role("button", name="Start").click()
    await student.wait_for_url("**/lab**")
    await card(student, "Python 3 (GPU 2%)").click()
    await until_idle(student, "Python 3 (GPU 2%)")
    cell = student.locator(".jp-Notebook .jp-Cell.jp-mod-active .cm-content")
    await cell.click()
    await student.keyboard.type("%gpu")
    await student.keyboard.press("Shift+Enter")
    output = student.locator(".jp-OutputArea-output").first
    await expect(output).to_contain_text("655 MiB granted")
    await picture(student, "hub-notebook.png")
    await teach(browser, hub)
    # The administrator sees it, and takes it back with a reason that the student reads.
    admin = await visit(browser, hub, "hopper", "/services/gpu-pool/")
    await expect(admin.locator("#devices")).to_contain_text("intro 2%")
    await picture(admin, "hub-dashboard.png")
    await admin.locator("a", has_text="Administration").click()
    await admin.locator("#leases a", has_text="Revoke").first.click()
    await admin.get_by_label("Reason").fill("The exam begins at ten.")
    # On a simulated GPU nothing of CUDA's can be lost: the kernel lives on, and its next cell says why.
    await expect(admin.get_by_text("it lives on with its variables")).to_be_visible()
    await admin.get_by_role("button", name="Revoke this slice now").click()
    await expect(admin.locator(".said")).to_contain_text("Its kernel lives on")
    told = student.locator(".jp-OutputArea-output", has_text="The exam begins at ten.")

    async def reads_why() -> bool:
        # What stands in front of the kernel hears of it a moment later: until then a cell may still run.
        await cell.click()
        await student.keyboard.type("1 + 1")
        await student.keyboard.press("Shift+Enter")
        await expect(student.locator(".jp-InputPrompt", has_text="[*]")).to_have_count(0)
        return bool(await told.count())

    await eventually(reads_why)
    await picture(student, "hub-revoked.png")
