"""A login node of a Slurm cluster: a Jupyter environment whose kernels are jobs."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_client.manager import AsyncKernelManager

from support.jupyter_env import JupyterEnv
from support.slurm import Slurm


@dataclass
class Login:
    """The login node: a Jupyter environment whose kernels are jobs."""

    slurm: Slurm
    env: JupyterEnv
    started: list[AsyncKernelManager]

    async def start(self, size: str) -> AsyncKernelManager:
        """Start a kernel of this size."""
        name = self.env.install(f"GPU {len(self.started)}", size)
        manager = AsyncKernelManager(kernel_name=name)
        self.started.append(manager)
        await manager.start_kernel()
        return manager

    def configure(self, **settings: object) -> None:
        """Set what a site does, before the first kernel starts."""
        lines = [f"c.SlurmSettings.{name} = {value!r}\n" for name, value in settings.items()]
        memory = 'c.SlurmSettings.gpu_memory = {"v100": 32, "t4": 16}\n'
        (self.env.folder / "config" / "gpu_pool_config.py").write_text("".join([memory, *lines]))

    async def close(self) -> None:
        """End its kernels, and close its pool."""
        for each in self.started:
            await each.shutdown_kernel(now=True)
        await self.env.close()

    def jobs(self) -> list[str]:
        return self.slurm.run("squeue", "--noheader", "--format=%A").split()
