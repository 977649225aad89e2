"""Servers without anything of ours, servers of several users, and pages that read slowly."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from traitlets.config import Config

from gpu_pool_provisioner.server import handlers
from gpu_pool_provisioner.server.slices import Listener, Slices
from support.jupyter_env import JupyterEnv
from support.service import ForkServer, serving
from support.slice_pages import PagesServer, serving_pages

#: Prints which parts of ours a server has loaded once its pages have asked for everything.
_LOADED = """
import asyncio, json, sys
from types import SimpleNamespace
from jupyter_client.kernelspec import KernelSpecManager
from gpu_pool_provisioner import _jupyter_server_extension_points
import importlib
extension = importlib.import_module(_jupyter_server_extension_points()[0]["module"])
added = []
app = SimpleNamespace(settings={"base_url": "/"}, add_handlers=lambda host, rules: added.extend(rules))
loop = SimpleNamespace(add_callback=lambda *_: None)
contents = SimpleNamespace(register_pre_save_hook=lambda hook: None)
server = SimpleNamespace(
    web_app=app, io_loop=loop, kernel_spec_manager=KernelSpecManager(), contents_manager=contents,
    kernel_manager=SimpleNamespace(shutdown_all=None), _signal_stop=lambda *_: None,
)
extension._load_jupyter_server_extension(server)
pages = added[0][2]["pages"]
assert asyncio.run(pages.slices()) is None
print(*sorted(name for name in sys.modules if name.startswith(("gpu_pool", "pydantic"))))
"""


def test_a_server_without_kernels_of_ours_loads_next_to_nothing(jupyter_env: JupyterEnv) -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "gpu_pool_provisioner",
        "gpu_pool_provisioner.jupyter_files",
        "gpu_pool_provisioner.server",
        "gpu_pool_provisioner.server.extension",
        "gpu_pool_provisioner.server.handlers",
    ]


async def test_pages_that_could_not_be_loaded_are_when_asked_again(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    jupyter_env.install("two")
    pages = handlers.Pages(SimpleNamespace(kernel_spec_manager=KernelSpecManager(), config=Config()))
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, Slices.__module__, None)
        with pytest.raises(ImportError):
            await pages.slices()
    found = await pages.slices()
    assert isinstance(found, Slices)
    assert await pages.slices() is found


async def test_a_page_that_reads_slowly_is_told_the_newest_state_only() -> None:
    listener = Listener()
    for number in range(1000):
        listener.tell(str(number))
    assert await listener.next() == "999"
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(listener.next(), 0.01)


@pytest.mark.long
async def test_two_users_servers_of_one_pool_see_their_own_kernels_alone(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(children, jupyter_env.folder / "service") as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        name = jupyter_env.install("two")
        users = [_of_user(jupyter_env, monkeypatch, user) for user in ("ada", "ben")]
        async with users[0] as ada, users[1] as ben:
            assert ("/user/ada/" in ada.url, "/user/ben/" in ben.url) == (True, True)
            hers = await ada.start("one.ipynb", name)
            his = await ben.start("one.ipynb", name)
            async with ada.page() as page, ben.page() as other:
                assert (await page.sees_slice(state="held"))["kernel_id"] == hers
                assert (await other.sees_slice(state="held"))["kernel_id"] == his
                assert len(page.last["slices"]) == len(other.last["slices"]) == 1
            answer = await ben.post(hers, "give-back")
            assert answer.code == 404
            assert json.loads(answer.body)["advice"]


@asynccontextmanager
async def _of_user(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch, user: str
) -> AsyncIterator[PagesServer]:
    """Run a server behind a base URL, as a JupyterHub starts it, with folders of its own."""
    folder = jupyter_env.folder / user
    folder.mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder / "config"))
    own = JupyterEnv(folder, jupyter_env.url)
    config = {**PagesServer.ENABLED, "base_url": f"/user/{user}/"}
    async with serving_pages(own, ServerApp=config) as server:
        yield server
