"""Kernels through our provisioner against the same kernels through the stock one."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from benchmarks.report import Line, compared, interval, until_decided
from benchmarks.sizes import sized

PAIRS = sized(40, 2)
#: Pairs are measured by one process, and by further ones while the promise is undecided.
MOST_PROCESSES = sized(4, 1)
BURST = sized(50, 3)
BURSTS = sized(3, 1)
#: A kernel that has not answered by then has been lost.
LOST_AFTER = 60.0

#: What became of fifty kernels: seconds, how many were lost, MiB of a kernel and of the server for each.
Burst = dict[str, float]

STOCK = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "language": "python",
}
OURS = {
    "kernel_provisioner": {"provisioner_name": "gpu-pool", "config": {"slice": "2%", "unattended": False}}
}


def prepare(folder: Path) -> dict[str, str]:
    """Write the two kernelspecs; return the environment in which they are found."""
    for name, metadata in (("stock", {}), ("ours", OURS)):
        spec = folder / "kernels" / name
        spec.mkdir(parents=True)
        (spec / "kernel.json").write_text(
            json.dumps({**STOCK, "display_name": f"Python 3 {name}", "metadata": metadata})
        )
    return {
        "JUPYTER_PATH": str(folder),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "GPU_POOL_URL": f"embedded:{folder}/store.db",
        "GPU_POOL_DEVICES": "A100-SXM4-80GB:1",
    }


async def first_reply(manager: AsyncKernelManager) -> AsyncKernelClient | None:
    """Start a kernel and return a client once its first cell is answered, or None if it is lost.

    A cell's reply is the kernel's own: what a kernel is asked about itself, a proxy answers before it runs.
    """
    await manager.start_kernel()
    client = manager.client()
    assert isinstance(client, AsyncKernelClient)
    client.start_channels(stdin=False, hb=False, control=False, iopub=False)
    client.execute("1")
    try:
        await client.get_shell_msg(timeout=LOST_AFTER)
    except Exception:  # noqa: BLE001 - queue.Empty, or whatever a dead socket says
        client.stop_channels()
        return None
    return client


async def one(name: str) -> float:
    """Return the seconds from starting one kernel to the reply to its first cell."""
    manager = AsyncKernelManager(kernel_name=name)
    began = time.perf_counter()
    client = await first_reply(manager)
    seconds = time.perf_counter() - began
    assert client is not None, "a kernel on its own was lost"
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return seconds


async def pairs() -> list[tuple[float, float]]:
    """Start kernels of both kinds in turn."""
    for name in ("stock", "ours"):
        await one(name)  # imports and caches of this process
    found = []
    for number in range(PAIRS):
        order = ("stock", "ours") if number % 2 else ("ours", "stock")
        taken = {name: await one(name) for name in order}
        found.append((taken["stock"], taken["ours"]))
    return found


async def burst(name: str) -> Burst:
    """Start fifty kernels at once; return seconds, MiB and how many were lost."""
    managers = [AsyncKernelManager(kernel_name=name) for _ in range(BURST)]
    began = time.perf_counter()
    clients = await asyncio.gather(*(first_reply(manager) for manager in managers))
    seconds = time.perf_counter() - began
    kernels = [memory_mib(pid_of(m)) for m, c in zip(managers, clients, strict=True) if c]
    found = {
        "seconds": seconds,
        "lost": sum(client is None for client in clients),
        "kernel": statistics.mean(kernels),
        "server": memory_mib(os.getpid()) / BURST,
    }
    for client in clients:
        if client is not None:
            client.stop_channels()
    await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))
    return found


def pid_of(manager: AsyncKernelManager) -> int:
    """Return the pid of a running kernel."""
    assert isinstance(manager.provisioner, LocalProvisioner)
    return int(manager.provisioner.pid or 0)


def memory_mib(pid: int) -> float:
    """Return a process's proportional share of memory, in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def child(*arguments: str) -> object:
    """Run a part of this module in a process of its own, with kernelspecs and a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        # Managers write connection files into the folder they run in.
        environ = {**os.environ, **prepare(Path(name)), "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "benchmarks.kernels", *arguments]
        # Kernels write to standard error what a benchmark's reader need not see.
        done = subprocess.run(
            command, cwd=name, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        found: object = json.loads(done.stdout.splitlines()[-1])
        return found


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    yield from until_decided(_pairs_of_a_process, _first_replies, 1, MOST_PROCESSES)
    yield from until_decided(_bursts, _of_bursts, BURSTS, 2 * BURSTS)


def _pairs_of_a_process() -> list[tuple[float, float]]:
    found = child("pairs")
    assert isinstance(found, list)
    return [(1000 * ours, 1000 * stock) for stock, ours in found]


def _first_replies(processes: Sequence[list[tuple[float, float]]]) -> list[Line]:
    what = "one kernel to its first cell's reply, to the stock provisioner"
    return [compared(what, [pair for some in processes for pair in some], "medians", 1.05, unit="ms")]


def _bursts() -> tuple[Burst, Burst]:
    ours, stock = child("burst", "ours"), child("burst", "stock")
    assert isinstance(ours, dict)
    assert isinstance(stock, dict)
    return ours, stock


def _of_bursts(rounds: Sequence[tuple[Burst, Burst]]) -> list[Line]:
    lost = [int(sum(each["lost"] for each in kind)) for kind in zip(*rounds, strict=True)]
    more = [_mib(ours) - _mib(stock) for ours, stock in rounds]
    low, high = interval(more)
    return [
        compared(
            f"{BURST} kernels at once, to the stock provisioner",
            [(ours["seconds"], stock["seconds"]) for ours, stock in rounds],
            f"lost {lost[0]} to {lost[1]} of {BURST * len(rounds)} (a lost kernel counts {LOST_AFTER:.0f} s)",
            1.05,
            unit="s",
        ),
        Line(
            "MiB more for each of them, the server's growth included",
            statistics.median(more),
            f"proportional set size; 95% interval {low:.2g} to {high:.2g}, of {len(rounds)}",
            3.0,
            ours=statistics.median(more),
            unit="MiB",
            interval=(low, high),
        ),
    ]


def _mib(burst: Burst) -> float:
    return burst["kernel"] + burst["server"]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(pairs() if sys.argv[1] == "pairs" else burst(sys.argv[2]))))
