"""The dashboard behind a real JupyterHub: a browser logs in there, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from gpu_pool_client import Holder, Process, connect, parse_request
from support.front import front
from support.hub import ADMIN, PREFIX, Hub, serving_hub
from support.service import ForkServer

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]
COURSE = "title: Machine Learning\ninstructors: [ada]\nslices: [{name: Part, request: 20%}]\n"


async def log_in(page: Page, address: str, user: str) -> None:
    await page.goto(f"{address}{PREFIX}")
    await page.locator("#username_input").fill(user)
    await page.locator("#password_input").fill("any")
    await page.locator("#login_submit").click()
    await expect(page.locator("h1")).to_have_text("GPUs")


async def test_a_student_and_an_administrator_log_in_at_the_hub(
    browser: Browser, children: ForkServer, hub: Hub, tmp_path: Path
) -> None:
    courses = tmp_path / "courses"
    courses.mkdir()
    (courses / "ml.yaml").write_text(COURSE)
    settings = f"c.PoolSettings.courses_dir = {str(courses)!r}\n"
    async with (
        serving_hub(children, hub, tmp_path / "pool", settings) as served,
        front(hub.port, hub.service_port, PREFIX) as address,
        connect(served.service.url) as pool,
    ):
        # Who runs the service holds it: over the socket this is the user of these tests.
        lease = await pool.request(parse_request("20%"), Holder("", "ml", "train.py"), "key")
        await pool.attach(lease.id, Process.current())
        student, admin = [await (await browser.new_context()).new_page() for _ in range(2)]
        await log_in(student, address, "ada")
        await expect(student.locator("#devices")).to_contain_text("ml 20%, 6.4 GiB, 1 slice")
        await expect(student.locator("#liveness")).to_have_text("Live.")
        await expect(student.get_by_text("Administration")).to_have_count(0)
        await log_in(admin, address, ADMIN)
        await admin.get_by_role("link", name="Administration").click()
        await admin.get_by_role("button", name="Drain GPU 0").click()
        await expect(admin.locator(".said")).to_contain_text("being drained")
        await expect(student.locator("#devices")).to_contain_text("Drained by an administrator")
        await admin.locator("#leases a", has_text="Revoke").click()
        await admin.get_by_label("Reason").fill("The exam begins at ten.")
        await admin.get_by_role("button", name="Revoke this slice").click()
        await expect(student.locator("#devices")).not_to_contain_text("ml 20%")
        await admin.get_by_role("link", name="History").click()
        await expect(admin.locator("table").last).to_contain_text("The exam begins at ten.")
