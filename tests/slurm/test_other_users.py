"""A user without privileges on a site that shows nobody the jobs of others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from support.jupyter_env import JupyterEnv
from support.pools import running
from support.slurm import Slurm, missing, slurm_cluster
from support.users import NOBODY

#: Runs a cell in a kernel, and prints what it shows; as another user, who may be unable to read what is
#: imported later, and so sees no more than how the cell waits.
_CELL = """
import asyncio, encodings.idna, importlib, importlib.readers, os, pkgutil
import gpu_pool.slurm.backend, gpu_pool_client, gpu_pool_provisioner, jupyter_client
from jupyter_client.manager import AsyncKernelManager
for package in (gpu_pool, gpu_pool_client, gpu_pool_provisioner, jupyter_client):
    for each in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(each.name)
        except ImportError:
            pass
os.setgroups([])
os.setgid({user})
os.setuid({user})
def show(message):
    content = message["content"]
    said = content.get("evalue") or content.get("data", {{}}).get("text/plain", "")
    print(" ".join(said.split()), flush=True)
async def main():
    manager = AsyncKernelManager(kernel_name={name!r})
    await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    await client.wait_for_ready(timeout=100)
    await client.execute_interactive("1", output_hook=show)
asyncio.run(main())
"""
#: Says which jobs of that user's own are known by their names, and of which types a GPU is free.
_LOOK = """
import encodings.idna, os
from gpu_pool.slurm.watch import JobQueueWatch
os.setgroups([])
os.setgid({user})
os.setuid({user})
watch = JobQueueWatch()
watch.keep_free_types("hidden")
watch.look()
print(watch.trouble, sorted(watch.own), sorted(watch.free_types), flush=True)
"""
_MORE = """\
PrivateData=jobs
PartitionName=hidden Nodes=n1,n2 Hidden=YES MaxTime=1:00:00 DefaultTime=30:00
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-slurm-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster of root's, which hides jobs from whoever they are not of."""
    if why := missing() or ("" if os.geteuid() == 0 else "only root can be other users"):
        pytest.skip(why)
    (folder / "cluster").mkdir()
    with slurm_cluster(folder / "cluster", _MORE) as found:
        yield found


@contextmanager
def _cell_of_nobody(
    slurm: Slurm, folder: Path, size: str, monkeypatch: pytest.MonkeyPatch, partition: str = ""
) -> Iterator[IO[str]]:
    """Run a cell of that user in a kernel that is a job, and let what it shows be read."""
    home = folder / "home"
    (home / "config").mkdir(parents=True)
    (home / "config" / "gpu_pool_config.py").write_text(
        f'c.SlurmSettings.gpu_memory = {{"t4": 16}}\nc.SlurmSettings.partition = {partition!r}\n'
    )
    name = JupyterEnv(home, "").install("GPU", size)
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    for variable in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(variable, slurm.environment[variable])
    own = {"HOME": "", "JUPYTER_PATH": "data", "JUPYTER_DATA_DIR": "data", "JUPYTER_CONFIG_DIR": "config"}
    for variable, where in own.items():
        monkeypatch.setenv(variable, str(home / where))
    monkeypatch.setenv("GPU_POOL_URL", f"slurm:{home}/store.db")
    monkeypatch.chdir(home)
    with running(_CELL.format(name=name, user=NOBODY)) as process:
        assert process.stdout is not None
        yield process.stdout


def test_where_others_jobs_are_hidden_the_cell_says_that_its_position_is_not_known(
    slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = slurm.submit("sleep 600", "--gres=gpu:t4:1")
    slurm.until(taken, "RUNNING")
    with _cell_of_nobody(slurm, folder, "1 model=t4", monkeypatch) as shown:
        told = ""
        while "Its position is not known: this cluster hides others' jobs." not in told:
            line = shown.readline()
            assert line, told
            told += line
        assert "in the queue of" not in told
        [job] = [each for each in slurm.run("squeue", "--noheader", "--format=%A").split() if each != taken]
        assert slurm.job(job)["UserId"].startswith("nobody(")


def test_in_a_hidden_partition_kernels_start_and_jobs_are_known_by_their_names(
    slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = slurm.submit("sleep 600", "--gres=gpu:t4:1")
    slurm.until(taken, "RUNNING")
    with _cell_of_nobody(slurm, folder, "1 model=t4", monkeypatch, "hidden") as shown:
        told = ""
        while "Its position is not known" not in told:
            line = shown.readline()
            assert line, told
            told += line
        [job] = [each for each in slurm.run("squeue", "--noheader", "--format=%A").split() if each != taken]
        name = slurm.job(job)["JobName"]
        with running(_LOOK.format(user=NOBODY)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f" {[name]} ['v100']\n"
