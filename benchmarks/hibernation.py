"""Kernels that sleep on disk: to sleep, the image, awake; beside a cold start with the same cells run again.

And how they start, cold or prepared, beside a stock kernel; and the memory of many of them: awake, asleep,
and awake again. With a real CRIU, as root; ``CRIU`` names the program. Each is measured in a process of its
own, what is compared in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.report import Line, Skipped, compared, interval
from benchmarks.sizes import sized
from gpu_pool_client import connect
from gpu_pool_provisioner.hibernation.kept import why_not
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.session import Session, State
from gpu_pool_provisioner.templates import templates

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
#: Kernels whose memory is measured, each with numpy and 40 MB; so many are started at once.
KERNELS = sized(50, 3)
AT_ONCE = 5
SMALL = "import numpy; kept = numpy.random.default_rng(0).standard_normal(5_000_000)"
SMALL_LOOK = "assert len(kept) == 5_000_000"
#: What a kernel that starts runs first, and what a prepared one has imported.
PRELOAD = "numpy"
FIRST_CELL = f"import {PRELOAD}"
STARTS = sized(12, 1)
#: Seconds without work after which these would go to disk by themselves: they go because of a drain.
LATER = 3600.0

#: Seconds to sleep, MiB of the image, seconds until awake and of the next cell, and those of starting afresh.
Round = dict[str, float]
#: MiB of kernels' processes, of their server's, that the host has available, and of images.
Stage = dict[str, float]


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    if why := why_not(CRIU):
        raise Skipped(f"kernels cannot sleep here: {why} CRIU names the program.")
    rounds: list[Round] = _in_process("rounds")
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
    yield from _of_starts(_in_process("starts"))
    yield from _of_memory(_in_process("memory"))


def _of_starts(rounds: Sequence[dict[str, list[float]]]) -> Iterator[Line]:
    """Yield the lines of kernels' starts."""
    for name, how in (("later", "cold"), ("prepared", "prepared")):
        for number, what in ((0, "its first cell's reply"), (1, f"the reply to {FIRST_CELL}")):
            pairs = [(1000 * each[name][number], 1000 * each["stock"][number]) for each in rounds]
            line = f"start of a kernel that may sleep, {how}, to {what}: to a stock kernel's"
            yield compared(line, pairs, "medians", unit="ms")


def _of_memory(stages: Sequence[Stage]) -> Iterator[Line]:
    """Yield the lines of the stages: before, awake, asleep, awake again."""
    before, awake, asleep, again = stages
    made_of = f"before {KERNELS} kernels with numpy and 40 MB each, awake, asleep, awake again"
    kernels = [each["kernels"] for each in stages]
    server = [each["server"] for each in stages]
    host = [before["available"] - each["available"] for each in stages]
    for what, values in (
        (f"memory of the processes of {KERNELS} kernels: asleep, to awake", kernels),
        ("memory of their server's process: asleep, to awake", server),
        ("what the host has less available than before: asleep, to awake", host),
    ):
        points = tuple((float(number), value) for number, value in enumerate(values))
        all_of_them = ", ".join(f"{value:,.0f}" for value in values)
        _, ours_awake, ours_asleep, _ = values
        yield Line(
            *(what, ours_asleep / ours_awake, f"{all_of_them} MiB: {made_of}"),
            ours=ours_asleep,
            yardstick=ours_awake,
            unit="MiB",
            points=points,
        )
    yield Line(
        *("memory of the processes: awake again, to before they slept", again["kernels"] / awake["kernels"]),
        "each after a cell",
        ours=again["kernels"],
        yardstick=awake["kernels"],
        unit="MiB",
    )
    images = asleep["images"]
    yield Line(f"the images of {KERNELS} kernels", images, "on disk", ours=images, unit="MiB")


def _figure(what: str, rounds: Sequence[Round], name: str, unit: str, promise: float | None = None) -> Line:
    values = [each[name] for each in rounds]
    low, high = interval(values)
    made_of = f"{min(values):.3g} to {max(values):.3g} {unit}, of {len(values)}"
    middle = median(values)
    return Line(what, middle, made_of, promise, ours=middle, unit=unit, interval=(low, high))


def _in_process(what: str) -> Any:
    """Measure in a process with kernelspecs, a store and a folder for images of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"slice": "2%", "unattended": False, "hibernate_after": AFTER, "criu": CRIU}
        config["hibernation_folder"] = str(folder / "asleep")
        ours = {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}}
        later = json.loads(json.dumps(ours))
        later["kernel_provisioner"]["config"]["hibernate_after"] = LATER
        prepared = json.loads(json.dumps(later))
        prepared["kernel_provisioner"]["config"]["preload"] = [PRELOAD]
        kinds = {"stock": {}, "sleeper": ours, "later": later, "prepared": prepared}
        for kernel, metadata in kinds.items():
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
        command = [sys.executable, "-m", "benchmarks.hibernation", what]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1])


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


async def _start(name: str, pid: int = 0) -> list[float]:
    """Return the seconds of a start to the replies to two cells: one does nothing, and one imports."""
    began = time.perf_counter()
    manager, client = await _started(name)
    await _run(client, "None")
    seconds = [time.perf_counter() - began]
    await _run(client, FIRST_CELL)
    seconds.append(time.perf_counter() - began)
    assert not pid or manager.provisioner.pid == pid, "a kernel that was prepared was not used"
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return seconds


async def _starts() -> list[dict[str, list[float]]]:
    """Return what starts take, of each kind in turn."""
    kinds = ["stock", "later", "prepared"]
    for name in kinds:
        await _start(name)  # imports and caches of this process, and the first is prepared
    found = []
    for number in range(STARTS):
        await _when(lambda: any(each.is_ready for each in templates().all()), "a kernel is prepared")
        (prepared,) = templates().all()
        order = kinds[number % 3 :] + kinds[: number % 3]
        pids = {"prepared": prepared.pid}
        found.append({name: await _start(name, pids.get(name, 0)) for name in order})
    return found


def _session(manager: AsyncKernelManager) -> Session:
    provisioner = manager.provisioner
    assert isinstance(provisioner, GPUPoolProvisioner)
    assert provisioner.session is not None
    return provisioner.session


def _image_mib(manager: AsyncKernelManager) -> int:
    on_disk = _session(manager).on_disk
    assert on_disk is not None
    return on_disk.image_mib


async def _when(is_so: Callable[[], bool], what: str, within: float = WITHIN) -> float:
    """Return when it was so; ``what`` says what is waited for."""
    give_up_at = time.perf_counter() + within
    while not is_so():
        assert time.perf_counter() < give_up_at, f"{what}: not within {within:g} s"
        await asyncio.sleep(LOOK_EVERY)
    return time.perf_counter()


async def _until(manager: AsyncKernelManager, *states: State, within: float = WITHIN) -> float:
    """Return when the kernel's session was in one of the states."""
    what = f"a kernel is {' or '.join(each.value for each in states)}"
    return await _when(lambda: _session(manager).state in states, what, within)


async def _sleeps(manager: AsyncKernelManager, client: AsyncKernelClient) -> Round:
    """Return what it took to sleep, and to wake."""
    await _run(client, LOOK)  # it may have gone to sleep while others were measured
    begins = await _until(manager, State.HIBERNATING)
    to_sleep = await _until(manager, State.HIBERNATED) - begins
    image_mib = _image_mib(manager)
    began = time.perf_counter()
    cell = asyncio.create_task(_run(client, LOOK))
    awake = await _until(manager, State.RESUMING, State.RUNNING) - began
    await cell
    return {
        "to_sleep": to_sleep,
        "image": image_mib,
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


def _seen() -> Stage:
    """Return what is used now; memory that several processes share is divided among them (Pss)."""
    server = psutil.Process()
    kernels = 0
    for each in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            kernels += each.memory_full_info().pss
    of_server, available = server.memory_full_info().pss, psutil.virtual_memory().available
    return {"kernels": kernels / 2**20, "server": of_server / 2**20, "available": available / 2**20}


async def _memory() -> list[Stage]:
    """Return what is used before there are kernels, by all of them awake, asleep, and awake again."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def begun() -> tuple[AsyncKernelManager, AsyncKernelClient]:
        async with turn:
            manager, client = await _started("later")
            await _run(client, SMALL)
            return manager, client

    async def woken(client: AsyncKernelClient) -> None:
        async with turn:
            await _run(client, SMALL_LOOK)

    # What the first kernel of a process loads is the server's, and there before.
    manager, client = await _started("later")
    await _run(client, SMALL)
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    await _no_process()
    stages = [_seen()]
    kernels = await asyncio.gather(*(begun() for _ in range(KERNELS)))
    stages.append(_seen())
    async with connect(os.environ["GPU_POOL_URL"]) as pool:
        await pool.drain("0", hibernate=True)
        for manager, _ in kernels:
            await _until(manager, State.HIBERNATED, within=KERNELS * WITHIN)
        await _no_process()
        stages.append({**_seen(), "images": float(sum(_image_mib(manager) for manager, _ in kernels))})
        await pool.drain("0", drained=False)
    managers = [manager for manager, _ in kernels]
    await _when(lambda: not any(map(_must_sleep, managers)), "a kernel knows that it may wake")
    await asyncio.gather(*(woken(client) for _, client in kernels))
    stages.append(_seen())
    for manager, client in kernels:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return stages


def _must_sleep(manager: AsyncKernelManager) -> bool:
    """Whether its machine is being emptied, as far as its server knows."""
    lease = _session(manager).lease
    return lease is not None and lease.hibernates


async def _no_process() -> None:
    """Wait until every process that this one has started has ended."""
    await _when(lambda: not psutil.Process().children(), "no process is left")


if __name__ == "__main__":
    print(json.dumps(asyncio.run({"rounds": _rounds, "starts": _starts, "memory": _memory}[sys.argv[1]]())))
