"""A JupyterHub of ordinary users, on a machine that is set up as docs/administrator/hibernation.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.async_api import Browser, Page, expect

from gpu_pool_provisioner.hibernation.calling import INSTALLED
from support.accounts import Machine
from support.browsers import browser, chromium, picture
from support.hibernating import python_for_users, why_no_users
from support.hub_of_accounts import begin, install, logged_in, opened, running_hub, school, turn_on
from support.jupyter_env import eventually
from support.lab_extension import extension, status, told
from support.left_kernels import cull, culler, images, output, start
from support.notebook import choose_second_of_two, run_cell

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


def running(machine: Machine, name: str, module: str = "") -> list[psutil.Process]:
    """Return the processes of a user that have not ended, or those of them that run a module of Python's."""
    (uid,) = {each.uid for each in machine.accounts if each.name == name}
    found = psutil.process_iter(["uids", "status", "cmdline"])
    theirs = [each for each in found if each.info["uids"].real == uid]
    living = [each for each in theirs if each.info["status"] != psutil.STATUS_ZOMBIE]
    return [each for each in living if not module or module in (each.info["cmdline"] or ())]


def limits(process: psutil.Process) -> list[str]:
    """Return what the system allows a process, but for core files, of which sudo lets there be none."""
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    return [line for line in lines if not line.startswith("Max core file size")]


def found(machine: Machine, name: str) -> list[dict[str, Any]]:
    """Return the kernels on disk that a user sees."""
    said = json.loads(machine.run("gpu-pool", "hibernated", "--json", user=name).stdout)
    images: list[dict[str, Any]] = said["images"]
    return images


async def test_the_culler_stops_the_servers_at_night_and_in_the_morning_each_user_goes_on(
    browser: Browser, school: Machine, culler: Path, tmp_path: Path
) -> None:
    install(school, "alice", "bob")
    # As strict as an administrator may have it.
    strict = "Defaults requiretty, use_pty, log_input, log_output, umask=0077\\nDefaults !secure_path"
    school.write("/etc/security/limits.d/test.conf", "root - nofile 512\n")
    school.type(f"printf '{strict}\\n' >> /etc/sudoers && visudo --check")
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
            (server,) = running(school, name, "jupyterhub.singleuser")
            kernels = running(school, name, "ipykernel_launcher")
            assert kernels
            for each in kernels:
                assert limits(each) == limits(server)
            await page.keyboard.press("Control+s")
            notebook = school.here(f"/home/{name}/week1.ipynb")
            await eventually(lambda notebook=notebook: "svg+xml" in notebook.read_text())
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
        await choose_second_of_two(page)
        await run_cell(page, _SHOWN, shown)
        await expect(output(page).last).to_have_text("kept: alice")
        await expect(page.locator(".jp-OutputArea-output.jp-RenderedSVG")).to_have_count(2)
        await picture(page, "continued.png")
        assert images(asleep) == 1
        # Without a click the next cell goes on.
        page = await opened(bob, hub, "bob")
        await expect(told(page, "week1.ipynb: Your kernel from today ")).to_be_visible()
        await choose_second_of_two(page)
        await run_cell(page, _SHOWN, shown)
        await expect(output(page).last).to_have_text("kept: bob")
        await expect(page.locator(".jp-OutputArea-output.jp-RenderedSVG")).to_have_count(2)
        await picture(page, "next-cell.png")
        assert images(asleep) == 0


async def goes_to_disk(page: Page) -> None:
    """Return once the kernel of a page is on disk."""
    await expect(status(page)).to_have_text("asleep")


async def test_a_hub_that_restarts_and_a_server_that_is_killed_leave_what_sleeps(
    browser: Browser, school: Machine, tmp_path: Path
) -> None:
    install(school, "alice", "bob")
    config = turn_on(school, "c.GPUPoolProvisioner.hibernate_after = 1\n")
    config += "c.JupyterHub.cleanup_servers = False\nc.Spawner.poll_interval = 1\n"
    async with running_hub(school, tmp_path / "hub", config) as hub:
        try:
            shown = await begin(school, hub, "alice")
            async with logged_in(browser, hub, "alice") as alice:
                page = await opened(alice, hub, "alice")
                await run_cell(page, "kept = 42; print('kept:', kept)", shown)
                await expect(output(page)).to_have_text("kept: 42")
                await goes_to_disk(page)
                await page.close()
                await hub.end()
                (server,) = running(school, "alice", "jupyterhub.singleuser")
                await hub.start()
                page = await opened(alice, hub, "alice")
                await goes_to_disk(page)
                await run_cell(page, "print('kept:', kept + 1)", shown)
                await expect(output(page).last).to_have_text("kept: 43")
                await goes_to_disk(page)
                await page.close()
                server.kill()
                server.wait(60)
                await eventually(
                    lambda: hub.api("GET", "users/alice"), lambda seen: not json.loads(seen.body)["servers"]
                )
                assert not running(school, "alice")
                await start(hub, "alice")
                page = await opened(alice, hub, "alice")
                toast = told(page, "Your kernel from today ")
                await toast.get_by_role("button", name="Continue").click()
                await expect(toast).to_have_count(0)
                await run_cell(page, "print('kept:', kept + 2)", shown)
                await expect(output(page).last).to_have_text("kept: 44")
        finally:
            await hub.api("DELETE", "users/alice/server")
            await eventually(lambda: not running(school, "alice"))


async def test_whose_kernel_is_too_large_reads_why_and_a_removed_users_kernel_is_roots_to_remove(
    browser: Browser, school: Machine, culler: Path, tmp_path: Path
) -> None:
    install(school, "alice", "bob")
    settings = school.here("/etc/gpu-pool/hibernation.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "user_mib": 300}))
    config = turn_on(school, "c.GPUPoolProvisioner.hibernate_after = 1\n")
    async with running_hub(school, tmp_path / "hub", config) as hub:
        shown = await begin(school, hub, "alice")
        async with logged_in(browser, hub, "alice") as alice:
            page = await opened(alice, hub, "alice")
            await run_cell(page, "large = bytearray(400 << 20); print('kept:', len(large))", shown)
            await expect(output(page)).to_have_text(f"kept: {400 << 20}")
            await eventually(lambda: "A kernel was not written to disk" in hub.log)
            await run_cell(page, "print('kept:', 1)", shown)
            await expect(page.locator(".jp-Notebook")).to_contain_text(
                re.compile(
                    r"stayed awake: its image may take \d+ MiB, and of the 300 MiB that your kernels may"
                )
            )
            await picture(page, "too-large.png")
            await page.close()
        await begin(school, hub, "bob")
        async with logged_in(browser, hub, "bob") as bob:
            page = await opened(bob, hub, "bob")
            await run_cell(page, "kept = 42; print('kept:', kept)", shown)
            await goes_to_disk(page)
            await page.close()
        await cull(hub, culler, "alice", "bob")
        assert "The kernel of week1.ipynb ends with this server. This kernel was idle" in hub.log
        (uid,) = {each.uid for each in school.accounts if each.name == "bob"}
        school.run("userdel", "--remove", "bob")
        (image,) = found(school, "root")
        assert (image["user"], image["kernel"].partition(":")[0]) == (str(uid), "week1.ipynb")
        assert "week1.ipynb" in school.run("gpu-pool", "hibernated", "--remove", image["id"]).stdout
        assert found(school, "root") == []


async def test_without_the_program_kernels_end_with_their_server_and_it_is_said_what_is_missing(
    browser: Browser, school: Machine, culler: Path, tmp_path: Path
) -> None:
    async with (
        running_hub(school, tmp_path / "hub", turn_on(school)) as hub,
        logged_in(browser, hub, "alice") as alice,
    ):
        shown = await begin(school, hub, "alice")
        page = await opened(alice, hub, "alice")
        await run_cell(page, "kept = 42; print('kept:', kept)", shown)
        await expect(output(page)).to_have_text("kept: 42")
        await status(page).click()
        await picture(page, "without-the-program.png")
        assert hub.log.count(f"there is no {INSTALLED}") == 1
        await page.close()
        await cull(hub, culler, "alice")
        await start(hub, "alice")
        page = await opened(alice, hub, "alice")
        await run_cell(page, "print('kept:', 'kept' in globals())", shown)
        await expect(output(page)).to_have_text("kept: False")


def doctor(machine: Machine, name: str) -> str:
    """Return what the doctor says to a user of whether kernels sleep; where they can, of the disk as well."""
    said = machine.run("gpu-pool", "doctor", "--hibernation", "criu", "--json", user=name, check=False)
    checks = json.loads(said.stdout)["checks"]
    return "\n".join(f"{check['state']}: {check['text']}" for check in checks)


def test_the_doctor_says_to_each_user_what_is_missing_and_that_suffices(school: Machine) -> None:
    said = doctor(school, "alice")
    assert said.startswith(f"broken: kernels do not sleep on disk (hibernate_after): there is no {INSTALLED}")
    turn_on(school)
    assert (
        f"there is no {INSTALLED}"
        in school.run("gpu-pool", "doctor", "--json", user="alice", check=False).stdout
    )
    school.type(said.partition("to disk: ")[2])
    said = doctor(school, "alice")
    assert "sudo says: sudo: a password is required" in said
    line = said.partition("gpu-pool-hibernation: ")[2].partition(";")[0]
    school.write("/etc/sudoers.d/gpu-pool-hibernation", f"{line}\n", 0o440)
    school.type("groupadd --system gpu-pool")
    assert doctor(school, "bob").endswith("usermod --append --groups gpu-pool bob")
    school.type(said.partition("in that group: ")[2])
    can, disk = doctor(school, "alice").splitlines()
    assert can.startswith(f"ok: kernels can sleep on disk, by {INSTALLED} (CRIU ")
    assert ": 0 kernels sleep there (0MiB), " in disk
    with school.here("/etc/sudoers").open("a") as file:
        file.write("Defaults requiretty, use_pty\n")
    said = doctor(school, "alice")
    assert "you must have a tty" in said
    with school.here("/etc/sudoers.d/gpu-pool-hibernation").open("a") as file:
        file.write(said.partition("gpu-pool-hibernation: ")[2] + "\n")
    assert doctor(school, "alice").startswith("ok: ")
