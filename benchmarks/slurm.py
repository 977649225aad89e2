"""Kernels that are Slurm jobs, on a cluster of this machine: their start to srun's, and what a queue costs.

The yardsticks are kernels that sbatch and srun start themselves, and to which a client connects directly.
"""

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
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from jupyter_client.manager import AsyncKernelManager

from benchmarks.kernel_proxy import answered, in_turn, started
from benchmarks.kernels import STOCK, one
from benchmarks.report import Line, Skipped, compared, interval
from benchmarks.sizes import sized
from gpu_pool.slurm.backend import SlurmBackend
from gpu_pool.slurm.commands import ask
from gpu_pool.slurm.jobs import place
from gpu_pool.slurm.watch import JobQueueWatch
from gpu_pool_provisioner.pools import shared_pool
from support.slurm import Slurm, missing, slurm_cluster

PAIRS = sized(24, 1)
WAITERS = sized(200, 2)
QUEUE = sized(1000, 5)
LOOKS = sized(20, 2)
WATCHED_SECONDS = sized(30.0, 2.0)
#: Seconds for so many starts to be over and forgotten.
SETTLED_AFTER = sized(15.0, 1.0)
#: The golden ratio: the parts of a second after whole ones of these are spread as evenly as can be.
_GOLDEN = 0.618
_OPTIONS = ["--quiet", "--nodelist=n2", "--gres=shard:5"]
_SLICES = {"ours": "5% model=t4", "whole": "1 model=t4"}


def prepare(folder: Path) -> dict[str, str]:
    """Write the kernelspecs and what a site says of its GPUs; return the environment that finds them."""
    batch = [
        "sbatch",
        "--wait",
        *_OPTIONS,
        "--output=/dev/null",
        "--wrap",
        f"exec {' '.join(STOCK['argv'])}",
    ]
    specs: dict[str, Any] = {
        "stock": {**STOCK, "argv": ["srun", *_OPTIONS, *STOCK["argv"]], "metadata": {}},
        "sbatch": {**STOCK, "argv": batch, "metadata": {}},
    }
    for name, size in _SLICES.items():
        config = {"slice": size, "unattended": False}
        metadata = {"kernel_provisioner": {"provisioner_name": "gpu-pool", "config": config}}
        specs[name] = {**STOCK, "metadata": metadata}
    for name, spec in specs.items():
        (folder / "kernels" / name).mkdir(parents=True)
        (folder / "kernels" / name / "kernel.json").write_text(json.dumps({**spec, "display_name": name}))
    (folder / "home").mkdir()
    (folder / "gpu_pool_config.py").write_text('c.SlurmSettings.gpu_memory = {"v100": 32, "t4": 16}\n')
    return {
        # Of a user without a profile: only our jobs run it, and what that takes is the user's affair.
        "HOME": str(folder / "home"),
        "JUPYTER_PATH": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "GPU_POOL_URL": f"slurm:{folder}/store.db",
    }


def end_all() -> None:
    """End all jobs: the kernel of an srun that was killed outlives it."""
    Slurm(Path(), os.environ).cancel_all()


async def starts() -> list[tuple[float, float, float]]:
    """Start kernels of all kinds in turn; return seconds: ours, sbatch's and srun's.

    Slurm's controller looks for batch jobs once a second, and a job waits for that. So those of one turn are
    started at the same time of a second, and those of the next one at another.
    """
    found, kinds = [], ["ours", "sbatch", "stock"]
    for number in range(PAIRS + 1):
        taken, begins = {}, number * _GOLDEN % 1
        for name in kinds if number % 2 else kinds[::-1]:
            await asyncio.sleep((begins - time.time()) % 1)
            taken[name] = await one(name)
            end_all()
        found.append((taken["ours"], taken["sbatch"], taken["stock"]))
    return found[1:]  # the first has brought imports and caches into this process


def relayed() -> dict[str, dict[str, list[float]]]:
    """Run the same in both kernels, in turn; return seconds."""
    return in_turn({name: started(name) for name in ("stock", "ours")})


async def waiters() -> tuple[float, float]:
    """Let kernels of one process wait for their jobs; return its share of a core, and looks a minute."""
    await asyncio.to_thread(ask, "sbatch", "--gres=gpu:t4:1", "--wrap=sleep 3000")
    managers = [AsyncKernelManager(kernel_name="whole") for _ in range(WAITERS)]
    for manager in managers:
        client = await answered(manager)
        client.execute("1")
        client.stop_channels()
    backend = shared_pool(os.environ["GPU_POOL_URL"]).backend  # type: ignore[attr-defined]
    assert isinstance(backend, SlurmBackend)
    await asyncio.sleep(SETTLED_AFTER)
    began, used, looks = time.perf_counter(), time.process_time(), backend.watch.looks
    await asyncio.sleep(WATCHED_SECONDS)
    passed = time.perf_counter() - began
    share, asked = (time.process_time() - used) / passed, 60 * (backend.watch.looks - looks) / passed
    await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))
    return share, asked


def queue() -> tuple[list[float], list[float]]:
    """Fill the queue; return seconds of looks at it, and of finding one job's place in it."""
    for _ in range(QUEUE):
        ask("sbatch", "--hold", "--gres=gpu:t4:1", "--wrap=true")
    watch = JobQueueWatch()
    looks, places = [], []
    for _ in range(LOOKS):
        began = time.perf_counter()
        watch.look()
        looks.append(time.perf_counter() - began)
        assert len(watch.jobs) >= QUEUE, watch.trouble
        job = next(iter(watch.jobs.values()))
        began = time.perf_counter()
        place(job, watch.jobs.values(), sees_others=True)
        places.append(time.perf_counter() - began)
    return looks, places


def child(slurm: Slurm, part: str) -> Any:
    """Run a part of this module in a process of its own, with kernelspecs and a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.slurm", part],
            cwd=name,
            env={**slurm.environment, **prepare(Path(name)), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        slurm.cancel_all()
        return json.loads(done.stdout.splitlines()[-1])


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    if why := missing():
        raise Skipped(why)
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, slurm_cluster(Path(name)) as slurm:
        taken, what = child(slurm, "starts"), "a job's kernel from its start to its first cell's reply, to"
        batch, direct = ([(ours, others[n]) for ours, *others in taken] for n in (0, 1))
        yield compared(f"{what} one that sbatch starts", batch, "medians", 1.1, unit="s")
        yield compared(f"{what} srun's", direct, "medians", None, unit="s")
        found = child(slurm, "relayed")
        pairs = list(zip(found["ours"]["execute"], found["stock"]["execute"], strict=True))
        more = [1000 * (ours - stock) for ours, stock in pairs]
        low, high = interval(more)
        yield Line(
            "what the relay adds to one execute in a job",
            statistics.median(more),
            f"95% interval {low:.2f} to {high:.2f} ms, of {len(more)}",
            1.0,
            ours=statistics.median(more),
            unit="ms",
            interval=(low, high),
        )
        share, asked = child(slurm, "waiters")
        made_of = f"over {WATCHED_SECONDS:.0f} s, a cell waiting in each"
        what = f"{WAITERS} kernels of one server that wait for their jobs"
        yield Line(f"{what} use", share, made_of, ours=share, unit="cores")
        yield Line(f"{what} ask squeue, times a minute", asked, made_of, 20, ours=asked)
        looks, places = (1000 * statistics.median(each) for each in child(slurm, "queue"))
        of = f"the median of {LOOKS}"
        yield Line(f"a look at a queue of {QUEUE} jobs", looks, of, ours=looks, unit="ms")
        yield Line(f"the place of a job among {QUEUE}", places, of, ours=places, unit="ms")


if __name__ == "__main__":
    part = {"starts": starts, "relayed": relayed, "waiters": waiters, "queue": queue}[sys.argv[1]]
    result = part()
    print(json.dumps(asyncio.run(result) if asyncio.iscoroutine(result) else result))
