"""A Jupyter server's process whose kernels are measured: warm ones and, in turn with them, stock ones.

``benchmarks.warm`` runs it and makes a report of what it prints.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.kernels import first_reply, pid_of
from gpu_pool_provisioner.forked import ForkedProcess
from gpu_pool_provisioner.templates import TemplateProcess, templates

#: Seconds for a cell that imports what is large.
CELL_WITHIN = 300.0


@dataclass
class Kernel:
    """What one kernel took, in seconds, and its memory."""

    is_warm: bool
    #: From its start to the reply to ``kernel_info_request``.
    reply: float
    #: From its start to the reply to a cell that does nothing.
    execute: float
    #: From the first cell to its reply.
    cell: float
    #: Memory that it shares with no other process, after that cell.
    mib: float
    #: From a restart to the reply to the same cell; 0 if it was not restarted.
    restart: float


@dataclass
class Burst:
    """What many kernels took that were started at once."""

    #: Until all that were not lost had answered.
    seconds: float
    lost: int
    warm: int


def specs(folder: Path, python: str, preload: Sequence[str], size: str = "2%") -> dict[str, str]:
    """Write the kernelspecs; return the environment in which they are found."""
    ours = {"slice": size, "unattended": False}
    for name, config in (("stock", None), ("cold", ours), ("warm", {**ours, "preload": list(preload)})):
        provisioner = {"provisioner_name": "gpu-pool", "config": config}
        spec = {
            "argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": f"Python 3 {name}",
            "language": "python",
            "metadata": {} if config is None else {"kernel_provisioner": provisioner},
        }
        (folder / "kernels" / name).mkdir(parents=True)
        (folder / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
    return {
        "JUPYTER_PATH": str(folder),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(folder / "mpl"),
        "GPU_POOL_URL": f"embedded:{folder}/store.db",
        "GPU_POOL_DEVICES": "A100-SXM4-80GB:2",
    }


def in_server(what: str, python: str, preload: Sequence[str], *arguments: str) -> Any:
    """Run a function of this module in a process of its own, with kernelspecs and a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **specs(Path(name), python, preload), "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.warm_server", what, *arguments]
        # Kernels write to standard error what a benchmark's reader need not see.
        done = subprocess.run(
            command, cwd=name, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])


async def template() -> TemplateProcess:
    """Start a first kernel, and return the template that follows it once kernels can be forked from it."""
    first = AsyncKernelManager(kernel_name="warm")
    client = await first_reply(first)
    assert client is not None
    while not templates().all():  # noqa: ASYNC110 - a thread starts it
        await asyncio.sleep(0.05)
    (found,) = templates().all()
    assert await asyncio.to_thread(found.wait_until_ready, CELL_WITHIN), found.refusal
    client.stop_channels()
    await first.shutdown_kernel(now=True)
    return found


async def run_cell(client: AsyncKernelClient, code: str) -> None:
    """Return once the kernel has replied to a cell."""
    asked = client.execute(code, silent=False, store_history=False)
    while True:
        reply = await client.get_shell_msg(timeout=CELL_WITHIN)
        if reply["parent_header"].get("msg_id") == asked:
            assert reply["content"]["status"] == "ok", reply["content"]
            return


def private_mib(pid: int) -> float:
    """Return the memory that a process shares with no other, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def is_warm(manager: AsyncKernelManager) -> bool:
    """Whether its kernel was forked."""
    return isinstance(getattr(manager.provisioner, "process", None), ForkedProcess)


async def one(name: str, code: str, *, restarts: bool) -> Kernel:
    """Start a kernel, run a cell in it and, on request, restart it and run the cell again."""
    manager = AsyncKernelManager(kernel_name=name)
    began = time.perf_counter()
    client = await first_reply(manager)
    assert client is not None, "a kernel on its own was lost"
    reply = time.perf_counter() - began
    await run_cell(client, "None")
    execute = time.perf_counter() - began
    asked = time.perf_counter()
    await run_cell(client, code)
    cell = time.perf_counter() - asked
    found = Kernel(is_warm(manager), reply, execute, cell, private_mib(pid_of(manager)), 0.0)
    client.stop_channels()
    if restarts:
        began = time.perf_counter()
        await manager.restart_kernel()
        client = manager.client()
        assert isinstance(client, AsyncKernelClient)
        client.start_channels(stdin=False, hb=False, control=False, iopub=False)
        await run_cell(client, code)
        found.restart = time.perf_counter() - began
        client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return found


async def pairs(code: str, count: str, restarts: str) -> list[dict[str, object]]:
    """Start kernels of both kinds in turn."""
    await template()
    for name in ("stock", "warm"):
        await one(name, "None", restarts=False)  # imports and caches of this process
    found = []
    for number in range(int(count)):
        order = ("stock", "warm") if number % 2 else ("warm", "stock")
        found.append({name: asdict(await one(name, code, restarts=bool(restarts))) for name in order})
    return found


async def burst(name: str, count: int) -> Burst:
    """Start kernels at once, and wait until each has answered."""
    managers = [AsyncKernelManager(kernel_name=name) for _ in range(count)]
    began = time.perf_counter()
    clients = await asyncio.gather(*(first_reply(manager) for manager in managers))
    seconds = time.perf_counter() - began
    for client in clients:
        if client is not None:
            client.stop_channels()
    found = Burst(seconds, clients.count(None), sum(map(is_warm, managers)))
    await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))
    return found


async def bursts(count: str, rounds: str, beside: str) -> list[dict[str, object]]:
    """Start many warm kernels at once, again and again; in the first rounds as many stock ones as well."""
    await template()
    found = []
    for number in range(int(rounds)):
        names = ("stock", "warm") if number < int(beside) else ("warm",)
        order = names[::-1] if number % 2 else names
        found.append({name: asdict(await burst(name, int(count))) for name in order})
    return found


async def first(name: str, code: str) -> list[float]:
    """Start this server's first kernel; return the seconds to its reply, and to that of its cell."""
    manager = AsyncKernelManager(kernel_name=name)
    began = time.perf_counter()
    client = await first_reply(manager)
    assert client is not None
    reply = time.perf_counter() - began
    await run_cell(client, code)
    both = [reply, time.perf_counter() - began]
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return both


async def idle(name: str, seconds: str) -> dict[str, float]:
    """Leave the server alone; return what it takes of a core, together with its template if it has one."""
    if name == "warm":
        pids = [os.getpid(), (await template()).pid]
    else:
        await first(name, "None")
        pids = [os.getpid()]
    await asyncio.sleep(5)  # what follows a kernel's end
    began, before = time.monotonic(), sum(map(processor_time, pids))
    await asyncio.sleep(float(seconds))
    used = sum(map(processor_time, pids)) - before
    return {"share": used / (time.monotonic() - began)}


def processor_time(pid: int) -> float:
    """Return the seconds for which all threads of a process have run: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def main(what: str, *arguments: str) -> object:
    """Run one of these functions."""
    functions: dict[str, Callable[..., Awaitable[object]]] = {
        "pairs": pairs,
        "bursts": bursts,
        "first": first,
        "idle": idle,
    }

    async def run() -> object:
        return await functions[what](*arguments)

    return asyncio.run(run())


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # this process needs it, and its kernels do not
    print(json.dumps(main(*sys.argv[1:])))
