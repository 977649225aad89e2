"""The kernel proxy: how soon it answers, what its relay costs, and what two hundred waiters cost."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import AsyncKernelManager, KernelManager

from benchmarks.kernels import LOST_AFTER, prepare
from benchmarks.report import Line, compared, interval
from benchmarks.sizes import sized
from gpu_pool_client import Holder, connect, parse_request

STARTS = sized(20, 2)
EXECUTES = sized(400, 5)
OUTPUTS = sized(7, 1)
OUTPUT_BYTES = sized(100_000_000, 1_000_000)
WAITERS = sized(200, 3)
WATCHED_SECONDS = sized(30.0, 2.0)
#: Seconds for two hundred starts to be over and forgotten.
SETTLED_AFTER = sized(15.0, 1.0)
DISPLAY = f"display({{'text/plain': 'x' * {OUTPUT_BYTES}}}, raw=True)"


async def fill() -> str:
    """Take the whole pool; return the lease's id."""
    return (await connect().request(parse_request("1"), Holder("bench"), "fill")).id


async def answered(manager: AsyncKernelManager) -> AsyncKernelClient:
    """Start a kernel and return a client once it has said what it is: its proxy does that while it waits."""
    await manager.start_kernel()
    client = manager.client()
    assert isinstance(client, AsyncKernelClient)
    client.start_channels(stdin=False, hb=False, control=False, iopub=False)
    client.kernel_info()
    await client.get_shell_msg(timeout=LOST_AFTER)
    return client


async def answers() -> list[float]:
    """Start kernels that wait; return the seconds to the first reply of each, of the slowest last."""
    await fill()
    taken = []
    for _ in range(STARTS):
        manager = AsyncKernelManager(kernel_name="ours")
        began = time.perf_counter()
        client = await answered(manager)
        taken.append(time.perf_counter() - began)
        assert isinstance(client, AsyncKernelClient)
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return sorted(taken)


async def waiters() -> float:
    """Return the share of a core that a server with two hundred waiting kernels uses."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    await fill()
    managers = [AsyncKernelManager(kernel_name="ours") for _ in range(WAITERS)]
    for manager in managers:
        client = await answered(manager)
        assert client is not None
        client.execute("1")
        client.stop_channels()
    await asyncio.sleep(SETTLED_AFTER)
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(WATCHED_SECONDS)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))
    return share


def relayed() -> dict[str, dict[str, list[float]]]:
    """Run the same in a direct and in a relayed kernel, in turn; return seconds."""
    lease = asyncio.run(fill())
    kernels = {name: started(name) for name in ("stock", "ours")}
    asyncio.run(connect().release(lease))
    return in_turn(kernels)


def in_turn(
    kernels: dict[str, tuple[KernelManager, BlockingKernelClient]],
) -> dict[str, dict[str, list[float]]]:
    """Let kernels do the same, one after the other in changing order, and end them; return seconds."""
    found: dict[str, dict[str, list[float]]] = {name: {"execute": [], "output": []} for name in kernels}
    for _, client in kernels.values():
        seconds(client, "1")
    for kind, code, times in (("execute", "1", EXECUTES), ("output", DISPLAY, OUTPUTS)):
        for number in range(times):
            order = list(kernels) if number % 2 else list(kernels)[::-1]
            for name in order:
                found[name][kind].append(seconds(kernels[name][1], code))
    for manager, client in kernels.values():
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


def started(name: str) -> tuple[KernelManager, BlockingKernelClient]:
    """Start a kernel, or let it wait."""
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    return manager, client


def seconds(client: BlockingKernelClient, code: str) -> float:
    """Return the seconds from submitting code to its reply and its last output."""
    began = time.perf_counter()
    request = client.execute(code)
    client.get_shell_msg(timeout=60)
    while True:
        message: dict[str, Any] = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request and message["content"] == {
            "execution_state": "idle"
        }:
            return time.perf_counter() - began


def child(part: str) -> Any:
    """Run a part of this module in a process of its own, with kernelspecs and a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        (Path(name) / "gpu_pool_config.py").write_text(f"c.PoolSettings.max_waiting = {WAITERS}")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernel_proxy", part],
            cwd=name,
            env={**os.environ, **prepare(Path(name)), "JUPYTER_CONFIG_DIR": name, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    taken = child("answers")
    yield Line(
        "from a start without a free slice to the first kernel_info_reply",
        taken[-1],
        f"the slowest of {len(taken)}; median {statistics.median(taken):.3f} s",
        0.5,
        ours=taken[-1],
        unit="s",
    )
    found = child("relayed")
    executes, outputs = (
        list(zip(found["ours"][kind], found["stock"][kind], strict=True)) for kind in ("execute", "output")
    )
    more = [1000 * (ours - stock) for ours, stock in executes]
    low, high = interval(more)
    stock_ms = 1000 * statistics.median(found["stock"]["execute"])
    yield Line(
        "what the relay adds to one execute",
        statistics.median(more),
        f"95% interval {low:.2f} to {high:.2f} ms, of {len(more)}; a stock one {stock_ms:.2f}",
        1.0,
        ours=statistics.median(more),
        unit="ms",
        interval=(low, high),
    )
    what = f"an output of {OUTPUT_BYTES // 10**6} MB through the relay, to the direct connection"
    yield compared(what, outputs, "medians", 1.1, unit="s")
    share = child("waiters")
    yield Line(
        f"what {WAITERS} waiting kernels in one server use",
        share,
        f"over {WATCHED_SECONDS:.0f} s, a cell waiting in each; the pool in the same process included",
        0.05,
        ours=share,
        unit="cores",
    )


if __name__ == "__main__":
    part = {"answers": answers, "waiters": waiters, "relayed": relayed}[sys.argv[1]]
    print(json.dumps(part() if part is relayed else asyncio.run(part())))  # type: ignore[arg-type]
