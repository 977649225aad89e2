"""A frontend as a notebook page is one: it submits cells, and keeps what each of them shows."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session

from support.jupyter_env import eventually

Message = dict[str, Any]


class Cell:
    """What became of one request."""

    def __init__(self, request: str) -> None:
        self.id = request
        #: What came on iopub for it, in order.
        self.heard: list[Message] = []
        self.reply: Message | None = None

    def kinds(self) -> list[str]:
        return [message["msg_type"] for message in self.heard]

    @property
    def outputs(self) -> list[str]:
        """What a notebook would show and save: displays are updated in place, and cleared when asked.

        Text of one stream is one output until another comes, as in a notebook: a busy kernel sends a
        printed line in two messages.
        """
        shown: dict[str, str] = {}
        for number, message in enumerate(self.heard):
            content, kind = message["content"], message["msg_type"]
            name = content.get("transient", {}).get("display_id", str(number))
            if kind == "clear_output":
                shown.clear()
            elif kind == "display_data" or (kind == "update_display_data" and name in shown):
                shown[name] = content["data"]["text/plain"]
            elif kind == "stream":
                last, stream = next(reversed(shown), ""), f"{content['name']} "
                name = last if last.startswith(stream) else stream + name
                shown[name] = shown.get(name, "") + content["text"]
            elif kind == "error":
                shown[name] = f"{content['ename']}: {content['evalue']}"
        return list(shown.values())

    @property
    def status(self) -> str | None:
        return self.reply["content"]["status"] if self.reply else None

    async def shows(self, words: str) -> None:
        """Wait until its output contains these words, wherever its lines break."""
        await eventually(lambda: words in " ".join("".join(self.outputs).split()))

    async def done(self, within: float = 120) -> Cell:
        """Wait until it is answered and idle."""

        async def is_done() -> bool:
            states = [m["content"].get("execution_state") for m in self.heard if m["msg_type"] == "status"]
            return self.reply is not None and states[-1:] == ["idle"]

        try:
            await eventually(is_done, within=within)
        except AssertionError as error:
            heard = [(m["msg_type"], m["content"].get("execution_state", "")) for m in self.heard]
            raise AssertionError(f"no end of the request: {self.status=}, {heard=}") from error
        return self


class Frontend:
    """One page that is connected to a kernel."""

    def __init__(self, client: AsyncKernelClient) -> None:
        self.client = client
        self.cells: dict[str, Cell] = {}
        self.questions: list[str] = []

    def run(self, code: str, **options: Any) -> Cell:
        """Submit code."""
        return self._expect(self.client.execute(code, **options))

    def ask(self, kind: str, content: Message, channel: str = "shell") -> Cell:
        """Send any request."""
        message = self.client.session.msg(kind, content)
        getattr(self.client, f"{channel}_channel").send(message)
        return self._expect(message["header"]["msg_id"])

    async def is_connected(self) -> None:
        """Wait until the kernel answers this page and is heard by it, as pages wait after a restart.

        A page connects to each socket of a new kernel by itself, so it may miss output of a cell that it
        has sent before.
        """
        while True:
            with suppress(AssertionError):
                await self.ask("kernel_info_request", {}).done(within=1)
                return

    def _expect(self, request: str) -> Cell:
        return self.cells.setdefault(request, Cell(request))

    async def listen(self, channel: str) -> None:
        """Sort what comes on one channel by the cells."""
        while True:
            try:
                message = await getattr(self.client, f"{channel}_channel").get_msg(timeout=1)
            except Empty:
                continue
            cell = self._expect(message["parent_header"].get("msg_id", ""))
            if channel == "iopub":
                cell.heard.append(message)
            elif message["msg_type"] == "input_request":
                self.questions.append(message["content"]["prompt"])
                self.client.input("an answer")
            else:
                cell.reply = message


async def printed(page: Frontend, code: str) -> str:
    """Run a cell, and return all that it shows."""
    return "".join((await page.run(code).done()).outputs)


@asynccontextmanager
async def frontend(manager: AsyncKernelManager, session: str = "") -> AsyncIterator[Frontend]:
    """Connect a frontend, wait until the kernel answers it, and disconnect it in the end."""
    # Of its own, as pages have them: a client's address at the kernel is its session.
    name = session or uuid.uuid4().hex
    own = Session(session=name, key=manager.session.key, signature_scheme=manager.session.signature_scheme)
    async with listening(manager.client(session=own)) as page:
        yield page


@asynccontextmanager
async def page_of(
    manager: AsyncKernelManager, **options: Any
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Start a kernel, and connect a frontend to it."""
    await manager.start_kernel(**options)
    async with frontend(manager) as page:
        yield manager, page


@asynccontextmanager
async def listening(client: AsyncKernelClient) -> AsyncIterator[Frontend]:
    """Make a client a frontend; see :func:`frontend`."""
    page = Frontend(client)
    # One that knows no manager takes a kernel for dead after a second without heartbeat; machines are slow.
    client.hb_channel.time_to_dead = 60
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    tasks = [asyncio.create_task(page.listen(name)) for name in ("shell", "iopub", "stdin", "control")]
    try:
        yield page
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.stop_channels()
