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
from collections.abc import Iterator
from pathlib import Path

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from benchmarks.report import Line, interval
from benchmarks.sizes import sized

PAIRS = sized(40, 2)
BURST = sized(50, 3)
BURSTS = sized(3, 1)
#: A kernel that has not answered by then has been lost.
LOST_AFTER = 60.0

STOCK = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "language": "python",
}
OURS = {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": {"slice": "2%"}}}


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
    """Start a kernel and return a client once it has answered, or None if it is lost."""
    await manager.start_kernel()
    client = manager.client()
    assert isinstance(client, AsyncKernelClient)
    client.start_channels(stdin=False, hb=False, control=False, iopub=False)
    client.kernel_info()
    try:
        await client.get_shell_msg(timeout=LOST_AFTER)
    except Exception:  # noqa: BLE001 - queue.Empty, or whatever a dead socket says
        client.stop_channels()
        return None
    return client


async def one(name: str) -> float:
    """Return the seconds from starting one kernel to its first reply."""
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


async def burst(name: str) -> dict[str, float]:
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
    taken = child("pairs")
    assert isinstance(taken, list)
    ratios = [mine / stock for stock, mine in taken]
    low, high = interval(ratios)
    stock_ms, mine_ms = (statistics.median(column) * 1000 for column in zip(*taken, strict=True))
    yield Line(
        "one kernel to its first reply, to the stock provisioner",
        statistics.median(ratios),
        f"median of {len(ratios)} interleaved pairs, 95% interval {low:.3f} to {high:.3f}; "
        f"{mine_ms:.0f} to {stock_ms:.0f} ms",
        1.05,
        ours=mine_ms,
        yardstick=stock_ms,
        unit="ms",
    )
    yield from _bursts()


def _bursts() -> Iterator[Line]:
    rounds = [(child("burst", "stock"), child("burst", "ours")) for _ in range(BURSTS)]
    stock, mine = (
        [each for each in column if isinstance(each, dict)] for column in zip(*rounds, strict=True)
    )
    quick, slow = (statistics.median(each["seconds"] for each in kind) for kind in (mine, stock))
    lost = [int(sum(each["lost"] for each in kind)) for kind in (mine, stock)]
    yield Line(
        f"{BURST} kernels at once, to the stock provisioner",
        quick / slow,
        f"median of {BURSTS} rounds: {quick:.1f} to {slow:.1f} s; lost {lost[0]} to {lost[1]} "
        f"of {BURST * BURSTS} (a lost kernel counts {LOST_AFTER:.0f} s)",
        1.05,
        ours=quick,
        yardstick=slow,
        unit="s",
    )
    mib = [statistics.median(each["kernel"] + each["server"] for each in kind) for kind in (mine, stock)]
    yield Line(
        "MiB more for each of them, the server's growth included",
        mib[0] - mib[1],
        f"{mib[0]:.1f} to {mib[1]:.1f} MiB (proportional set size)",
        3.0,
        ours=mib[0] - mib[1],
        unit="MiB",
    )


if __name__ == "__main__":
    print(json.dumps(asyncio.run(pairs() if sys.argv[1] == "pairs" else burst(sys.argv[2]))))
