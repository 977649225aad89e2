"""A student of a Hub: its page, a server of their own, and notebooks on it, as a browser asks for them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tornado.httpclient import HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, websocket_connect

from support.frontend import Cell
from support.hub_with_proxy import Visitor, error_on
from support.jupyter_env import eventually

#: Seconds in which a pod is there, on two cores that have other things to do.
LONG = 300


#: Logs somebody in by name.
Visit = Callable[[str], Awaitable["Student"]]


class Student(Visitor):
    """Somebody who takes a course."""

    async def start_server(self, choice: str) -> None:
        """Choose on the Hub's page, and wait until the server shows JupyterLab."""
        answer = await self.choose(course=choice)
        assert answer.code == 302, error_on(answer) or answer.body.decode()
        await eventually(
            lambda: self.open(f"/user/{self.name}/lab"),
            lambda seen: "jupyter-config-data" in seen.body.decode(),
            within=LONG,
        )

    async def stop_server(self) -> None:
        """Stop it, if there is one, as the Hub's page does, and wait until it is gone."""
        await self.get("/hub/home")
        await self.call("DELETE", f"/hub/api/users/{self.name}/server")
        await eventually(
            lambda: self.call("GET", f"/hub/api/users/{self.name}"),
            lambda seen: not json.loads(seen.body)["servers"],
            within=LONG,
        )

    async def open(self, path: str) -> HTTPResponse:
        """Open a page, wherever it leads."""
        answer = await self.get(path)
        for _ in range(20):
            if answer.code != 302:
                return answer
            path = answer.headers["Location"].removeprefix(self._url)
            answer = await self.get(path)
        raise AssertionError(f"{path} leads nowhere")

    async def kernels(self) -> dict[str, str]:
        """Return the kernels that the launcher offers: names that are shown, and those that are asked for."""
        found = json.loads((await self._server("GET", "kernelspecs")).body)["kernelspecs"]
        return {spec["spec"]["display_name"]: name for name, spec in found.items()}

    async def files(self) -> list[str]:
        """Return the names of the files in their home."""
        found = json.loads((await self._server("GET", "contents")).body)["content"]
        return [each["name"] for each in found]

    async def write(self, name: str, text: str) -> None:
        """Write a file into their home."""
        about = {"type": "file", "format": "text", "content": text}
        assert (await self._server("PUT", f"contents/{name}", about)).code == 201

    @asynccontextmanager
    async def notebook(self, kernel: str) -> AsyncIterator[Notebook]:
        """Open a notebook on a kernel that the launcher shows by this name; shut it down in the end."""
        name = (await self.kernels())[kernel]
        path = f"{uuid.uuid4().hex}.ipynb"
        about = {"path": path, "name": path, "type": "notebook", "kernel": {"name": name}}
        answer = await self._server("POST", "sessions", about)
        assert answer.code == 201, answer.body.decode()
        made = json.loads(answer.body)
        try:
            async with self._page(made["kernel"]["id"]) as page:
                yield page
        finally:
            assert (await self._server("DELETE", f"sessions/{made['id']}")).code == 204

    async def restart(self, page: Notebook) -> None:
        """Restart a notebook's kernel, as the button of its page does."""
        answer = await self._server("POST", f"kernels/{page.kernel}/restart", {})
        assert answer.code == 200, answer.body.decode()

    @asynccontextmanager
    async def again(self, page: Notebook) -> AsyncIterator[Notebook]:
        """Connect to a notebook's kernel once more, as its page does when it has lost the connection."""
        async with self._page(page.kernel) as connected:
            yield connected

    @asynccontextmanager
    async def _page(self, kernel: str) -> AsyncIterator[Notebook]:
        where = f"/user/{self.name}/api/kernels/{kernel}/channels"
        cookies = "; ".join(f"{key}={value}" for key, value in self.cookies(where).items())
        address = self._url.replace("http", "ws", 1) + where
        connection = await websocket_connect(HTTPRequest(address, headers={"Cookie": cookies}))
        page = Notebook(kernel, connection)
        listening = asyncio.create_task(page.listen())
        try:
            yield page
        finally:
            page.close()
            await listening

    async def _server(self, method: str, path: str, body: object = None) -> HTTPResponse:
        return await self.call(method, f"/user/{self.name}/api/{path}", body)

    async def call(self, method: str, path: str, body: object = None) -> HTTPResponse:
        """Ask as a page's script does."""
        headers = {"X-XSRFToken": self.cookies(path)["_xsrf"], "Sec-Fetch-Mode": "cors"}
        headers["Content-Type"] = "application/json"
        return await self._ask(method, path, None if body is None else json.dumps(body), **headers)


class Notebook:
    """A notebook in a browser."""

    def __init__(self, kernel: str, connection: WebSocketClientConnection) -> None:
        self.kernel = kernel
        self._connection, self._session = connection, uuid.uuid4().hex
        self._cells: dict[str, Cell] = {}

    def run(self, code: str) -> Cell:
        """Run a cell."""
        name = uuid.uuid4().hex
        cell = self._cells[name] = Cell(name)
        header = {"msg_id": name, "msg_type": "execute_request", "session": self._session, "username": "s"}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        message: dict[str, Any] = {
            "channel": "shell",
            "header": {**header, "version": "5.3", "date": "2026-01-01T00:00:00Z"},
            "parent_header": {},
            "metadata": {},
            "content": {**content, "allow_stdin": False, "stop_on_error": True},
        }
        self._connection.write_message(json.dumps(message))
        return cell

    async def prints(self, code: str) -> str:
        """Return what a cell prints."""
        return "".join((await self.run(code).done(within=LONG)).outputs)

    async def listen(self) -> None:
        """Sort what comes by the cells."""
        while (text := await self._connection.read_message()) is not None:
            message = json.loads(text)
            cell = self._cells.get(message["parent_header"].get("msg_id", ""))
            if cell is None:
                continue
            if message["channel"] == "iopub":
                cell.heard.append(message)
            elif message["channel"] == "shell":
                cell.reply = message

    def close(self) -> None:
        """Close the page."""
        self._connection.close()
