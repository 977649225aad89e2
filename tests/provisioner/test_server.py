"""The same through a real Jupyter Server, over its REST interface."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from support.jupyter_env import JupyterEnv, eventually
from support.server import Server, server

__all__ = ["server"]


async def test_a_notebook_takes_its_slice_and_gives_it_back(jupyter_env: JupyterEnv, server: Server) -> None:
    jupyter_env.install("most", "90%", kernel_proxy=False, wait_timeout=0)
    jupyter_env.install("two")
    session = json.loads((await server.open_notebook("one.ipynb", "most")).body)
    lease = await jupyter_env.only_lease()
    assert lease.holder.process is not None
    assert lease.holder.process.pid == server.process.pid
    # By its notebook, as its user knows it, and by its kernel, as logs do.
    assert lease.holder.kernel == f"one.ipynb: most [{session['kernel']['id'][:8]}]"

    refused = await server.open_notebook("two.ipynb", "most", strict=False)
    words = json.loads(refused.body)["message"].replace("\n", " ")
    assert refused.code == 500
    assert words.startswith("No GPU slice of 90 percent is free now.")
    assert "%" not in words
    assert 'This kernel would start now: "two".' in words

    await server.ask("DELETE", f"api/sessions/{session['id']}")
    assert await jupyter_env.is_empty()


@pytest.mark.long
async def test_a_server_that_is_asked_to_end_gives_everything_back(
    jupyter_env: JupyterEnv, server: Server
) -> None:
    await server.open_notebook("one.ipynb", jupyter_env.install("two"))
    await server.open_notebook("two.ipynb", "two")
    assert len(await jupyter_env.leases()) == 2
    server.process.send_signal(signal.SIGTERM)
    await server.ended()
    assert await jupyter_env.is_empty()


async def test_kill_9_of_a_server_gives_everything_back(jupyter_env: JupyterEnv, server: Server) -> None:
    await server.open_notebook("one.ipynb", jupyter_env.install("two"))
    server.process.kill()
    await server.ended()
    await eventually(jupyter_env.is_empty)


@pytest.mark.long
async def test_a_server_that_is_asked_to_end_while_a_start_waits_keeps_nothing(
    jupyter_env: JupyterEnv, server: Server
) -> None:
    held = await jupyter_env.fill("1")
    waiting = asyncio.create_task(
        server.open_notebook(
            "one.ipynb", jupyter_env.install("two", kernel_proxy=False, wait_timeout=30), strict=False
        )
    )
    await eventually(jupyter_env.has_queue)
    server.process.send_signal(signal.SIGTERM)
    await jupyter_env.pool.release(held.id)
    await server.ended()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await eventually(jupyter_env.is_empty)
