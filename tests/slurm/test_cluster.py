"""The cluster that the other tests of this folder run in is Slurm as sites have it."""

from __future__ import annotations

import pytest

from gpu_pool.slurm.watch import JobQueueWatch
from support.slurm import Slurm

_SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('SLURM_SHARDS_ON_NODE'))"


def test_two_nodes_have_gpus_of_two_types_and_shards(slurm: Slurm) -> None:
    shown = slurm.run("sinfo", "--Node", "--noheader", "--partition=gpu", "--format=%N %G").splitlines()
    assert shown == ["n1 gpu:v100:2,shard:v100:200", "n2 gpu:t4:1,shard:t4:100"]


def test_a_job_is_told_its_gpu_and_its_shards(slurm: Slurm) -> None:
    assert slurm.python(_SHOW, "--gres=gpu:t4:1").split() == ["0", "None"]
    assert slurm.python(_SHOW, "--gres=shard:40", "--nodelist=n2").split() == ["0", "40"]


def test_what_is_taken_makes_the_next_job_wait(slurm: Slurm) -> None:
    first = slurm.submit("sleep 600", "--gres=gpu:t4:1")
    slurm.until(first, "RUNNING")
    second = slurm.submit("sleep 600", "--gres=gpu:t4:1")
    assert slurm.state(second) == "PENDING"
    slurm.run("scancel", first)
    slurm.until(second, "RUNNING")
    assert slurm.state(first) == "CANCELLED"


def test_what_a_person_has_set_about_its_output_hides_no_job(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("SQUEUE_STATES", "COMPLETED")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    job = slurm.submit("sleep 600", "--gres=gpu:t4:1")
    watch = JobQueueWatch()
    watch.look()
    assert list(watch.jobs) == [job]
