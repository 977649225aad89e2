"""Frontends that listen for heartbeats hear them from the start, however busy what stands in front is."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient

from gpu_pool_client._background import background_loop
from gpu_pool_provisioner.proxy import channels
from support.frontend import frontend, listening
from support.jupyter_env import IPYKERNEL, WRAP, JupyterEnv, Managers, started_kernel
from support.ports import write_connection

#: Milliseconds in which a heart beats, on any machine.
TIMEOUT = 60_000
#: Imports of the pool itself wait until somebody writes to the pipe.
SLOW_IMPORT = """\
import sys

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "gpu_pool":
            sys.meta_path.remove(Slow)
            open({pipe!r}).close()

sys.meta_path.insert(0, Slow)
"""


def beats(connection: Mapping[str, Any]) -> bool:
    """Whether a heartbeat is answered."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{connection['ip']}:{connection['hb_port']}")
        socket.send(b"ping")
        return bool(socket.poll(TIMEOUT)) and socket.recv() == b"ping"


@contextmanager
def busy(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Keep what runs on a loop from going on."""
    done, begun = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (begun.set(), done.wait()))
    assert begun.wait(60)
    try:
        yield
    finally:
        done.set()


async def test_a_kernel_lives_while_the_thread_of_the_kernels_is_busy(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    km = await started_kernel(manager(jupyter_env.install("two")))
    with busy(background_loop()):
        assert beats(km.get_connection_info())  # which waits
    async with frontend(km) as page:
        cell = page.run("1 + 1")
        await cell.shows("Waiting")
        await jupyter_env.pool.release(held.id)
        await cell.done()
        with busy(background_loop()):
            assert beats(km.get_connection_info())  # which runs
    await km.shutdown_kernel()


def client_of(file: str) -> AsyncKernelClient:
    client = AsyncKernelClient(connection_file=file)
    client.load_connection_file()
    return client


@asynccontextmanager
async def wrapper(file: str, **environment: str) -> AsyncIterator[AsyncKernelClient]:
    """Run a kernel behind a wrapper; yield a client that is not connected yet."""
    words = [word.format(connection_file=file) for word in (*WRAP, "--slice", "2%", "--", *IPYKERNEL)]
    process = await asyncio.create_subprocess_exec(*words, env={**os.environ, **environment})
    try:
        yield client_of(file)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def test_a_wrapper_lives_while_it_loads_the_pool_and_keeps_what_is_submitted(
    jupyter_env: JupyterEnv, tmp_path: Path
) -> None:
    file, _ = write_connection(tmp_path / "kernel-1.json")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_IMPORT.format(pipe=str(pipe)))
    async with wrapper(file, PYTHONPATH=str(tmp_path / "slow")) as client:
        assert await asyncio.to_thread(beats, client.get_connection_info())
        early = client_of(file)
        early.start_channels(iopub=False, stdin=False, hb=False, control=False)
        request = early.kernel_info()
        await asyncio.to_thread(pipe.write_text, "")
        while (await early.get_shell_msg(timeout=120))["parent_header"]["msg_id"] != request:
            pass
        early.stop_channels()
        async with listening(client) as page:
            assert (await page.run("print('well')").done()).outputs == ["well\n"]


@contextmanager
def heart() -> Iterator[channels.HeartbeatChannel]:
    """Listen for heartbeats on a port of this machine."""
    with zmq.Context() as context:
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind_to_random_port("tcp://127.0.0.1")
        channel = channels.HeartbeatChannel(socket, channels.ignore)
        try:
            yield channel
        finally:
            channel.close()
            assert socket.closed


def test_a_forked_child_that_closes_heartbeats_goes_on() -> None:
    with heart() as channel:
        child = os.fork()
        if child == 0:
            # Whoever waits for a thread that is not in the child does so for ever, and not for seconds.
            threading.Thread(target=lambda: (channel.close(3_600), os._exit(0)), daemon=True).start()
            threading.Event().wait(TIMEOUT / 1000)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_heartbeats_does_not_wait_for_ever() -> None:
    with heart() as channel, busy(background_loop("heartbeats")):
        channel.close(0.1)
