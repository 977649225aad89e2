"""What pages do about a kernel's slice: what ``%gpu`` does, by the same code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_pool_client import LeaseState, parse_request
from gpu_pool_client._background import in_background
from support.jupyter_env import JupyterEnv, eventually
from support.slice_pages import PagesServer, cells, serving_pages

pytestmark = pytest.mark.long


async def test_a_kernel_is_kept_and_given_back_as_soon_as_it_is_idle(
    jupyter_env: JupyterEnv, course: Any
) -> None:
    course(idle_limit="15min", keep_at_most="1h")
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
        # Known once the pool has said what the kernel does with its device.
        seen = await page.sees(lambda state: state["slices"] and state["slices"][0]["gives_back_at"])
        held = seen["slices"][0]
        assert (held["state"], held["actions"]["keep"]) == ("held", {"at_most": 3600})
        assert held["gives_back_at"] == pytest.approx(held["idle_since"] + 900, abs=0.2)
        assert held["yields_at"] == pytest.approx(held["idle_since"] + 60, abs=0.2)
        said = (await pages.done(kernel_id, "keep", seconds=7200))["message"]
        assert said.startswith("This kernel keeps its GPU slice for 1h, the most that its course allows")
        kept = (await page.sees(lambda state: state["slices"][0]["kept_until"]))["slices"][0]
        assert kept["gives_back_at"] == kept["kept_until"]
        async with cells(pages, kernel_id) as frontend:
            await frontend.run("kept = 42").done()
            at_work = frontend.run("import time; time.sleep(3)")
            await page.sees_slice(idle_since=None)
            assert "its variables are kept" in (await pages.done(kernel_id, "give-back"))["message"]
            asked = await page.sees_slice(asked_back=True)
            assert asked["state"] == "held"
            await at_work.done()
            parked = await page.sees_slice(state="parked", asked_back=False)
            assert parked["given_back"]
            assert parked["message"] == "You gave this kernel's GPU slice back; its variables are kept."
            assert set(parked["actions"]) == {"resume"}
            assert "has it as soon as it is free" in (await pages.done(kernel_id, "resume"))["message"]
            await page.sees_slice(state="held", given_back=False)
            assert (await frontend.run("print(kept)").done()).outputs == ["42\n"]
            await page.sees_slice(state="held")


async def test_a_kernel_without_limits_gives_its_slice_back_too(jupyter_env: JupyterEnv, course: Any) -> None:
    course(yield_after="never")
    name, held = jupyter_env.install("all", "1"), await jupyter_env.fill("1")
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", name)
        await page.sees_slice(state="waiting")
        await jupyter_env.pool.release(held.id)
        await page.sees_slice(state="held")
        assert "however long it is idle" in (await pages.done(kernel_id, "keep", seconds=60))["message"]
        async with cells(pages, kernel_id) as frontend:
            await frontend.run("kept = 42").done()
            await pages.done(kernel_id, "give-back")
            await page.sees_slice(state="parked")
            other = await jupyter_env.fill("1")
            assert other.state is LeaseState.HELD
            await jupyter_env.pool.release(other.id)
            assert (await frontend.run("print(kept)").done()).outputs == ["42\n"]


async def test_the_size_changes_at_once_and_the_kernel_knows(jupyter_env: JupyterEnv, course: Any) -> None:
    course(idle_limit="15min")
    jupyter_env.install("ten", "10%")
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
        found = await page.sees(
            lambda state: "resize" in state["slices"][0]["actions"] if state["slices"] else False
        )
        assert found["slices"][0]["actions"]["resize"] == {"sizes": ["10%"], "keeps_variables": True}
        async with cells(pages, kernel_id) as frontend:
            await frontend.run("import os; kept = 42").done()
            changed = await pages.done(kernel_id, "resize", size="10%")
            assert (changed["granted"], changed["at_restart"]) == (True, False)
            code = "print(kept, os.environ['GPU_POOL_SLICE'], os.environ['GPU_POOL_MEMORY_MIB'])"
            assert (await frontend.run(code).done()).outputs == ["42 10% 3276\n"]
            await page.sees_slice(size="10%")
            refused = await pages.done(kernel_id, "resize", size="2x50%")
            assert refused["granted"] is False
            working = frontend.run("import time; time.sleep(3)")
            await page.sees_slice(idle_since=None)
            busy = await pages.post(kernel_id, "resize", size="2%")
            assert busy.code == 409
            assert "while it runs a cell" in json.loads(busy.body)["message"]
            # Nothing that runs has to know of what may be used on top.
            changed = await pages.done(kernel_id, "resize", size="10%..50%")
            assert changed == {
                "granted": True,
                "at_restart": False,
                "message": "This kernel now has 10% of a GPU, up to 50%.",
            }
            await page.sees_slice(size="10%..50%")
            assert (await working.done()).status == "ok"


async def test_a_restart_brings_another_size(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    jupyter_env.install("ten", "10%")
    async with pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
        await page.sees(lambda state: state["slices"] and "restart" in state["slices"][0]["actions"])
        never = await pages.post(kernel_id, "resize", size="8", at_restart=True)
        assert never.code == 422, never.body
        done = await pages.done(kernel_id, "resize", size="10%", at_restart=True)
        kept = "10% is kept for this kernel for a minute. Restart the kernel: it then changes to 10%."
        assert done == {"granted": True, "at_restart": True, "message": kept}
        await page.sees_slice(state="held", size="2%", pending_size="10%")
        # Nobody else can have it meanwhile.
        assert await _has(jupyter_env, 100)
        await pages.ask("POST", f"api/kernels/{kernel_id}/restart", {})
        await page.sees_slice(state="held", size="10%", pending_size=None)
        async with cells(pages, kernel_id) as frontend:
            cell = frontend.run("import os; print(os.environ['GPU_POOL_SLICE'])")
            assert (await cell.done()).outputs == ["10%\n"]
        # Where it is not free, it is not granted, and nothing needs to be restarted.
        await jupyter_env.fill("80%")
        refused = await pages.done(kernel_id, "resize", size="50%", at_restart=True)
        assert refused["granted"] is False
        words = (
            "it keeps 10% of a GPU and all its variables. At this moment it could have up to 20% of a GPU."
        )
        assert words in refused["message"]
        await page.sees_slice(state="held", size="10%", pending_size=None)
        # Whatever it has done with its device.
        await pages.done(kernel_id, "resize", size="20%", at_restart=True)
        assert await _has(jupyter_env, 1000)
        await pages.ask("POST", f"api/kernels/{kernel_id}/restart", {})
        await page.sees_slice(state="held", size="20%", pending_size=None)


async def test_what_is_kept_for_a_restart_is_given_up_without_one(jupyter_env: JupyterEnv) -> None:
    driver = await jupyter_env.asking()
    await in_background(driver.pool_work.reserve(parse_request("1"), None, 0.05))
    assert await _has(jupyter_env, 1000)
    await eventually(lambda: _has(jupyter_env, 20))
    assert driver.session.pending is None
    assert driver.session.lease_id is not None
    await jupyter_env.pool.release(driver.session.lease_id)


async def test_one_that_waits_asks_for_less(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    jupyter_env.install("ten", "10%")
    await jupyter_env.fill("80%")
    async with pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("half", "50%"))
        await page.sees(lambda state: state["slices"] and "resize" in state["slices"][0]["actions"])
        assert (await pages.done(kernel_id, "resize", size="10%"))["granted"]
        await page.sees_slice(state="held", size="10%")
        await eventually(lambda: _has(jupyter_env, 900))


async def _has(jupyter_env: JupyterEnv, milli: int) -> bool:
    return sum(each.held_milli for each in (await jupyter_env.pool.status()).devices) == milli
