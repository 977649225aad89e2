"""How a kernel is, as pages are told: JupyterLab from 4.5 on, and the server's own list of kernels."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from jupyter_client.session import Session
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from tornado.websocket import WebSocketClientConnection

from support.jupyter_env import JupyterEnv, eventually
from support.server import Server, server

__all__ = ["server"]

#: JupyterLab is told of them in its PageConfig, and takes no note of the state in their answers.
if not hasattr(MappingKernelManager, "untracked_message_types"):
    pytest.skip("this Jupyter Server tells pages of no message types to leave out", allow_module_level=True)
UNTRACKED = frozenset(MappingKernelManager.untracked_message_types.default_args[0])

#: What a notebook asks when it is opened.
HISTORY = {"hist_access_type": "tail", "n": 1, "output": False, "raw": True}


class Page:
    """What a page of JupyterLab makes of a kernel's messages."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._session = Session()
        self._replies: dict[str, dict[str, Any]] = {}
        #: The states that it has shown, in order.
        self.shown = ["unknown"]

    async def listen(self) -> None:
        while (text := await self._socket.read_message()) is not None:
            message = json.loads(text)
            parent = message["parent_header"]
            if message["channel"] != "iopub":
                self._replies[parent["msg_id"]] = message["content"]
            elif message["msg_type"] == "status" and parent.get("msg_type") not in UNTRACKED:
                self.shown.append(message["content"]["execution_state"])

    async def submit(self, kind: str, **content: Any) -> str:
        message = {**self._session.msg(kind, content), "channel": "shell", "buffers": []}
        await self._socket.write_message(json.dumps(message, default=str))
        return str(message["header"]["msg_id"])

    async def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return the content of the answer."""
        request = await self.submit(kind, **content)
        await eventually(lambda: request in self._replies)
        return self._replies[request]

    async def is_of_the_kernel(self) -> bool:
        """Whether it is the kernel itself that answers."""
        return bool((await self.ask("kernel_info_request"))["implementation"] == "ipython")

    async def shows(self, state: str) -> None:
        await eventually(lambda: self.shown[-1] == state)


@asynccontextmanager
async def page(server: Server, kernel_id: str) -> AsyncIterator[Page]:
    """Open a kernel in a page, which asks it who it is, and has been answered."""
    socket = await server.connect(f"api/kernels/{kernel_id}/channels?session_id={uuid.uuid4().hex}")
    page = Page(socket)
    listening = asyncio.create_task(page.listen())
    try:
        await page.ask("kernel_info_request")
        yield page
    finally:
        socket.close()
        await listening


async def _opened(server: Server, kernel: str) -> str:
    """Return the id of a notebook's kernel."""
    session = json.loads((await server.open_notebook("one.ipynb", kernel)).body)
    return str(session["kernel"]["id"])


async def _listed(server: Server, kernel_id: str) -> str:
    """Return how the kernel is by the server's list."""
    return str(json.loads((await server.ask("GET", f"api/kernels/{kernel_id}")).body)["execution_state"])


async def test_a_waiting_kernel_is_idle_and_does_not_start_when_its_slice_comes(
    jupyter_env: JupyterEnv, server: Server
) -> None:
    held = await jupyter_env.fill("1")
    kernel_id = await _opened(server, jupyter_env.install("two"))
    async with page(server, kernel_id) as first:
        await first.shows("idle")
        assert await _listed(server, kernel_id) == "idle"
        await jupyter_env.pool.release(held.id)
        await eventually(first.is_of_the_kernel)
        await first.ask("history_request", **HISTORY)
        await first.shows("idle")
        assert "starting" not in first.shown
        assert await _listed(server, kernel_id) == "idle"


@pytest.mark.long
async def test_a_kernel_whose_cell_waits_is_busy_whoever_connects_and_whatever_is_asked(
    jupyter_env: JupyterEnv, server: Server
) -> None:
    await jupyter_env.fill("1")
    kernel_id = await _opened(server, jupyter_env.install("two"))
    async with page(server, kernel_id) as first:
        await first.submit("execute_request", code="1", silent=False)
        await first.shows("busy")
        async with page(server, kernel_id) as second:
            await second.shows("busy")
            await second.ask("history_request", **HISTORY)
            await second.shows("busy")
            await first.shows("busy")
            assert await _listed(server, kernel_id) == "busy"
        await server.ask("POST", f"api/kernels/{kernel_id}/interrupt", {})
        await first.shows("idle")
        assert await _listed(server, kernel_id) == "idle"
