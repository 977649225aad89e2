"""A notebook server in a Slurm job: its kernels share the part of a GPU that the job was given."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.jupyter_env import JupyterEnv
from support.nvml_stub import Machine
from support.slurm import Slurm

_PROGRAM = f"{sys.executable} -m gpu_pool.cli"
#: What the driver of n1 shows: its two GPUs, whatever a job was given.
_GPUS = """\
gpu GPU-0 Tesla V100-SXM2-32GB
memory 32768 0
gpu GPU-1 Tesla V100-SXM2-32GB
memory 32768 0
"""


@dataclass(frozen=True)
class Node:
    """A node with the stand-in of a driver."""

    slurm: Slurm
    environment: dict[str, str]

    def run(self, script: str, *options: str) -> str:
        """Run a shell script in a job with these options, to its end; return what it printed."""
        job = self.slurm.submit(script, "--nodelist=n1", *options, **self.environment)
        self.slurm.until(job, "COMPLETED")
        return self.slurm.output(job).read_text()

    def status(self, script: str, *options: str) -> Any:
        """Run a shell script that ends with ``gpu-pool status --json``."""
        return json.loads(self.run(f"{script}\n{_PROGRAM} status --json", *options))


@pytest.fixture
def node(slurm: Slurm, tmp_path: Path) -> Node:
    driver = Machine(tmp_path, _GPUS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return Node(slurm, {**driver.environment, "TMPDIR": str(temporary)})


def test_forty_of_a_hundred_shards_are_forty_percent_of_that_gpu(node: Node) -> None:
    status = node.status("", "--gres=shard:40")
    [device] = status["devices"]
    assert (device["uuid"], device["free_milli"]) == ("GPU-0", 400)
    assert device["free_memory_mib"] == 13108


def test_it_is_the_gpu_that_slurm_has_chosen(node: Node, slurm: Slurm) -> None:
    first = slurm.submit("sleep 600", "--gres=shard:90", "--nodelist=n1")
    slurm.until(first, "RUNNING")
    [device] = node.status("", "--gres=shard:40")["devices"]
    assert (device["uuid"], device["free_milli"]) == ("GPU-1", 400)


def test_whole_gpus_are_wholly_the_jobs(node: Node) -> None:
    devices = node.status("", "--gres=gpu:v100:2")["devices"]
    assert [(each["uuid"], each["free_milli"]) for each in devices] == [("GPU-0", 1000), ("GPU-1", 1000)]


def test_two_commands_share_it_and_a_third_waits_for_one_to_end(node: Node) -> None:
    told = node.run(
        f"""
for number in 1 2; do
    mkfifo $TMPDIR/started-$number $TMPDIR/end-$number
    {_PROGRAM} run 20% -- sh -c "echo > $TMPDIR/started-$number; read end < $TMPDIR/end-$number" &
    read started < $TMPDIR/started-$number
done
{_PROGRAM} run 20% --timeout 1s -- true
echo status $?
{_PROGRAM} status
echo > $TMPDIR/end-1
{_PROGRAM} run 20% -- echo the third has it
echo > $TMPDIR/end-2
wait
""",
        "--gres=shard:40",
    )
    assert "status 6" in told
    assert told.count(" Slurm job ") == 2
    assert "the third has it" in told


@pytest.mark.parametrize("size", ["41%", "13.5GiB"])
def test_more_than_the_job_was_given_is_refused_with_what_to_do(node: Node, size: str) -> None:
    told = node.run(f"{_PROGRAM} run {size} -- true; echo status $?", "--gres=shard:40")
    assert "was given 40% of a GPU, as its shards say." in told
    assert "Ask for 40% or less" in told
    assert "status 3" in told


_NOTEBOOKS = """
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from jupyter_client.manager import AsyncKernelManager
from support.frontend import frontend
from support.jupyter_env import JupyterEnv

SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPU_POOL_MEMORY_MIB'])"

async def main():
    env = JupyterEnv(Path("."), "embedded:")
    kernels = [AsyncKernelManager(kernel_name="gpu-20") for _ in range(3)]
    async with AsyncExitStack() as pages:
        cells = []
        for each in kernels:
            await each.start_kernel()
            page = await pages.enter_async_context(frontend(each))
            cells.append(page.run(SHOW))
            if each is not kernels[2]:
                await cells[-1].done()
        await cells[2].shows("Waiting for a GPU slice of 20%")
        await kernels[0].shutdown_kernel(now=True)
        await cells[2].done()
        for each in cells:
            print("shown:", each.outputs)
    for each in kernels[1:]:
        await each.shutdown_kernel(now=True)

asyncio.run(main())
"""


def test_kernels_of_a_server_share_it_and_are_told_when_the_job_ends(node: Node, tmp_path: Path) -> None:
    JupyterEnv(tmp_path, "embedded:").install("GPU 20%", "20%")
    (tmp_path / "notebooks.py").write_text(_NOTEBOOKS)
    variables = f"JUPYTER_PATH={tmp_path}/data PYTHONPATH={Path(__file__).parents[1]}"
    told = node.run(f"{variables} {sys.executable} {tmp_path}/notebooks.py", "--gres=shard:40", "--time=9")
    shown = [line for line in told.splitlines() if line.startswith("shown: ")]
    assert len(shown) == 3
    for line in shown:
        assert re.search(
            r"Slurm job \d+ ends in [5-9]min(\d0s)?, and this kernel with it: the time limit", line
        )
        assert line.endswith(", 'GPU-0 6553\\n']")


def test_a_lease_names_its_job_and_that_jobs_end(node: Node) -> None:
    status = f"{_PROGRAM} status --json"
    told = node.run(
        f"{_PROGRAM} run 20% --quiet -- {status}; scontrol show job $SLURM_JOB_ID", "--gres=shard:40"
    )
    found, _, shown = told.partition("\nJobId=")
    [lease] = json.loads(found)["leases"]
    job, end = shown.split()[0], re.search(r"EndTime=(\S+)", shown)
    assert end is not None
    assert lease["job"] == f"Slurm job {job}"
    assert lease["job_ends_at"] == datetime.fromisoformat(end[1]).timestamp()


def test_an_end_that_an_administrator_moves_is_known_when_it_is_asked_next(node: Node) -> None:
    told = node.run(
        f"""
{_PROGRAM} run 20% --quiet -- sh -c '
{_PROGRAM} status --json > $TMPDIR/before
scontrol update JobId=$SLURM_JOB_ID TimeLimit=+20
{_PROGRAM} status --json > $TMPDIR/after'
""",
        "--gres=shard:40",
        "--time=9",
    )
    assert told == ""
    temporary = Path(node.environment["TMPDIR"])
    ends = [
        json.loads((temporary / name).read_text())["leases"][0]["job_ends_at"] for name in ("before", "after")
    ]
    assert ends[1] == ends[0] + 1200


def test_the_store_is_in_the_jobs_temporary_folder(node: Node, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    job = node.slurm.submit(f"{_PROGRAM} status", "--gres=shard:40", HOME=str(home), **node.environment)
    node.slurm.until(job, "COMPLETED")
    temporary = Path(node.environment["TMPDIR"])
    assert [each.name for each in temporary.glob("*/store.db")] == ["store.db"]
    assert f"-slurm-{job}" in next(temporary.iterdir()).name
    assert not list(home.rglob("store.db"))


def test_another_job_on_the_node_has_a_pool_of_its_own(node: Node) -> None:
    job = node.slurm.submit(
        f"{_PROGRAM} run 40% -- sleep 600", "--gres=shard:40", "--nodelist=n1", **node.environment
    )
    node.slurm.until(job, "RUNNING")
    [device] = node.status("", "--gres=shard:40")["devices"]
    assert device["free_milli"] == 400


def test_where_slurm_does_not_say_what_a_shard_is_nothing_is_granted(node: Node) -> None:
    told = node.run(f"PATH=/nowhere {_PROGRAM} run 2% -- /bin/true; echo status $?", "--gres=shard:40")
    assert "Slurm does not say how many shards a GPU has there: Slurm's scontrol cannot be run" in told
    assert "Nothing is granted until it does." in told
    assert "status 3" in told
    whole = node.run(f"PATH=/nowhere {_PROGRAM} run 2% -- /bin/echo runs", "--gres=gpu:v100:1")
    assert "runs" in whole


def test_doctor_says_what_the_job_was_given(node: Node) -> None:
    told = node.run(f"{_PROGRAM} doctor --json || true", "--gres=shard:40", "--time=20")
    [check] = [each for each in json.loads(told)["checks"] if each["name"] == "slurm"]
    assert check["state"] == "ok"
    assert re.fullmatch(r"Slurm job \d+ on n1: 40 shards, 40% of GPU 0; it ends in 1\dmin.*", check["text"])
