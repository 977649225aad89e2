"""A login node of the tests' Slurm cluster, with course files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager

from support.frontend import Frontend, frontend
from support.jupyter_env import JupyterEnv
from support.slurm import Slurm


@dataclass
class Site:
    """A login node, whose settings name a folder of course files."""

    slurm: Slurm
    env: JupyterEnv

    def course(self, name: str, text: str) -> None:
        """Write a course's file."""
        (self.env.folder / "courses" / f"{name}.yaml").write_text(text)

    def configure(self, **settings: object) -> None:
        """Set what a user does."""
        found = {
            "PoolSettings": {"courses_dir": f"{self.env.folder}/courses"},
            "SlurmSettings": {"gpu_memory": {"v100": 32, "t4": 16}, **settings},
        }
        (self.env.folder / "config" / "gpu_pool_config.json").write_text(json.dumps(found))

    @asynccontextmanager
    async def kernel(self, course: str, size: str = "40%") -> AsyncIterator[Frontend]:
        """Run a kernel of a course, with somebody in front of it."""
        manager = AsyncKernelManager(kernel_name=self.env.install(course, size, course=course))
        await manager.start_kernel()
        try:
            async with frontend(manager) as page:
                yield page
        finally:
            await manager.shutdown_kernel(now=True)

    def only_job(self) -> dict[str, str]:
        """Return what Slurm shows of the one job there is."""
        [job] = self.slurm.run("squeue", "--noheader", "--format=%A").split()
        return self.slurm.job(job)

    def command(self, *words: str, status: int = 0) -> str:
        """Run ``gpu-pool``, and return all that it printed."""
        line = [sys.executable, "-m", "gpu_pool.cli", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


def slurm_site(slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a site in the empty ``folder``, which the variables of this process name from now on."""
    url = f"slurm:{folder}/slurm.db"
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("GPU_POOL_URL", url)
    monkeypatch.setenv("JUPYTER_PATH", f"{folder}/data")
    monkeypatch.setenv("JUPYTER_DATA_DIR", f"{folder}/data")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", f"{folder}/config")
    for name in ("config", "courses"):
        (folder / name).mkdir()
    site = Site(slurm, JupyterEnv(folder, url))
    site.configure()
    return site
