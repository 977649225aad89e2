"""What the pages of a server cost a pool that is served, and what they are told where it is away or hangs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time

import pytest

from gpu_pool_client._remote.exchange import ask
from support.jupyter_env import JupyterEnv
from support.service import ForkServer, Service, serving
from support.slice_pages import Page, cells, serving_pages

pytestmark = pytest.mark.long

_PAGES = 200
#: What the watch of a server asks; see the label of the service's own counter.
_WATCHES = ("status", "activity")


async def _answered(service: Service, *handlers: str) -> int:
    """Return how many requests a service has answered."""
    text = (await ask(service.socket, "GET", "/metrics", None, 60)).body.decode()
    counted = r'^gpu_pool_requests_total\{outcome="[^"]*",request="([^"]*)"\} ([0-9.]+)'
    found = re.findall(counted, text, re.MULTILINE)
    assert found, text
    return sum(int(float(number)) for name, number in found if not handlers or name in handlers)


async def test_two_hundred_pages_cost_a_pool_one_watch(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    async with serving(children, jupyter_env.folder / "service") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with serving_pages(jupyter_env) as pages:
            await pages.start("one.ipynb", jupyter_env.install("two"))
            connections = [await pages.connect() for _ in range(_PAGES)]
            listeners = [Page() for _ in connections]
            hearing = [asyncio.create_task(p.listen(c)) for p, c in zip(listeners, connections, strict=True)]
            for each in listeners:
                await each.sees_slice(state="held")
            before, began = await _answered(service, *_WATCHES), time.monotonic()
            # Long enough for several looks, by whoever looks.
            while await _answered(service, *_WATCHES) < before + 6:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.5)
            looks = await _answered(service, *_WATCHES) - before
            # Each look asks for the status and for one kernel's memory, every 5 seconds at most.
            assert looks <= 2 * ((time.monotonic() - began) / 5 + 2)
            for each in connections:
                each.close()
            await asyncio.gather(*hearing)


async def test_a_pool_that_is_away_is_told_as_such_and_everything_goes_on(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(children, jupyter_env.folder / "service") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        other = f"embedded:{jupyter_env.folder}/pool/store.db"
        async with serving_pages(jupyter_env) as pages, pages.page() as page:
            served = await pages.start("one.ipynb", jupyter_env.install("served"))
            await pages.start("two.ipynb", jupyter_env.install("own", pool_url=other))
            await _reachable(page, service.url, True)
            await page.sees(lambda state: {each["state"] for each in state["slices"]} == {"held"})
            await service.end(signal.SIGKILL)
            await _reachable(page, service.url, False)
            assert page.last["pools"][0] == {
                "url": other,
                "reachable": True,
                "simulated": True,
                "message": "",
            }
            # What was seen last stays, and the kernel works on.
            assert {each["state"] for each in page.last["slices"]} == {"held"}
            async with cells(pages, served) as frontend:
                assert (await frontend.run("a = 42; print(a)").done()).outputs == ["42\n"]
                # A restart for another size would lose its variables, and the size cannot change.
                refused = await pages.post(served, "resize", size="10%", at_restart=True)
                assert refused.code == 503, refused.body
                assert (await frontend.run("print(a)").done()).outputs == ["42\n"]
            await service.start()
            await _reachable(page, service.url, True)


async def test_a_pool_that_hangs_holds_up_neither_the_server_nor_another_pool(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(children, jupyter_env.folder / "service") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        other = f"embedded:{jupyter_env.folder}/pool/store.db"
        async with serving_pages(jupyter_env) as pages, pages.page() as page:
            jupyter_env.install("served")
            await pages.start("one.ipynb", "served")
            await _reachable(page, service.url, True)
            assert service.process is not None
            os.kill(service.process.pid, signal.SIGSTOP)
            try:
                name = jupyter_env.install("own", pool_url=other)
                kernel_id = await pages.start("two.ipynb", name)
                await page.sees(lambda state: any(each["kernel_name"] == name for each in state["slices"]))
                await page.sees_slice(kernel_name=name, state="held")
                offers = json.loads((await pages.ask("GET", "gpu-pool/api/offers")).body)
                assert offers["kernels"][name]["free_now"] == 49
                assert offers["kernels"]["served"]["free_now"] is None
                assert "does not answer" in offers["message"]
                await _reachable(page, service.url, False)
                assert "its variables are kept" in (await pages.done(kernel_id, "give-back"))["message"]
            finally:
                os.kill(service.process.pid, signal.SIGCONT)
            await _reachable(page, service.url, True)


async def _reachable(page: Page, url: str, wanted: bool) -> None:
    await page.sees(
        lambda state: any(each["url"] == url and each["reachable"] is wanted for each in state["pools"])
    )


async def test_a_slice_that_an_administrator_takes_back_says_so(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(children, jupyter_env.folder / "service") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with serving_pages(jupyter_env) as pages, pages.page() as page:
            await pages.start("one.ipynb", jupyter_env.install("two"))
            await page.sees_slice(state="held")
            (lease,) = (await _service_pool(service)).leases
            await ask(service.socket, "DELETE", f"/api/v1/leases/{lease.id}", None, 60)
            over = await page.sees_slice(state="none")
            assert over["end_reason"] in ("revoked", "released")
            assert "its GPU slice is over" in over["end_message"]


async def _service_pool(service: Service):  # type: ignore[no-untyped-def]
    from gpu_pool_client import connect

    async with connect(service.url) as pool:
        return await pool.status()
