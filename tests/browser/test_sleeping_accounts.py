"""A JupyterHub of ordinary users, on a machine that is set up as docs/administrator/hibernation.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from gpu_pool_provisioner.hibernation.calling import INSTALLED
from support.accounts import Machine
from support.browsers import browser, chromium, picture
from support.hibernating import python_for_users, why_no_users
from support.hub_of_accounts import begin, install, logged_in, opened, running_hub, school, turn_on
from support.lab_extension import extension, status, told
from support.left_kernels import cull, culler, images, output, start
from support.notebook import choose_cell, run_cell
from support.pools import until

__all__ = ["browser", "chromium", "culler", "extension", "school"]

_WHY = why_no_users() or python_for_users()
pytestmark = [
    pytest.mark.hibernation,
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("extension"),
    pytest.mark.skipif(bool(_WHY), reason=f"no user can: {_WHY}"),
]
#: Keeps a variable and a figure, and shows both; shows them again.
_DRAWN = (
    "from IPython.display import SVG, display; kept = '{name}'; "
    """figure = SVG('<svg width="50" height="50"><circle cx="25" cy="25" r="20"/></svg>'); """
    "print('kept:', kept); display(figure)"
)
_SHOWN = "print('kept:', kept); display(figure)"
HELD = "2% · 655 MiB"


def found(machine: Machine, name: str) -> list[dict[str, Any]]:
    """Return the kernels on disk that a user sees."""
    said = json.loads(machine.run("gpu-pool", "hibernated", "--json", user=name).stdout)
    images: list[dict[str, Any]] = said["images"]
    return images


async def test_the_culler_stops_the_servers_at_night_and_in_the_morning_each_user_goes_on(
    browser: Browser, school: Machine, culler: Path, tmp_path: Path
) -> None:
    install(school, "alice", "bob")
    asleep = school.here("/var/lib/gpu-pool/asleep")
    async with (
        running_hub(school, tmp_path / "hub", turn_on(school)) as hub,
        logged_in(browser, hub, "alice") as alice,
        logged_in(browser, hub, "bob") as bob,
    ):
        people = {"alice": alice, "bob": bob}
        for name, context in people.items():
            shown = await begin(school, hub, name)
            page = await opened(context, hub, name)
            await run_cell(page, _DRAWN.format(name=name), shown)
            await expect(output(page)).to_have_text(f"kept: {name}")
            await page.keyboard.press("Control+s")
            notebook = school.here(f"/home/{name}/week1.ipynb")
            await until(lambda notebook=notebook: "svg+xml" in notebook.read_text())
            await page.close()
        await cull(hub, culler, *people)
        assert images(asleep) == 2, hub.log
        ids = {name: [each["id"] for each in found(school, name)] for name in people}
        for name, other in (("alice", "bob"), ("bob", "alice")):
            assert [each["user"] for each in found(school, name)] == [name]
            refused = school.run(
                "sudo", "-n", INSTALLED, "restore", *ids[other], user=name, check=False, given="{}\n"
            )
            assert "no such kernel of yours" in json.loads(refused.stdout)["error"]
            removed = school.run("gpu-pool", "hibernated", "--remove", *ids[other], user=name, check=False)
            assert removed.returncode
        for name in people:
            await start(hub, name)
        page = await opened(alice, hub, "alice")
        toast = told(page, "week1.ipynb: Your kernel from today ")
        await expect(status(page)).to_have_text("asleep")
        await picture(page, "morning.png")
        await toast.get_by_role("button", name="Continue").click()
        await expect(status(page)).to_have_text(HELD)
        await expect(toast).to_have_count(0)
        await choose_cell(page, 2, of=2)
        await run_cell(page, _SHOWN, shown)
        await expect(output(page).last).to_have_text("kept: alice")
        await expect(page.locator(".jp-OutputArea-output.jp-RenderedSVG")).to_have_count(2)
        await picture(page, "continued.png")
        assert images(asleep) == 1
        # Without a click the next cell goes on.
        page = await opened(bob, hub, "bob")
        await expect(told(page, "week1.ipynb: Your kernel from today ")).to_be_visible()
        await choose_cell(page, 2, of=2)
        await run_cell(page, _SHOWN, shown)
        await expect(output(page).last).to_have_text("kept: bob")
        await expect(page.locator(".jp-OutputArea-output.jp-RenderedSVG")).to_have_count(2)
        await picture(page, "next-cell.png")
        assert images(asleep) == 0
