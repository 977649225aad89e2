"""A size that a kernel could never have is refused at once, in the pool's words, wherever the kernel is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.frontend import Frontend
from support.jupyter_env import JupyterEnv, eventually
from support.slice_pages import PagesServer, State, cells, serving_pages

pytestmark = pytest.mark.long

#: Each with what its refusal names. The pool has one GPU of 32 GiB, and its users may have 60% of it.
NEVER = {
    "8": "this pool has one",
    "2x50%": "this pool has one",
    "40GiB": "Ask for at most 32GiB.",
    "0.1%": "Ask for at least 1.1% here.",
    "2% model=A100": "no GPU here matches that",
    "60.1%": "may hold 60% of a GPU at most",
}


@pytest.fixture
def terms(course: Any) -> None:
    """Let kernels lend their slices, and their user have 60% of a GPU."""
    course(idle_limit="15min", per_user={"share": "60%"})


async def slice_of(pages: PagesServer, kernel_id: str) -> State:
    found = (await pages.state())["slices"]
    return next(each for each in found if each["kernel_id"] == kernel_id)  # type: ignore[no-any-return]


async def refuses(pages: PagesServer, kernel_id: str, words: str = "", **asked: Any) -> None:
    """Ask for what cannot be, and see that the answer says why and that nothing has changed."""
    before = await slice_of(pages, kernel_id)
    answer = await pages.post(kernel_id, "resize", **asked)
    said = json.loads(answer.body)
    assert answer.code in {409, 422, 429} or said["granted"] is False, (asked, said)
    told = " ".join([said["message"], said.get("advice", "")])
    assert words in told, (asked, said)
    after = await slice_of(pages, kernel_id)
    for name in ("size", "pending_size", "state"):
        assert after[name] == before[name], asked


async def refuses_all(pages: PagesServer, kernel_id: str) -> None:
    for size, words in NEVER.items():
        for at_restart in (False, True):
            await refuses(pages, kernel_id, words, size=size, at_restart=at_restart)


@pytest.mark.usefixtures("terms")
async def test_a_kernel_that_runs_and_one_that_is_parked(jupyter_env: JupyterEnv) -> None:
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
        await page.sees_slice(state="held")
        await refuses_all(pages, kernel_id)
        async with cells(pages, kernel_id) as frontend:
            await said_by_gpu_use(frontend)
            working = frontend.run("import time; time.sleep(3600)")
            await page.sees_slice(idle_since=None)
            # Who asks for that need not wait for the cell's end; who asks for another does.
            await refuses(pages, kernel_id, "this pool has one", size="8")
            await refuses(pages, kernel_id, "Ask for at most 32GiB.", size="40GiB")
            await refuses(pages, kernel_id, "while it runs a cell", size="10%")
            await pages.ask("POST", f"api/kernels/{kernel_id}/interrupt", {})
            await working.done()
        await pages.done(kernel_id, "give-back")
        await page.sees_slice(state="parked")
        for size, words in NEVER.items():
            # Its slice would be asked for anew first, with the quota as it is then.
            words = "lent to others" if size == "60.1%" else words
            await refuses(pages, kernel_id, words, size=size)
            await refuses(pages, kernel_id, words, size=size, at_restart=True)
        await refuses(pages, kernel_id, "Take the slice again first", size="10%")


async def said_by_gpu_use(frontend: Frontend) -> None:
    for size, words in NEVER.items():
        told = "".join((await frontend.run(f"%gpu use {size}").done()).outputs)
        assert " ".join(words.split()) in " ".join(told.split()), size
    done = await frontend.run("import os; print(os.environ['GPU_POOL_SLICE'])").done()
    assert done.outputs == ["2%\n"]


@pytest.mark.usefixtures("terms")
async def test_a_kernel_that_waits_and_one_that_has_no_slice_yet(jupyter_env: JupyterEnv) -> None:
    await jupyter_env.fill("60%")
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("half", "50%"))
        await page.sees_slice(state="waiting")
        await refuses_all(pages, kernel_id)
        await pages.done(kernel_id, "leave-queue")
        await page.sees_slice(state="none")
        await refuses_all(pages, kernel_id)
        granted = await pages.done(kernel_id, "resize", size="30%")
        assert granted == {
            "granted": True,
            "at_restart": False,
            "message": "The next cell asks for 30% of a GPU.",
        }
        async with cells(pages, kernel_id) as frontend:
            code = "import os; print(os.environ['GPU_POOL_SLICE'])"
            assert (await frontend.run(code).done()).outputs == ["30%\n"]
        await eventually(lambda: is_held(jupyter_env, 900))


async def is_held(jupyter_env: JupyterEnv, milli: int) -> bool:
    return sum(each.held_milli for each in (await jupyter_env.pool.status()).devices) == milli
