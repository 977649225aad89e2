"""A class of fifty on one Jupyter server, all of them with warm kernels on 2% of one GPU."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient

from support.frontend import listening
from support.jupyter_env import JupyterEnv, eventually, is_running
from support.server import Server, server

__all__ = ["server"]

CLASS = 50
#: What a library makes as it is imported is in no file, so every process that imports it has its own.
LIBRARY_MIB = 60
LIBRARY = f"import os, random\ndata = os.urandom(1 << 20) * {LIBRARY_MIB}\nown = random.Random()\n"
#: Prints its pid, whether the library was imported before, and what it draws.
CELL = """
import os, sys
was_there = "library" in sys.modules
import library, random, uuid
print(os.getpid(), was_there, len(library.data) >> 20, random.random(), library.own.random(), uuid.uuid4())
"""
#: A busy machine is no reason for a cold start here, and templates start at once.
CONFIG = (
    "from gpu_pool_provisioner import templates\n"
    "templates.STARTS_AFTER = templates.PAUSES_WITHIN = 0.0\n"
    "templates._ANSWERS_WITHIN = templates._FORKS_WITHIN = 60.0\n"
)


@pytest.fixture
def kernel(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the kernel that preloads the library, and configure the server."""
    folder = jupyter_env.folder / "modules"
    folder.mkdir()
    (folder / "library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (jupyter_env.folder / "config").mkdir()
    (jupyter_env.folder / "config" / "jupyter_server_config.py").write_text(CONFIG)
    return jupyter_env.install("warm", preload=["library"])


class Kernel:
    """A kernel of the server, and what its cell printed."""

    def __init__(self, server: Server, kernel_id: str, printed: list[str]) -> None:
        self._server = server
        self._id = kernel_id
        self.pid = int(printed[0])
        self.is_warm = printed[1] == "True"
        self.mib = int(printed[2])
        self.drawn = printed[3:]

    @classmethod
    async def started(cls, jupyter_env: JupyterEnv, server: Server, kernel: str) -> Kernel:
        """Start one as JupyterLab does, and run its cell."""
        found = json.loads((await server.ask("POST", "api/kernels", {"name": kernel})).body)["id"]
        connection_file = jupyter_env.folder / "runtime" / f"kernel-{found}.json"
        client = AsyncKernelClient(connection_file=str(connection_file))
        client.load_connection_file()
        async with listening(client) as page:
            cell = await page.run(CELL).done()
        return cls(server, found, "".join(cell.outputs).split())

    @property
    def private_mib(self) -> float:
        """Memory that it shares with no other process."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024

    async def end(self) -> None:
        """Shut it down."""
        await self._server.ask("DELETE", f"api/kernels/{self._id}")


def template_of(server: Server) -> int | None:
    """Return the pid of the server's only template; None while there is none."""
    children = [
        int(pid)
        for task in Path(f"/proc/{server.process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    found = [pid for pid in children if b"\0template\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found[0] if len(found) == 1 else None


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("at_end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_class_of_fifty_shares_what_it_has_imported(
    jupyter_env: JupyterEnv, kernel: str, server: Server, at_end: signal.Signals
) -> None:
    async def start() -> Kernel:
        return await Kernel.started(jupyter_env, server, kernel)

    cold = await start()
    assert not cold.is_warm
    of_cold = cold.private_mib
    assert of_cold > LIBRARY_MIB
    await cold.end()

    async def is_warm() -> bool:
        one = await start()
        await one.end()
        return one.is_warm

    await eventually(is_warm, within=300)
    template = template_of(server)
    assert template is not None

    kernels = await asyncio.gather(*(start() for _ in range(CLASS)))
    assert [each.is_warm for each in kernels] == [True] * CLASS
    assert [each.mib for each in kernels] == [LIBRARY_MIB] * CLASS
    drawn = [number for each in kernels for number in each.drawn]
    assert len(set(drawn)) == len(drawn) == 3 * CLASS

    leases = await jupyter_env.leases()
    assert {lease.process.pid for lease in leases if lease.process} == {each.pid for each in kernels}
    assert sum(lease.slices[0].milli for lease in leases) == CLASS * 20

    # Without a template, each of them would take as much as the cold one.
    total = sum(each.private_mib for each in kernels)
    assert total < CLASS * of_cold / 3, f"{total:.0f} MiB of {CLASS}, and {of_cold:.0f} MiB of a cold one"

    await asyncio.gather(*(each.end() for each in kernels[::2]))
    assert len(await jupyter_env.leases()) == CLASS - len(kernels[::2])
    server.process.send_signal(at_end)
    await server.ended()
    await eventually(jupyter_env.is_empty)
    await eventually(lambda: not any(is_running(pid) for pid in (template, *(each.pid for each in kernels))))
