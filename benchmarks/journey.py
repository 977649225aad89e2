"""How far a kernel's start travels: our files and functions that are entered until it has been shut down.

Three kernels: one that is granted its slice at once by the embedded pool (the first of a Jupyter
server, which opens the pool, and a later one), one that waits for it at ``gpu-pool serve``, and one
in a pod of a cluster (where the programs of a control plane are; its pods are processes here).
Counted are the process that starts the kernel and the service, each function once; what runs
inside the kernel is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import psutil
from jupyter_client.manager import AsyncKernelManager

from benchmarks.kernels import prepare
from benchmarks.recorder import record, recorded
from benchmarks.report import Line, Skipped
from gpu_pool_client import Holder, connect, parse_request
from support.api_server import api_serving
from support.clusters import hami
from support.control_plane import Cluster, missing_programs, scheduling_and_controlling, write_kubeconfig
from support.node_agent import NodeAgent
from support.pod_pages import add_server, of_cluster
from support.service import ForkServer, serving

ROOT = Path(__file__).parents[1]
#: The promise for a kernel that is granted its slice at once by a pool that is open.
FILES, FUNCTIONS = 28, 140
#: What a child is told to do.
FIRST, LATER, WAITING = "first", "later", "waiting"
_WITHIN = 120.0
#: What the service's process runs first.
_RECORDS = """
import sys
sys.path.append({root!r})
from pathlib import Path
from benchmarks.recorder import record
record(Path({path!r}))
"""


async def _travel(before_it_runs: Callable[[], Awaitable[None]] | None = None) -> None:
    """Start a kernel, run a cell and shut it down."""
    manager = AsyncKernelManager(kernel_name="ours")
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    if before_it_runs is not None:
        await before_it_runs()
    await client.wait_for_ready(timeout=_WITHIN)
    await client.execute("1", reply=True, timeout=_WITHIN)
    client.stop_channels()
    await manager.shutdown_kernel()


async def child(path: Path, which: str) -> None:
    """Record the journey of this process' first kernel, of a later one, or of one that must wait."""
    import gpu_pool_provisioner.provisioner  # noqa: F401 - what is done as modules are imported is not counted

    url = os.environ["GPU_POOL_URL"]
    if which != WAITING:
        forget = record(path)
        await _travel()
        if which == LATER:
            forget()
            await _travel()
        return
    async with connect(url) as pool:
        held = await pool.request(parse_request("1"), Holder("somebody"), "fills-the-pool")

        async def waits_and_gets_it() -> None:
            while not (await pool.status()).queue:  # noqa: ASYNC110 - others' events are not told
                await asyncio.sleep(0.05)
            await pool.release(held.id)

        record(path)
        await _travel(waits_and_gets_it)


def _run_child(folder: Path, path: Path, environment: dict[str, str], which: str) -> None:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    subprocess.run(
        [sys.executable, "-m", "benchmarks.journey", str(path), which],
        cwd=folder,
        env={**os.environ, **prepare(folder), **environment, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def embedded(folder: Path, which: str) -> tuple[int, int]:
    """Return the files and functions of a kernel on the embedded pool."""
    path = folder / "entered"
    _run_child(folder, path, {}, which)
    return recorded(path)


async def served(folder: Path, settings: str = "", more: str = "", which: str = WAITING) -> tuple[int, int]:
    """Return the files and functions of a kernel of a service, both processes together."""
    here, there = folder / "entered", folder / "entered-there"
    with contextlib.closing(ForkServer(more)) as children:
        async with serving(children, folder / "service", settings) as service:
            await service.end()
            service.prelude = _RECORDS.format(root=str(ROOT), path=str(there))
            await service.start()
            await asyncio.to_thread(_run_child, folder, here, {"GPU_POOL_URL": service.url}, which)
            await service.end()
    return recorded(here, there)


def in_pod(folder: Path) -> tuple[int, int]:
    """Return the files and functions of a kernel in a pod."""
    if missing := missing_programs():
        raise Skipped(f"there is no {' and no '.join(missing)} (KUBEBUILDER_ASSETS)")
    for name in ("api", "nodes"):
        (folder / name).mkdir()
    namespace, user = "journey", psutil.Process().username()
    with api_serving(folder / "api") as server:
        kubeconfig = write_kubeconfig(folder / "kubeconfig", server.url, server.token, server.certificate)
        with scheduling_and_controlling(kubeconfig), NodeAgent(kubeconfig, folder / "nodes") as agent:
            cluster = Cluster(kubeconfig, agent)
            node = hami("hami-1", count=50)
            node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
            cluster.add(node)
            cluster.kubectl("create", "namespace", namespace)
            add_server(cluster, namespace, user)
            settings = of_cluster(cluster, namespace)
            return asyncio.run(served(folder, settings, "import gpu_pool.cluster.backend", FIRST))


def run() -> Iterator[Line]:
    """Count and yield the report's lines."""
    journeys: tuple[tuple[str, Callable[[Path], tuple[int, int]], bool], ...] = (
        ("granted at once by the embedded pool", lambda folder: embedded(folder, LATER), True),
        ("that is a server's first, and opens that pool", lambda folder: embedded(folder, FIRST), False),
        ("that waits at gpu-pool serve", lambda folder: asyncio.run(served(folder)), False),
        ("in a pod", in_pod, False),
    )
    for what, count, is_promised in journeys:
        with tempfile.TemporaryDirectory(prefix="journey-") as name:
            files, functions = count(Path(name))
        made_of = "from start to shutdown, the service's process included"
        for kind, found, promise in (("files", files, FILES), ("functions", functions, FUNCTIONS)):
            most = float(promise) if is_promised else None
            yield Line(f"{kind} entered by a kernel {what}", found, made_of, most, ours=found, unit=kind)


if __name__ == "__main__":
    asyncio.run(child(Path(sys.argv[1]), sys.argv[2]))
