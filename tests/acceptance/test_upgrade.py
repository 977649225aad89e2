"""From the oldest store that is upgraded to this version, while kernels run: real processes of both versions.

The old version comes from the history of the checkout, and runs on what is installed here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tornado.httpclient import HTTPResponse

from gpu_pool.store.errors import StoreUnusable
from gpu_pool.store.schema import migrations
from gpu_pool_client import LeaseState
from support.fixtures import jupyter_env, manager
from support.frontend import listening
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, printed_by, started_kernel
from support.old_versions import old_version
from support.server import Server
from support.service import ForkServer, serving

__all__ = ["jupyter_env", "manager"]

pytestmark = pytest.mark.long

#: The first commit whose store is upgraded, and one before: until then, schema 1 was changed in place.
FIRST, BEFORE = "f860bd4", "abd101b"
WHOSE = "import gpu_pool_client; print(gpu_pool_client.__file__); kept = 41"
#: Holds a slice, until it is told to give it back.
HOLDER = """
import asyncio, sys
from gpu_pool_client import Holder, connect, parse_request
async def main():
    pool = connect(sys.argv[1])
    lease = await pool.request(parse_request("2%"), Holder("ada"), "key")
    print(lease.id, flush=True)
    sys.stdin.readline()
    await pool.release(lease.id)
    print("given back")
asyncio.run(main())
"""


@asynccontextmanager
async def jupyter(env: JupyterEnv, variables: Mapping[str, str]) -> AsyncIterator[Server]:
    """Run a Jupyter server of an old version."""
    server = Server(env, variables)
    try:
        await eventually(server.started)
        yield server
    finally:
        server.process.kill()
        await server.ended()


@asynccontextmanager
async def old_service(folder: Path, variables: Mapping[str, str]) -> AsyncIterator[None]:
    """Serve by an old version what ``serving`` of the same folder serves by this one."""
    socket = folder / "pool.sock"
    words = ("serve", f"--socket={socket}", f"--ledger={folder / 'store.db'}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from gpu_pool.cli import main; main()", *words),
        env={**os.environ, **variables, "JUPYTER_CONFIG_DIR": str(folder)},
    )
    try:
        await eventually(lambda: socket.exists() or process.returncode is not None)
        yield
    finally:
        process.terminate()
        assert await process.wait() == 0


async def shut_down(server: Server, session: HTTPResponse) -> None:
    await server.ask("DELETE", f"api/kernels/{json.loads(session.body)['kernel']['id']}")


@pytest.fixture
def home_env(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> JupyterEnv:
    """Use the store that a user has who names none: its file had another name once."""
    monkeypatch.setenv("XDG_STATE_HOME", str(jupyter_env.folder))
    monkeypatch.setenv("GPU_POOL_URL", "embedded:")
    jupyter_env.url = "embedded:"
    return jupyter_env


async def test_kernels_keep_their_slices_when_this_version_opens_the_store(
    home_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    half = home_env.install("half", "50%")
    old = old_version(FIRST, tmp_path / "old")
    newer = (
        f"was written by a newer jupyter-gpu-pool (schema {len(migrations())}; this one knows schemas 1 to 1)"
    )
    async with jupyter(home_env, old) as before:
        first, second, third = [await before.open_notebook(f"{n}.ipynb", half) for n in range(3)]
        for session in (first, second):
            assert str(tmp_path / "old") in await printed_by(before.client_of(session), WHOSE)
        async with listening(before.client_of(third)) as page:
            cell = page.run("print('not before the server is restarted')")
            await cell.shows("You are next in line")
            # Whoever of this version asks first upgrades the store.
            status = await home_env.pool.status()
            held, waiting = status.leases, status.queue
            assert ({each.state for each in held}, len(held), len(waiting)) == ({LeaseState.HELD}, 2, 1)
            # The old version says what is to be done, and its kernels go on.
            await cell.shows(newer)
            refused = await before.open_notebook("new.ipynb", half, strict=False)
            said = " ".join(json.loads(refused.body)["message"].split())
            assert newer in said
            assert "restart what uses the pool" in said
            assert await printed_by(before.client_of(first), "print(kept + 1)") == "42\n"
        # It cannot give anything back any more: this version sees that the kernel has ended.
        await shut_down(before, first)
        ours = await started_kernel(manager(half))
        await eventually(lambda: ended(home_env, held[0].id))
        assert await printed_by(before.client_of(second), "print(kept + 1)") == "42\n"
    # Now those who waited in the old server are gone, and it is our kernel's turn.
    assert await answer(ours, "print(6 * 7)") == "42\n"
    await ours.shutdown_kernel()
    await eventually(home_env.is_empty)

    # Whatever is over is not held any more, and is in the history once a process of the pool has looked.
    async def reasons() -> list[str]:
        known = {each.id: each.reason for each in await home_env.pool.history()}
        return [known[each.id] for each in (*held, *waiting) if each.id in known]

    await eventually(reasons, lambda seen: len(seen) == 3)
    assert {*await reasons()} == {"process-gone"}


async def ended(env: JupyterEnv, lease: str) -> bool:
    return lease not in {each.id for each in await env.leases()}


async def test_kernels_and_the_queue_outlive_the_upgrade_of_a_service(
    jupyter_env: JupyterEnv, children: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service alone is restarted: the Jupyter server, its kernels and their proxies stay as old."""
    whole = jupyter_env.install("whole", "1")
    old, folder = old_version(FIRST, tmp_path / "old"), tmp_path / "serve"
    folder.mkdir()
    jupyter_env.url = f"unix:{folder / 'pool.sock'}"
    monkeypatch.setenv("GPU_POOL_URL", jupyter_env.url)
    async with AsyncExitStack() as stack:
        async with old_service(folder, old):
            before = await stack.enter_async_context(jupyter(jupyter_env, old))
            first, second = [await before.open_notebook(f"{n}.ipynb", whole) for n in range(2)]
            assert str(tmp_path / "old") in await printed_by(before.client_of(first), WHOSE)
            page = await stack.enter_async_context(listening(before.client_of(second)))
            cell = page.run("print(6 * 7)")
            await cell.shows("You are next in line")
        async with serving(children, folder):
            status = await jupyter_env.pool.status()
            (held,), (waiting,) = status.leases, status.queue
            assert await printed_by(before.client_of(first), "print(kept + 1)") == "42\n"
            await shut_down(before, first)
            assert (await cell.done()).outputs == ["42\n"]
            assert (await jupyter_env.only_lease()).id == waiting.id
            assert [(each.id, each.reason) for each in await jupyter_env.pool.history()] == [
                (held.id, "released")
            ]
            await jupyter_env.pool.close()


async def test_a_store_from_before_is_refused_and_left_to_the_version_that_wrote_it(
    home_env: JupyterEnv, tmp_path: Path
) -> None:
    old = old_version(BEFORE, tmp_path / "old")
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, "embedded:"),
        env={**os.environ, **old},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout
    assert await holder.stdout.readline()
    with pytest.raises(
        StoreUnusable, match="ledger.db, is not one of a released jupyter-gpu-pool: .*lacks the column"
    ):
        await home_env.pool.status()
    assert (await holder.communicate(b"\n"))[0] == b"given back\n"
