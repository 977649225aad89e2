"""Kernels that sleep on disk: to sleep, the image, awake; beside a cold start with the same cells run again.

With a real CRIU, as root; ``CRIU`` names the program. Everything is measured in turn, in one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.report import Line, Skipped, compared, interval
from benchmarks.sizes import sized
from gpu_pool_provisioner.hibernation.kept import why_not
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import State

CRIU = os.environ.get("CRIU", "criu")
ROUNDS = sized(12, 1)
#: Seconds without work after which it goes to disk.
AFTER = 0.3
LOOK_EVERY = 0.001
#: Seconds in which any of this has happened, or never does.
WITHIN = 120.0
STOCK = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "language": "python",
}
#: What a notebook's first cells do: imports, and data of 300 MB that take a moment to come by.
CELLS = (
    "import numpy",
    "kept = numpy.random.default_rng(0).standard_normal(39_000_000)",
)
LOOK = "assert len(kept) == 39_000_000"

#: Seconds to sleep, MiB of the image, seconds until awake and of the next cell, and those of starting afresh.
Round = dict[str, float]


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    if why := why_not(CRIU):
        raise Skipped(f"kernels cannot sleep here: {why} CRIU names the program.")
    rounds = _in_process()
    yield _figure("an idle kernel of 300 MB goes to disk: median", rounds, "to_sleep", "s")
    yield _figure("its image", rounds, "image", "MiB")
    yield _figure("it is awake again: median", rounds, "awake", "s")
    yield _figure("its next cell's reply: median", rounds, "next", "s", 1.0)
    yield compared(
        "its next cell's reply, to a cold start with the same cells run again",
        [(each["next"], each["cold"]) for each in rounds],
        f"cold: a stock kernel, then {'; '.join(CELLS)}",
        unit="s",
    )


def _figure(what: str, rounds: Sequence[Round], name: str, unit: str, promise: float | None = None) -> Line:
    values = [each[name] for each in rounds]
    low, high = interval(values)
    made_of = f"{min(values):.3g} to {max(values):.3g} {unit}, of {len(values)}"
    middle = median(values)
    return Line(what, middle, made_of, promise, ours=middle, unit=unit, interval=(low, high))


def _in_process() -> list[Round]:
    """Measure in a process with kernelspecs, a store and a folder for images of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"slice": "2%", "unattended": False, "hibernate_after": AFTER, "criu": CRIU}
        config["hibernation_folder"] = str(folder / "asleep")
        ours = {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}}
        for kernel, metadata in (("stock", {}), ("sleeper", ours)):
            spec = folder / "kernels" / kernel
            spec.mkdir(parents=True)
            (spec / "kernel.json").write_text(
                json.dumps({**STOCK, "display_name": f"Python 3 {kernel}", "metadata": metadata})
            )
        environment = {
            **os.environ,
            "JUPYTER_PATH": name,
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "GPU_POOL_URL": f"embedded:{folder}/store.db",
            "GPU_POOL_DEVICES": "A100-SXM4-80GB:1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, "-m", "benchmarks.hibernation"]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: list[Round] = json.loads(done.stdout.splitlines()[-1])
        return found


async def _started(name: str) -> tuple[AsyncKernelManager, AsyncKernelClient]:
    manager = AsyncKernelManager(kernel_name=name)
    await manager.start_kernel()
    client = manager.client()
    assert isinstance(client, AsyncKernelClient)
    client.start_channels(stdin=False, hb=False, control=False, iopub=False)
    return manager, client


async def _run(client: AsyncKernelClient, cell: str) -> None:
    asked = client.execute(cell)
    reply = await client.get_shell_msg(timeout=WITHIN)
    assert reply["parent_header"]["msg_id"] == asked
    assert reply["content"]["status"] == "ok", reply["content"]


async def _cold() -> float:
    """Return the seconds of a cold start with the same cells run again, and the next one."""
    began = time.perf_counter()
    manager, client = await _started("stock")
    for cell in (*CELLS, LOOK):
        await _run(client, cell)
    seconds = time.perf_counter() - began
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return seconds


async def _sleeps(manager: AsyncKernelManager, client: AsyncKernelClient) -> Round:
    """Return what it took to sleep, and to wake."""
    provisioner = manager.provisioner
    assert isinstance(provisioner, GPUPoolProvisioner)

    async def until(*states: State) -> float:
        give_up_at = time.perf_counter() + WITHIN
        while provisioner.session is None or provisioner.session.state not in states:
            assert time.perf_counter() < give_up_at, provisioner.session
            await asyncio.sleep(LOOK_EVERY)
        return time.perf_counter()

    await _run(client, LOOK)  # it may have gone to sleep while others were measured
    begins = await until(State.HIBERNATING)
    to_sleep = await until(State.HIBERNATED) - begins
    on_disk = provisioner.session and provisioner.session.on_disk
    assert on_disk is not None
    began = time.perf_counter()
    cell = asyncio.create_task(_run(client, LOOK))
    awake = await until(State.RESUMING, State.RUNNING) - began
    await cell
    return {
        "to_sleep": to_sleep,
        "image": on_disk.image_mib,
        "awake": awake,
        "next": time.perf_counter() - began,
    }


async def _rounds() -> list[Round]:
    await _cold()  # imports and caches of this process
    manager, client = await _started("sleeper")
    for cell in CELLS:
        await _run(client, cell)
    found = []
    for number in range(ROUNDS + 1):
        each = await _sleeps(manager, client)
        if number:  # the first meets what is not in the page cache
            found.append({**each, "cold": await _cold()})
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_rounds())))
