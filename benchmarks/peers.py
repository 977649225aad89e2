"""Grants per second beside other programs that hand out GPUs, run from an environment of their own.

Each has its own idea of a grant, so each is set against the nearest of ours.
They are driven as their users drive them; nothing of theirs is imported here.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Line, Skipped
from benchmarks.service import ours
from benchmarks.sizes import PEERS_PYTHON, sized
from gpu_pool_client import Holder, LeaseState, connect, parse_request

SECONDS = sized(5.0, 1.0)
COMMANDS = sized(10, 2)
SIZE = parse_request("2%")
#: What both need: how often a second something can be done, one after the other.
RATE = """
import json, logging, sys, time
def rate(act):
    act()
    count, began = 0, time.monotonic()
    while time.monotonic() < began + float(sys.argv[1]):
        act()
        count += 1
    return count / (time.monotonic() - began)
"""
#: A placement group reserves resources, and runs nothing: an acquire and a release.
RAY = f"""{RATE}
import ray
from ray.util import placement_group, remove_placement_group
ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
def reserve():
    group = placement_group([{{"GPU": 0.02}}])
    assert group.wait(60)
    remove_placement_group(group)
print(json.dumps({{"reserve": rate(reserve)}}))
"""
#: A semaphore of fifty is the nearest that Dask has to a reservation; a resource belongs to a task.
DASK = f"""{RATE}
from distributed import Client, LocalCluster, Semaphore
def reserve():
    assert semaphore.acquire()
    semaphore.release()
def task():
    client.submit(int, resources={{"GPU": 0.02}}, pure=False).result()
if __name__ == "__main__":
    logging.disable(logging.ERROR)
    with LocalCluster(n_workers=1, resources={{"GPU": 1}}, dashboard_address=None) as at:
        with Client(at) as client:
            semaphore = Semaphore(max_leases=50, name="gpu")
            print(json.dumps({{"reserve": rate(reserve), "task": rate(task)}}))
"""
#: As much of nvidia-smi as genv asks for, where there is no GPU.
NVIDIA_SMI = "#!/bin/sh\ncase $* in *memory.total*) echo 81920 ;; *) echo 0 ;; esac\n"


def pairs(url: str) -> float:
    """Return how many slices a second one caller of ours gets and gives back, one after the other."""

    async def repeat() -> float:
        async with connect(url) as pool:
            await pool.status()
            count, began = 0, time.monotonic()
            while time.monotonic() < began + SECONDS:
                lease = await pool.request(SIZE, Holder("bench"), f"pair-{count}")
                assert lease.state is LeaseState.HELD
                await pool.release(lease.id)
                count += 1
            return count / (time.monotonic() - began)

    return asyncio.run(repeat())


def script(python: str, text: str, folder: Path) -> dict[str, float]:
    """Run a peer's part; return its rates."""
    path = folder / "peer.py"
    path.write_text(text)
    command = [python, str(path), str(SECONDS)]
    # Ray gives up after half a minute on a machine that is busy.
    environment = {**os.environ, "RAY_raylet_start_waiting_time_s": "240"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def commands(run: Callable[[list[str]], None], *each: list[str]) -> float:
    """Return how many rounds of these commands a second can be run, one after the other."""
    for command in each:
        run(command)
    began = time.monotonic()
    for _ in range(COMMANDS):
        for command in each:
            run(command)
    return COMMANDS / (time.monotonic() - began)


def genv(python: str, folder: Path) -> float:
    """Attach a device to an environment and detach it, by genv's command line."""
    smi = folder / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    environment = {**os.environ, "GENV_TMPDIR": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}

    def run(arguments: list[str]) -> None:
        command = [str(Path(python).with_name("genv")), *arguments]
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)

    run(["envs", "activate", "--eid", "one", "--uid", str(os.getuid()), "--pid", str(os.getpid())])
    attach = ["devices", "attach", "--eid", "one", "--count", "1"]
    return commands(run, attach, ["devices", "detach", "--eid", "one", "--index", "0"])


def our_commands(folder: Path, *each: list[str]) -> float:
    """Do it by the command line of ours."""
    environment = {**os.environ, "GPU_POOL_DEVICES": "A100-SXM4-80GB:1"}
    environment["GPU_POOL_URL"] = f"embedded:{folder}/commands.db"

    def run(arguments: list[str]) -> None:
        command = [sys.executable, "-m", "gpu_pool.cli", *arguments]
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)

    return commands(run, *each)


def scheduler(python: str) -> float:
    """Return how many commands a second simple_gpu_scheduler runs on one GPU."""
    program, count = str(Path(python).with_name("simple_gpu_scheduler")), 10 * COMMANDS
    began = time.monotonic()
    subprocess.run(
        [program, "--gpus", "0"],
        input="true\n" * count,
        text=True,
        capture_output=True,
        check=True,
        timeout=300,
    )
    return count / (time.monotonic() - began)


def run() -> Iterator[Line]:
    """Measure those that the environment has, and yield the report's lines."""
    python = os.environ.get(PEERS_PYTHON)
    if not python:
        raise Skipped(
            "--peers-python names no environment with ray, distributed, genv or simple-gpu-scheduler."
        )
    left_out = []
    for module, compare in COMPARED.items():
        if not has(python, module):
            left_out.append(f"{module} is not there")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield from compare(python, Path(folder))
        except subprocess.SubprocessError as error:
            left_out.append(f"{module} did not do it: {error!s:.120}")
    if left_out:
        raise Skipped("; ".join(left_out))


def with_ray(python: str, folder: Path) -> Iterator[Line]:
    """Set the service, and a pool without one, against reservations by Ray."""
    found = script(python, RAY, folder)["reserve"]
    with ours(folder) as (socket, _):
        yield _line("by the service, to Ray's placement groups", pairs(f"unix:{socket}"), found)
    os.environ["GPU_POOL_DEVICES"] = "A100-SXM4-80GB:1"
    yield _line(
        "by this user's own pool, to Ray's placement groups", pairs(f"embedded:{folder}/own.db"), found
    )


def with_dask(python: str, folder: Path) -> Iterator[Line]:
    """Set the service against Dask's semaphore, and against tasks that need a part of a resource."""
    found = script(python, DASK, folder)
    with ours(folder) as (socket, _):
        mine = pairs(f"unix:{socket}")
    yield _line("by the service, to Dask's semaphore", mine, found["reserve"])
    yield _line("by the service, to Dask's tasks with a resource", mine, found["task"])


def with_genv(python: str, folder: Path) -> Iterator[Line]:
    """Set two commands of ours against two of genv's."""
    take = ["request", "2%", "--keeper", str(os.getpid())]
    mine = our_commands(folder, take, ["release", "--all-mine"])
    yield _line("request and release, to genv's attach and detach", mine, genv(python, folder))


def with_scheduler(python: str, folder: Path) -> Iterator[Line]:
    """Set commands that run with a slice against commands that run with a GPU."""
    mine = our_commands(folder, ["run", "2%", "--", "true"])
    yield _line("gpu-pool run, to simple_gpu_scheduler's commands", mine, scheduler(python))


#: What is compared, by the module that has to be there.
COMPARED = {
    "ray": with_ray,
    "distributed": with_dask,
    "genv": with_genv,
    "simple_gpu_scheduler": with_scheduler,
}


def has(python: str, module: str) -> bool:
    """Whether the peers' environment has it."""
    look = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def _line(what: str, mine: float, theirs: float) -> Line:
    made_of = "one caller, one grant after the other, each given back at once"
    return Line(what, mine / theirs, made_of, ours=mine, yardstick=theirs, unit="grants/s")
