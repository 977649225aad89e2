"""What pages of a Jupyter server are told of its kernels' slices."""

from __future__ import annotations

from support.jupyter_env import JupyterEnv
from support.slice_pages import PagesServer


async def test_a_page_sees_a_kernels_slice_come_and_go(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    name = jupyter_env.install("Python 3 (GPU 2%)")
    assert await pages.state() == {"slices": [], "pools": []}
    async with pages.page() as page:
        await page.sees(lambda state: state == {"slices": [], "pools": []})
        kernel_id = await pages.start("one.ipynb", name)
        slice_ = await page.sees_slice(state="held", notebook="one.ipynb")
        assert slice_["kernel_id"] == kernel_id
        print(slice_)
        await page.sees(lambda state: state["pools"][0]["simulated"])
        print(page.last)
        await pages.ask("DELETE", f"api/kernels/{kernel_id}")
        await page.sees(lambda state: not state["slices"])
        print(len(page.states))


async def test_a_page_sees_a_kernel_wait_and_get_its_slice(
    jupyter_env: JupyterEnv, pages: PagesServer
) -> None:
    name, held = jupyter_env.install("all", "1"), await jupyter_env.fill("1")
    async with pages.page() as page:
        await pages.start("one.ipynb", name)
        waiting = await page.sees_slice(state="waiting", position=1)
        assert list(waiting["actions"]) == ["leave-queue"]
        await page.sees(lambda state: state["slices"][0]["message"])
        print(page.last)
        await jupyter_env.pool.release(held.id)
        await page.sees_slice(state="held", position=None)
        print(page.last, [s["slices"][0]["state"] for s in page.states if s["slices"]])
