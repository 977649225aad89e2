"""All that goes through the relay, once a kernel that waited runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import DELIM, Session

from gpu_pool_provisioner.proxy.channels import close_all, connect_back, ignore
from gpu_pool_provisioner.proxy.relay import Relay
from support.frontend import Cell, Frontend, frontend, page_of
from support.jupyter_env import TINY, JupyterEnv, Managers, eventually, started_kernel

_KINDS = {"shell": zmq.ROUTER, "control": zmq.ROUTER, "stdin": zmq.ROUTER, "hb": zmq.REP, "iopub": zmq.XPUB}


@pytest.fixture
async def waiting(jupyter_env: JupyterEnv, manager: Managers) -> AsyncKernelManager:
    """A kernel that waits until ``open_up`` frees its slice."""
    await jupyter_env.fill("1")
    return await started_kernel(manager(jupyter_env.install("two")))


@pytest.fixture
async def page(waiting: AsyncKernelManager) -> AsyncIterator[Frontend]:
    async with frontend(waiting) as page:
        yield page


async def open_up(jupyter_env: JupyterEnv) -> None:
    await jupyter_env.pool.release((await jupyter_env.only_lease()).id)


async def test_input(jupyter_env: JupyterEnv, page: Frontend) -> None:
    cell = page.run("print(input('what? '))", allow_stdin=True)
    await open_up(jupyter_env)
    assert (await cell.done()).outputs == ["an answer\n"]
    assert page.questions == ["what? "]


async def test_input_to_a_kernel_that_listens_for_it_late(jupyter_env: JupyterEnv, manager: Managers) -> None:
    held = await jupyter_env.fill("1")
    async with page_of(manager(jupyter_env.install("tiny", argv=TINY, language="tiny"))) as (_, page):
        cell = page.run("ask", allow_stdin=True)
        await jupyter_env.pool.release(held.id)
        assert (await cell.done()).outputs == ["AN ANSWER on 2%"]


async def test_a_page_is_welcomed_once_whatever_the_kernel_does(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("tiny", argv=TINY, language="tiny")))
    client = km.client()
    client.start_channels(hb=False)
    try:
        heard: list[dict[str, Any]] = []
        asked = client.execute("well")
        while not heard or not ends(heard[-1], asked):
            heard.append(await client.get_iopub_msg(timeout=60))
    finally:
        client.stop_channels()
    assert [each["msg_type"] for each in heard].count("iopub_welcome") == 1
    assert None not in [each["parent_header"] for each in heard]


def ends(message: dict[str, Any], asked: str) -> bool:
    """Whether a message says that the kernel is done with a request."""
    parent = message["parent_header"] or {}
    return bool(message["content"].get("execution_state") == "idle" and parent.get("msg_id") == asked)


async def test_the_debugger(jupyter_env: JupyterEnv, page: Frontend) -> None:
    content = {"type": "request", "command": "debugInfo", "seq": 1, "arguments": {}}
    asked = page.ask("debug_request", content, "control")
    await open_up(jupyter_env)
    reply = (await asked.done()).reply
    assert reply is not None
    assert reply["content"]["command"] == "debugInfo"
    assert reply["content"]["success"]


async def test_comms_that_are_opened_while_waiting(jupyter_env: JupyterEnv, page: Frontend) -> None:
    opened = page.ask("comm_open", {"comm_id": "one", "target_name": "nobody's", "data": {}})
    await open_up(jupyter_env)
    await eventually(lambda: "comm_close" in opened.kinds())


async def test_what_frontends_ask_meanwhile_is_answered_at_once(page: Frontend) -> None:
    asked = [
        page.ask("comm_info_request", {}),
        page.ask("complete_request", {"code": "pri", "cursor_pos": 3}),
        page.ask("inspect_request", {"code": "print", "cursor_pos": 3, "detail_level": 0}),
        page.ask("is_complete_request", {"code": "if"}),
    ]
    assert [(await each.done()).status for each in asked] == ["ok", "ok", "ok", "unknown"]


async def test_two_frontends(jupyter_env: JupyterEnv, waiting: AsyncKernelManager, page: Frontend) -> None:
    async with frontend(waiting) as other:
        mine = page.run("a = 1; print('mine')")
        await mine.shows("Waiting")
        theirs = other.run("print('theirs', a)")
        await open_up(jupyter_env)
        assert (await mine.done()).outputs == ["mine\n"]
        assert (await theirs.done()).outputs == ["theirs 1\n"]
        await eventually(lambda: theirs.id in page.cells and page.cells[theirs.id].outputs == ["theirs 1\n"])
        assert page.cells[theirs.id].reply is None


async def test_a_page_that_is_reloaded(jupyter_env: JupyterEnv, waiting: AsyncKernelManager) -> None:
    async with frontend(waiting, "the page") as page:
        await page.run("kept = 5").shows("Waiting")
        async with frontend(waiting, "the page") as reloaded:
            cell = reloaded.run("print(kept)")
            await open_up(jupyter_env)
            await cell.shows("5")
            assert (await cell.done()).outputs == ["5\n"]


async def test_large_output_arrives_intact(jupyter_env: JupyterEnv, page: Frontend) -> None:
    cell = page.run(
        "import random, hashlib\n"
        "text = format(random.getrandbits(80_000_000), 'x')\n"
        "display({'text/plain': text}, raw=True); print(hashlib.sha256(text.encode()).hexdigest())"
    )
    await open_up(jupyter_env)
    text, digest = (await cell.done()).outputs
    assert len(text) > 19_000_000
    assert hashlib.sha256(text.encode()).hexdigest() == digest.strip()


async def test_an_interrupt_reaches_the_running_kernel(
    jupyter_env: JupyterEnv, waiting: AsyncKernelManager, page: Frontend
) -> None:
    cell = page.run("print('begun', flush=True)\nimport time; time.sleep(600)")
    await open_up(jupyter_env)
    await cell.shows("begun")
    await waiting.interrupt_kernel()
    await cell.done()
    assert "KeyboardInterrupt" in cell.outputs[-1]


async def test_code_without_a_signature_is_not_waited_for(
    jupyter_env: JupyterEnv, waiting: AsyncKernelManager, page: Frontend
) -> None:
    await open_up(jupyter_env)
    await page.run("1").done()
    relay = waiting.provisioner.driver._do.run.relay
    header = json.dumps({"msg_id": "a stranger's", "msg_type": "execute_request"}).encode()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{waiting.shell_port}")
        stranger.send_multipart([DELIM, b"no signature", header, b"{}", b"{}", b'{"code": "1"}'])
        # What is answered tells that what was sent before it has come, too.
        stranger.send_multipart(waiting.session.serialize(waiting.session.msg("kernel_info_request", {})))
        assert await asyncio.to_thread(stranger.poll, 30_000)
    assert relay.unanswered() == []
    cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
    await cell.shows("begun")
    assert len(relay.unanswered()) == 1
    await waiting.interrupt_kernel()
    await cell.done()
    assert relay.unanswered() == []


async def test_transport_encryption(jupyter_env: JupyterEnv, manager: Managers) -> None:
    if not hasattr(AsyncKernelManager, "transport_encryption"):
        pytest.skip("this jupyter_client has no transport encryption")
    await jupyter_env.fill("1")
    name = jupyter_env.install("secret", metadata={"supported_encryption": ["curve"]})
    async with page_of(manager(name, transport_encryption="required")) as (km, page):
        cell: Cell = page.run("print('secret')")
        await cell.shows("Waiting")
        await open_up(jupyter_env)
        assert (await cell.done()).outputs == ["secret\n"]
    assert km.get_connection_info()["curve_publickey"]


async def test_the_relay_sees_who_works(
    jupyter_env: JupyterEnv, waiting: AsyncKernelManager, page: Frontend
) -> None:
    cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
    assert page.run("", silent=True)
    await open_up(jupyter_env)
    await cell.shows("begun")
    relay = waiting.provisioner.driver._do.run.relay
    began = relay.last_activity
    assert relay.busy
    assert began is not None
    await waiting.interrupt_kernel()
    await cell.done()
    await eventually(lambda: not relay.busy)
    assert relay.last_activity > began


async def test_connections_that_are_closed_stop_no_other(tmp_path: Path) -> None:
    connection = {"transport": "ipc", "ip": str(tmp_path / "kernel")}
    connection |= {f"{channel}_port": port for port, channel in enumerate(_KINDS, 1)}
    heard: list[str] = []

    def on_event(channel: str, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            heard.append(channel)

    with zmq.Context() as kernel:
        for _ in range(150):
            bound = [kernel.socket(kind) for kind in _KINDS.values()]
            for port, socket in enumerate(bound, 1):
                socket.bind(f"ipc://{tmp_path}/kernel-{port}")
            heard.clear()
            back = connect_back(connection, dict.fromkeys(_KINDS, ignore), on_event)
            await eventually(lambda: len(heard) == 4)
            # Both ends at the same time, as where a kernel and its connections are ended together.
            for socket in bound:
                socket.close(linger=0)
            close_all(back)


async def test_the_last_answer_of_a_kernel_that_ends_before_it_is_read_is_passed_on() -> None:
    """On TCP, where a connection that is lost is not made again."""
    sent: list[list[zmq.Frame]] = []
    front = {channel: SimpleNamespace(send=sent.append) for channel in _KINDS}
    with zmq.Context() as kernel:
        bound = {channel: kernel.socket(kind) for channel, kind in _KINDS.items()}
        ports = {
            f"{channel}_port": bound[channel].bind_to_random_port("tcp://127.0.0.1") for channel in _KINDS
        }
        relay = Relay({"transport": "tcp", "ip": "127.0.0.1", **ports}, Session(key=b""), front, once=_KINDS)
        try:
            relay.begin()
            relay.pass_on("control", [zmq.Frame(b"asked")])
            # From here on the relay reads nothing until the kernel has ended.
            bound["control"].send_multipart([*bound["control"].recv_multipart()[:1], b"answered"])
            for socket in bound.values():
                socket.close(linger=60_000)
            kernel.term()
            while any(
                each.raddr and each.raddr.port in ports.values()
                for each in psutil.Process().net_connections()
            ):
                pass
            await relay.read_last(within=60)
            assert [[bytes(frame) for frame in frames] for frames in sent] == [[b"answered"]]
        finally:
            relay.close()


@pytest.mark.parametrize("is_told_before", [True, False])
async def test_what_hinders_a_kernel_is_told_below_the_cell_that_does_not_begin(is_told_before: bool) -> None:
    sent: list[list[bytes]] = []
    front = {channel: SimpleNamespace(send=sent.append) for channel in _KINDS}
    session = Session(key=b"secret")
    with zmq.Context() as kernel:
        bound = {channel: kernel.socket(kind) for channel, kind in _KINDS.items()}
        ports = {
            f"{channel}_port": bound[channel].bind_to_random_port("tcp://127.0.0.1") for channel in _KINDS
        }
        relay = Relay({"transport": "tcp", "ip": "127.0.0.1", **ports}, session, front)
        try:
            cell = session.msg("execute_request", {"code": "1"})
            told = [lambda: relay.tell("Its machine does not answer."), lambda: submit(cell)]

            def submit(message: dict[str, Any]) -> None:
                relay.pass_on("shell", [zmq.Frame(each) for each in session.serialize(message, b"page")])

            for each in told if is_told_before else reversed(told):
                each()
            [frames] = sent
            _, parts = session.feed_identities(frames)
            message = session.deserialize(parts)
            assert message["content"] == {"name": "stderr", "text": "Its machine does not answer.\n"}
            assert message["parent_header"]["msg_id"] == cell["header"]["msg_id"]
            submit(session.msg("execute_request", {"code": "2"}))
            assert len(sent) == 1  # once
        finally:
            relay.close()
            for socket in bound.values():
                socket.close(linger=0)
