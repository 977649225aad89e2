"""Course files of a site with Slurm: what they say of jobs, and one file for it and for Kubernetes."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from gpu_pool.cluster.notebooks import HomeVolume, Identity, Notebook
from gpu_pool.cluster.pod_choices import chosen_body
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import parse_course
from gpu_pool_client import NeverFits
from support.slurm import Slurm
from support.slurm_sites import Site, slurm_site

#: Of a site that has a Kubernetes cluster, too; tests of that read the same file.
EXAMPLE = Path(__file__).parents[2] / "examples/slurm-and-kubernetes/deep-learning.yaml"
#: Another such file.
BOTH = """\
title: Deep Learning
slices: [{name: Small, request: 40%}]
kubernetes: {kernel_image: "kernel:1", kernel_cpu: 2}
slurm:
  partition: gpu
  constraint: old
  time: 20min
  mem: 1GiB
  cpus_per_task: 2
  prologue:
    - export FROM_COURSE='it is set'
    - test -n "$FROM_COURSE"
"""
NOTEBOOK = Notebook("hub", "jupyter-ada", "u", "ada", "", "n1", "server:1", HomeVolume("c"), Identity())


@pytest.fixture
async def site(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    found = slurm_site(slurm, tmp_path, monkeypatch)
    yield found
    await found.env.close()


async def test_one_file_says_what_a_job_has_and_what_a_pod_has(site: Site) -> None:
    both = EXAMPLE.read_text()
    site.course("deep-learning", both)
    site.configure(time="50", mem="4G", cpus_per_task=7, prologue="exit 3")  # what the course says wins
    async with site.kernel("deep-learning") as page:
        cell = await page.run("import os; print(os.environ['COURSE_DATA'])").done()
        assert cell.outputs[-1] == "/shared/deep-learning\n"
        job = site.only_job()
    assert (job["Partition"], job["TimeLimit"], job["Comment"]) == ("gpu", "00:20:00", "deep-learning")
    assert (job["MinMemoryNode"], job["NumCPUs"]) == ("1G", "2")
    assert job["TresPerNode"].endswith("shard:t4:40")
    assert "pytorch-notebook" not in str(job)
    pod = chosen_body(KubernetesSettings(), parse_course("dl.yaml", both.encode()), NOTEBOOK)
    assert (pod.image, pod.cpu) == ("quay.io/jupyter/pytorch-notebook:cuda12-latest", 2.0)


def test_courses_check_shows_of_that_file_how_its_jobs_are_submitted() -> None:
    argv = [sys.executable, "-m", "gpu_pool.cli", "courses", "check", str(EXAMPLE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    options = "--partition=gpu --time=20 --mem=1024M --cpus-per-task=2"
    assert options in " ".join(done.stdout.split())


async def test_what_a_course_leaves_out_is_as_the_user_has_set_it(site: Site) -> None:
    site.course("dl", "title: T\nslices: [{name: S, request: 40%}]\nslurm: {time: 5min}\n")
    site.configure(time="50", cpus_per_task=3)
    async with site.kernel("dl") as page:
        await page.run("1").done()
        job = site.only_job()
    assert (job["TimeLimit"], job["NumCPUs"]) == ("00:05:00", "3")


async def test_a_reservation_is_used_and_what_slurm_refuses_of_a_course_is_said(site: Site) -> None:
    site.course("dl", BOTH)  # no node has the feature
    site.course("class", "title: T\nslices: [{name: S, request: 40%}]\nslurm: {reservation: class}\n")
    async with site.kernel("dl") as page:
        cell = await page.run("1").done()
        assert "Slurm refuses the kernel's job" in " ".join("".join(cell.outputs).split())
    user = getpass.getuser()
    site.slurm.run(
        *("scontrol", "create", "reservation", "ReservationName=class", "StartTime=now"),
        *("Duration=60", "Nodes=n2", f"Users={user}"),
    )
    try:
        async with site.kernel("class") as page:
            await page.run("1").done()
            assert site.only_job()["Reservation"] == "class"
    finally:
        site.slurm.cancel_all()
        site.slurm.run("scontrol", "delete", "ReservationName=class")


async def test_where_wckeys_are_tracked_the_job_has_the_courses(site: Site) -> None:
    site.course("dl", "title: T\nslices: [{name: S, request: 40%}]\n")
    configuration = site.slurm.folder / "slurm.conf"
    before = configuration.read_text()
    configuration.write_text(f"{before}TrackWCKey=yes\n")
    try:
        site.slurm.run("scontrol", "reconfigure")
        async with site.kernel("dl") as page:
            await page.run("1").done()
            assert site.only_job()["WCKey"] == "dl"
    finally:
        configuration.write_text(before)
        site.slurm.run("scontrol", "reconfigure")


async def test_a_course_gets_the_gpus_of_its_own_partition(site: Site) -> None:
    size = "title: T\nslices: [{name: S, request: 40%}]\n"
    site.course("elsewhere", f"{size}slurm: {{partition: large}}\n")  # which has no t4, as others get
    site.course("nowhere", f"{size}slurm: {{partition: nosuch}}\n")
    async with site.kernel("elsewhere") as page:
        await page.run("1").done()
        job = site.only_job()
        assert (job["Partition"], job["TresPerNode"].partition("shard:")[2]) == ("large", "v100:40")
    with pytest.raises(NeverFits, match="partition nosuch of Slurm has no GPU"):
        async with site.kernel("nowhere"):
            pass


def test_courses_check_says_how_the_jobs_are_submitted(site: Site) -> None:
    site.course("dl", BOTH)
    shown = " ".join(site.command("courses", "check", f"{site.env.folder}/courses").split())
    assert "On Slurm each kernel is a job with --partition=gpu --constraint=old --time=20" in shown
    assert "slurm, time: 20 minutes" in shown
    site.course("dl", BOTH.replace("20min", "0:20:00"))
    shown = " ".join(site.command("courses", "check", f"{site.env.folder}/courses", status=1).split())
    assert "dl.yaml, line 7: slurm, time: '0:20:00'" in shown


async def test_an_installed_kernel_runs_in_a_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.course("dl", "title: T\nslices: [{name: S, request: 40%}]\n")
    monkeypatch.setenv("GPU_POOL_COURSE", "dl")
    prefix = str(site.env.folder / "prefix")
    monkeypatch.setenv("JUPYTER_PATH", f"{prefix}/share/jupyter")
    install = ("kernels", "install", "40%", "--prefix", prefix, "--pool", site.env.url, "--json")
    site.command(*install)
    name = json.loads(site.command("kernels", "list", "--json"))["kernels"][0]["name"]
    monkeypatch.delenv("GPU_POOL_URL")  # the kernelspec names its pool
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("import os; print(os.environ['SLURM_JOB_ID'])")]
    client = NotebookClient(notebook, kernel_name=name, timeout=300)
    await client.async_execute()
    job = notebook.cells[0].outputs[0].text.strip()
    assert site.slurm.job(job)["Comment"] == "dl"
