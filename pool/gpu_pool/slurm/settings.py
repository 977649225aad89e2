"""What a site, or a user, can set about the jobs of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from traitlets import Dict, Unicode
from traitlets.config import Configurable

from gpu_pool_client._traits import WholeNumber


class SlurmSettings(Configurable):
    """Settings of a pool ``slurm:``, under ``c.SlurmSettings`` in ``gpu_pool_config.py``."""

    partition = Unicode("", help="The partition of the jobs; empty for Slurm's default one.").tag(config=True)
    account = Unicode("", help="The account that they are charged to; empty for the user's default.").tag(
        config=True
    )
    qos = Unicode("", help="Their quality of service; empty for the default.").tag(config=True)
    constraint = Unicode("", help="The features that their nodes must have, as for sbatch --constraint.").tag(
        config=True
    )
    reservation = Unicode("", help="The reservation that they are part of; empty for none.").tag(config=True)
    time = Unicode(
        "", help="Their time limit, as for sbatch --time: 4:00:00; empty for that of the partition."
    ).tag(config=True)
    mem = Unicode(
        "", help="Their memory (not of the GPU), as for sbatch --mem: 8G; empty for the default."
    ).tag(config=True)
    cpus_per_task = WholeNumber(0, min=0, max=10_000, help="Their processors; 0 for the default.").tag(
        config=True
    )
    prologue = Unicode(
        "", help="Lines of shell that the jobs run first, such as: module load cuda. Empty for none."
    ).tag(config=True)
    gpu_memory = Dict(
        help="""The memory of GPUs in GiB by their type in Slurm, which does not know it: {"v100": 32}. A type
        whose name says it, such as a100_80gb, needs none. Others can be had as a whole only.""",
    ).tag(config=True)

    def options(self) -> Iterator[str]:
        """Yield what is set as options of sbatch."""
        names = ("partition", "account", "qos", "constraint", "reservation", "time", "mem")
        for name in names:
            if value := getattr(self, name):
                yield f"--{name}={value}"
        if self.cpus_per_task:
            yield f"--cpus-per-task={self.cpus_per_task}"
