"""What pages of a Jupyter server are told of its kernels' slices, and when."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from gpu_pool_client import EndReason
from support.jupyter_env import JupyterEnv, eventually
from support.slice_pages import PagesServer, cells, serving_pages

NOTHING = {"slices": [], "pools": []}


async def test_a_page_sees_a_kernel_wait_get_its_slice_and_go(
    jupyter_env: JupyterEnv, pages: PagesServer
) -> None:
    assert await pages.state() == NOTHING
    # Its kernel is not ready before it may: a page that reads slowly hears of the newest state alone.
    startup, may = jupyter_env.folder / "ipython/profile_default/startup", jupyter_env.folder / "may"
    startup.mkdir(parents=True)
    waits = f"import os, time\nwhile not os.path.exists({str(may)!r}): time.sleep(0.01)\n"
    (startup / "00-waits.py").write_text(waits)
    name, held = jupyter_env.install("Python 3 (GPU  2%)"), await jupyter_env.fill("1")
    async with pages.page() as page:
        await page.sees(lambda state: state == NOTHING)
        kernel_id = await pages.start("one.ipynb", name)
        waiting = await page.sees_slice(state="waiting", position=1)
        assert (waiting["kernel_id"], waiting["kernel_name"]) == (kernel_id, name)
        assert (waiting["display_name"], waiting["size"]) == ("Python 3 (GPU 2%)", "2%")
        assert waiting["actions"]["leave-queue"] == {"keeps_variables": True}
        await page.sees(lambda state: "Nothing is free" in state["slices"][0]["message"])
        await jupyter_env.pool.release(held.id)
        await page.sees_slice(state="starting")
        may.touch()
        now = await page.sees_slice(state="held", position=None, notebook="one.ipynb")
        assert now["devices"] == [{"name": "V100-SXM2-32GB", "simulated": True}]
        assert now["memory"] == {
            "granted_mib": 655,
            "allowed_mib": None,
            "limit_mib": None,
            "used_mib": None,
            "strength": "none",
            "by": "accounting only",
        }
        assert now["compute"]["share"] == "2%"
        assert now["held_at"] >= now["requested_at"]
        await page.sees(lambda state: state["pools"][0]["simulated"] and state["pools"][0]["reachable"])
        assert (await pages.state())["slices"][0]["state"] == "held"
        await pages.ask("DELETE", f"api/kernels/{kernel_id}")
        await page.sees(lambda state: state == NOTHING)
    phases = [state["slices"][0]["state"] for state in page.states if state["slices"]]
    assert [each for each in dict.fromkeys(phases) if each != "asking"] == ["waiting", "starting", "held"]


@pytest.mark.parametrize("terms", [{}, pytest.param({"idle_limit": "1h"}, marks=pytest.mark.long)])
async def test_a_waiting_cell_names_the_idle_kernel_of_ones_own(
    jupyter_env: JupyterEnv, course: Any, terms: dict[str, str]
) -> None:
    course(**terms)
    async with serving_pages(jupyter_env) as pages:
        first = await pages.start("one.ipynb", jupyter_env.install("half", "50%"))
        async with cells(pages, first) as frontend:
            await frontend.run("1").done()
        second = await pages.start("two.ipynb", jupyter_env.install("all", "1"))
        async with cells(pages, second) as frontend:
            cell = frontend.run("print(6 * 7)")
            await cell.shows("Of your own idle kernels, one.ipynb holds a GPU slice of 50%: give that back")
            await pages.ask("DELETE", f"api/kernels/{first}")
            assert (await cell.done()).outputs == ["42\n"]


@pytest.mark.long
async def test_a_kernel_whose_slice_nobody_takes_back_can_give_it_back_and_keeps_its_variables(
    jupyter_env: JupyterEnv, pages: PagesServer
) -> None:
    kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
    async with pages.page() as page:
        # Until the server has looked at what the kernel does with its device, it promises nothing.
        kept = {"keeps_variables": True, "shuts_down": False}
        await page.sees(lambda state: state["slices"][0]["actions"].get("give-back") == kept)
        # The server knows from what a kernel publishes that it is idle, and may listen later than it starts.
        async with cells(pages, kernel_id) as frontend:
            await frontend.run("1").done()
        await page.sees(lambda state: state["slices"][0]["idle_since"])
        refused = await pages.post(kernel_id, "leave-queue")
        assert refused.code == 409
        assert "its variables are kept" in (await pages.done(kernel_id, "give-back"))["message"]
        parked = await page.sees_slice(state="parked")
        assert set(parked["actions"]) >= {"resume"}
    await eventually(jupyter_env.is_parked)


@pytest.mark.long
async def test_a_page_sees_a_kernel_parked_and_back(jupyter_env: JupyterEnv, course: Any) -> None:
    course(idle_limit="1s")
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("all", "1"))
        parked = await page.sees_slice(state="parked")
        assert "lent to others" in parked["message"]
        assert (parked["devices"], parked["memory"]["granted_mib"]) == ([], 0)
        other = await jupyter_env.fill("1")
        async with cells(pages, kernel_id) as frontend:
            cell = frontend.run("print(6 * 7)")
            resuming = await page.sees_slice(state="resuming", position=1)
            assert resuming["actions"] == {"leave-queue": {"keeps_variables": True}}
            await pages.done(kernel_id, "leave-queue")
            assert "You stopped waiting" in (await cell.done()).outputs[0]
            await page.sees_slice(state="parked")
            cell = frontend.run("print(6 * 7)")
            await page.sees_slice(state="resuming")
            await jupyter_env.pool.release(other.id)
            assert (await cell.done()).outputs == ["42\n"]
            held = await page.sees_slice(state="held")
            assert held["idle_limit"] == 1.0


@pytest.mark.long
async def test_why_a_slice_is_over_is_seen_by_pages_that_come_later(
    jupyter_env: JupyterEnv, course: Any
) -> None:
    course(longest_lease="15s", warn_before="1s")
    async with serving_pages(jupyter_env) as pages:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
        async with pages.page() as page:
            held = await page.sees_slice(state="held")
            assert held["ends_at"] == pytest.approx(held["held_at"] + 15)
            over = await page.sees_slice(state="none")
            assert over["end_reason"] == EndReason.TOO_LONG.value
            assert "as long as its course allows" in over["end_message"]
        async with cells(pages, kernel_id) as frontend:
            assert "as its course allows" in " ".join((await frontend.run("1").done()).outputs[0].split())
            async with pages.page() as later:
                assert (await later.sees_slice(state="none"))["end_message"] == over["end_message"]
                frontend.run("1")
                back = await later.sees_slice(state="held")
                assert (back["end_reason"], back["end_message"]) == (None, "")


@pytest.mark.long
async def test_a_wait_that_is_given_up_and_begun_again(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    name, held = jupyter_env.install("all", "1"), await jupyter_env.fill("1")
    async with pages.page() as page:
        kernel_id = await pages.start("one.ipynb", name)
        await page.sees_slice(state="waiting")
        async with cells(pages, kernel_id) as frontend:
            cell = frontend.run("1")
            await cell.shows("You are next in the queue")
            assert "You stopped waiting" in (await pages.done(kernel_id, "leave-queue"))["message"]
            assert "You stopped waiting" in (await cell.done()).outputs[0]
            gone = await page.sees_slice(state="none", end_reason=None)
            assert "You stopped waiting" in gone["message"]
            frontend.run("1")
            await page.sees_slice(state="waiting", end_message="")
            await jupyter_env.pool.release(held.id)
            await page.sees_slice(state="held")


@pytest.mark.long
async def test_a_restart_and_a_crash_are_seen(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    name, held = jupyter_env.install("all", "1"), await jupyter_env.fill("1")
    async with pages.page() as page:
        kernel_id = await pages.start("one.ipynb", name)
        await page.sees_slice(state="waiting")
        await jupyter_env.pool.release(held.id)
        await page.sees_slice(state="held")
        before = len(page.states)
        await pages.ask("POST", f"api/kernels/{kernel_id}/restart", {})
        async with cells(pages, kernel_id) as frontend:
            await frontend.run("1").done()
        assert "none" not in {state["slices"][0]["state"] for state in page.states[before:]}
        process = (await jupyter_env.only_lease()).process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        # A start may be over before the next look, so only what stays can be waited for.
        # Times are given in tenths of a second.
        killed_at = time.time() + 0.05
        back = await page.sees(lambda state: (state["slices"][0]["idle_since"] or 0) > killed_at)
        assert back["slices"][0]["state"] == "held"
        assert (await jupyter_env.only_lease()).process not in (None, process)
