"""A site whose GPUs are in parts by ``gres/mps``, and not in shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frontend import frontend
from support.nvml_stub import Machine
from support.slurm import Slurm, missing, slurm_cluster
from support.slurm_login import Login

_GPU = "gpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 0\ngpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), part="mps") as found:
        yield found


async def test_a_kernel_is_a_job_on_a_part_by_mps_and_says_what_limits_it(login: Login) -> None:
    async with frontend(await login.start("40% model=v100")) as page:
        await page.run("1").done()
        [job] = login.jobs()
        assert login.slurm.job(job)["TresPerNode"].endswith("mps:v100:40")
        lease = await login.env.only_lease()
        assert lease.enforcement is not None
        assert "gres/mps of Slurm counts" in lease.enforcement.compute.by


def test_in_a_job_the_pool_has_the_part_by_mps(slurm: Slurm, tmp_path: Path) -> None:
    driver = Machine(tmp_path, _GPU)
    command = f"{sys.executable} -m gpu_pool.cli status --json"
    options = ("--gres=mps:40", "--nodelist=n1")
    job = slurm.submit(command, *options, **driver.environment, TMPDIR=str(tmp_path))
    slurm.until(job, "COMPLETED")
    [device] = json.loads(slurm.output(job).read_text())["devices"]
    assert (device["uuid"], device["free_milli"]) == ("GPU-0", 400)
    whole = slurm.submit(command, "--gres=gpu:v100:1", **driver.environment, TMPDIR=str(tmp_path))
    slurm.until(whole, "COMPLETED")
    [device] = json.loads(slurm.output(whole).read_text())["devices"]
    assert device["free_milli"] == 1000
