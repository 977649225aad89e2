"""Cullers and kernels that wait: a submitted cell is work, but not for ever; a kernel without one is idle."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

from gpu_pool_client._background import in_background
from gpu_pool_provisioner.proxy import pending
from gpu_pool_provisioner.session import session
from support.frontend import Cell, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.server import Server, server
from support.suites import required

__all__ = ["server"]

#: Seconds after which the cullers of these tests take what does nothing for idle.
IDLE = 5
_CONFIG = """
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.proxy import pending
from gpu_pool_provisioner.session import session
session.SOON = pending.SHOWN_EVERY = 0.2
pending.COUNTS_FOR = {counts}
c.MappingKernelManager.cull_idle_timeout = {idle}
c.MappingKernelManager.cull_interval = 1
c.MappingKernelManager.cull_busy = {busy}
"""


@pytest.fixture
def culling(request: pytest.FixtureRequest, jupyter_env: JupyterEnv) -> None:
    """Let the server cull soon, and waiting cells count for work for so many seconds."""
    counts, busy = request.param
    folder = jupyter_env.folder / "config"
    folder.mkdir(exist_ok=True)
    text = _CONFIG.format(counts=counts, busy=busy, idle=IDLE)
    (folder / "jupyter_server_config.py").write_text(text)


async def submit(server: Server, kernel: str) -> tuple[str, AsyncKernelClient]:
    """Submit a cell to a new kernel by nobody's page; return the kernel's id."""
    session = await server.open_notebook("one.ipynb", kernel)
    client = server.client_of(session)
    client.start_channels(hb=False)
    client.execute("1")
    return json.loads(session.body)["kernel"]["id"], client


async def active_at(server: Server, path: str) -> datetime | None:
    """Return when a kernel, or the server, was last active; None if it is gone."""
    answer = await server.ask("GET", path, strict=False)
    return datetime.fromisoformat(json.loads(answer.body)["last_activity"]) if answer.code == 200 else None


async def outlasts(server: Server, path: str) -> None:
    """Return once it has been active for longer than a culler lets anything be idle."""
    first = await active_at(server, path)
    assert first is not None

    async def is_so() -> bool:
        now = await active_at(server, path)
        assert now is not None, "it was culled"
        return (now - first).total_seconds() > 1.5 * IDLE

    await eventually(is_so)


@pytest.mark.long
@pytest.mark.parametrize("culling", [(4 * IDLE, True)], indirect=True)
async def test_a_server_culls_a_kernel_whose_cell_waits_once_nobody_was_there_for_long(
    jupyter_env: JupyterEnv, culling: None, server: Server
) -> None:
    await jupyter_env.fill("1")
    kernel, client = await submit(server, jupyter_env.install("two"))
    await eventually(jupyter_env.has_queue)
    await outlasts(server, f"api/kernels/{kernel}")
    assert await jupyter_env.has_queue()
    await eventually(lambda: active_at(server, f"api/kernels/{kernel}"), lambda seen: seen is None)
    client.stop_channels()
    assert not await jupyter_env.has_queue()


@pytest.mark.long
@pytest.mark.parametrize("culling", [(3600, False)], indirect=True)
async def test_a_kernel_without_a_cell_is_idle_in_the_queue_too(
    jupyter_env: JupyterEnv, culling: None, server: Server
) -> None:
    await jupyter_env.fill("1")
    session = await server.open_notebook("one.ipynb", jupyter_env.install("two"))
    assert await jupyter_env.has_queue()
    kernel = json.loads(session.body)["kernel"]["id"]
    await eventually(lambda: active_at(server, f"api/kernels/{kernel}"), lambda seen: seen is None)
    assert not await jupyter_env.has_queue()


class Hub:
    """What jupyterhub-idle-culler asks of a Hub: one user, whose server is a real one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ended: list[str] = []
        hub = self

        class Users(RequestHandler):
            async def get(self) -> None:
                now = await active_at(hub._server, "api/status")
                assert now is not None
                active = now.isoformat()
                known = {"pending": None, "last_activity": active, "started": active, "created": active}
                servers = {"": {**known, "name": "", "ready": True, "url": "/user/ada/"}}
                self.finish(json.dumps([{**known, "name": "ada", "admin": False, "servers": servers}]))

        class Version(RequestHandler):
            def get(self) -> None:
                self.finish({"version": "5.4.0"})

        class UserServer(RequestHandler):
            def delete(self, name: str) -> None:
                hub.ended.append(name)
                self.set_status(204)

        listener, self.port = bind_unused_port()
        addresses = ("/", Version), ("/users", Users), ("/users/([^/]+)/server", UserServer)
        self._http = HTTPServer(Application(list(addresses)))
        self._http.add_socket(listener)

    def close(self) -> None:
        self._http.stop()


@pytest.fixture
def culler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the real idle culler's round."""
    assert request.config.cache is not None
    monkeypatch.syspath_prepend(str(required(["jupyterhub-idle-culler"], request.config.cache)))
    module = pytest.importorskip("jupyterhub_idle_culler")
    return module.cull_idle


@pytest.mark.long
@pytest.mark.parametrize("culling", [(4 * IDLE, False)], indirect=True)
async def test_the_idle_culler_ends_a_server_whose_cell_waits_once_nobody_was_there_for_long(
    jupyter_env: JupyterEnv, culling: None, server: Server, culler: Any
) -> None:
    await jupyter_env.fill("1")
    kernel, client = await submit(server, jupyter_env.install("two"))
    await eventually(jupyter_env.has_queue)
    hub, log = Hub(server), logging.getLogger("culler")

    async def is_culled() -> bool:
        await culler(f"http://127.0.0.1:{hub.port}", "token", IDLE, log)
        return hub.ended == ["ada"]

    await outlasts(server, "api/status")
    assert not await is_culled()
    await eventually(is_culled)
    # A busy kernel is left alone by its server: ending the server is what ends the wait.
    assert await active_at(server, f"api/kernels/{kernel}") is not None
    assert await jupyter_env.has_queue()
    hub.close()
    client.stop_channels()


async def test_a_wait_is_shown_again_and_again_until_nobody_was_heard_for_long(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SOON", 0.05)
    monkeypatch.setattr(pending, "SHOWN_EVERY", 0.0)
    await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("two"))) as (km, user):
        cell = user.run("1")
        await eventually(lambda: cell.kinds().count("update_display_data") > 1)
        (text,) = set(cell.outputs)
        assert "Waiting for a GPU slice" in text
        monkeypatch.setattr(pending, "COUNTS_FOR", -1.0)
        waiting = km.provisioner.driver._do.pending
        await in_background(show(waiting, "Nobody reads this."))
        monkeypatch.setattr(pending, "COUNTS_FOR", 3600.0)
        await cell.shows("Waiting for a GPU slice")
        await in_background(show(waiting, "Somebody reads this."))
        await eventually(lambda: said(cell, "Somebody reads this."))
        assert not await said(cell, "Nobody reads this.")


async def show(waiting: pending.PendingKernel, text: str) -> None:
    waiting.show(text)


async def said(cell: Cell, text: str) -> bool:
    return any(text in str(message["content"]) for message in cell.heard)
