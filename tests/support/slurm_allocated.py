"""A shell of ``salloc`` in a Slurm job of several nodes, of which each has a stand-in for NVIDIA's driver."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import Holder, parse_request
from support.jupyter_env import JupyterEnv
from support.nvml_stub import Machine
from support.slurm import Slurm

#: What the drivers of n1 and n2 show.
_GPUS = {
    "n1": "gpu GPU-0 Tesla V100-SXM2-32GB\nmemory 32768 0\ngpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\n",
    "n2": "gpu GPU-t Tesla T4\nmemory 15360 0\n",
}
#: Sets by which driver a step sees its node's GPUs.
_PROLOGUE = '#!/bin/sh\necho "export NVML_STUB_SCENARIO={}/$SLURMD_NODENAME/scenario.txt"\n'


def write_drivers(folder: Path) -> Path:
    """Write what the drivers of both nodes show, where both can read it; return their ``TaskProlog``."""
    for name, gpus in _GPUS.items():
        (folder / name).mkdir()
        Machine(folder / name, gpus)
    prologue = folder / "prologue"
    prologue.write_text(_PROLOGUE.format(folder))
    prologue.chmod(0o755)
    return prologue


@dataclass
class Allocated:
    """A shell of ``salloc``, which runs on none of its nodes."""

    slurm: Slurm
    job: str
    env: JupyterEnv
    started: list[AsyncKernelManager]

    async def start(self, size: str, **variables: str) -> AsyncKernelManager:
        name = self.env.install(f"GPU {len(self.started)}", size, env=variables)
        manager = AsyncKernelManager(kernel_name=name)
        self.started.append(manager)
        await manager.start_kernel()
        return manager

    async def ask(self, size: str) -> None:
        """Have a slice for a moment: the nodes are asked for their GPUs by then."""
        holder = Holder("ada", yields=True)
        lease = await self.env.pool.request(parse_request(size), holder, uuid.uuid4().hex)
        await self.env.pool.release(lease.id)

    async def is_empty(self) -> bool:
        """Whether no lease lives and no step runs, and nothing is left of any."""
        folder = self.env.folder / "data" / "gpu-pool-jobs"
        left = list(folder.iterdir()) if folder.is_dir() else []
        return await self.env.is_empty() and not self.steps() and not left

    def steps(self) -> list[str]:
        """Return the ids of the job's steps."""
        shown = self.slurm.run("squeue", "--noheader", "--steps", f"--jobs={self.job}", "--format=%i")
        return [each for each in shown.split() if each.rpartition(".")[2].isdecimal()]


#: Allocates, with these options of ``salloc``.
Allocate = Callable[..., Allocated]


@asynccontextmanager
async def allocating(
    slurm: Slurm, home: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Allocate]:
    """Return what allocates; the kernels of what was allocated end with it, and its pools are closed.

    ``home`` is a folder that all nodes have, and ``own`` one that this machine alone may have.
    """
    found: list[Allocated] = []

    def do(*options: str) -> Allocated:
        slurm.run("salloc", "--no-shell", *options)
        [job] = slurm.run("squeue", "--noheader", "--format=%A").split()
        given = slurm.job(job)
        (own / "temporary").mkdir()
        variables = {
            **{name: slurm.environment[name] for name in ("PATH", "SLURM_CONF")},
            **Machine(own).environment,
            "TMPDIR": f"{own}/temporary",
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": given["NodeList"],
            "SLURM_JOB_NUM_NODES": given["NumNodes"],
            "JUPYTER_PATH": f"{home}/data",
            "JUPYTER_DATA_DIR": f"{home}/data",
            "JUPYTER_CONFIG_DIR": f"{home}/config",
            "JUPYTER_RUNTIME_DIR": f"{own}/runtime",
            # This process has one pool for each URL, and a job has not more than one store.
            "GPU_POOL_URL": f"embedded:{own}/store.db",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found.append(Allocated(slurm, job, JupyterEnv(home, variables["GPU_POOL_URL"]), []))
        return found[-1]

    yield do
    for each in found:
        for manager in each.started:
            await manager.shutdown_kernel(now=True)
        await each.env.close()
