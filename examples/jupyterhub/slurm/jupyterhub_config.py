"""JupyterHub with batchspawner: every server is a Slurm job, and its kernels share that job's part of a GPU.

docs/administrator/slurm-hub.md says what each part is for. Add an authenticator, and change what is written
in capitals. Users need accounts on this machine and on the nodes.
"""

from typing import Any

from batchspawner import SlurmSpawner

from gpu_pool_spawner import GPUPoolSpawnerMixin

COURSES = "/etc/gpu-pool/courses"
#: What the job of a course's server asks for: any of SlurmSpawner's req_ settings, without that prefix.
JOBS = {
    "intro": {"gres": "shard:40", "runtime": "1:00:00"},
    "thesis": {"gres": "gpu:1", "runtime": "8:00:00"},
}


class CourseSlurmSpawner(GPUPoolSpawnerMixin, SlurmSpawner):  # type: ignore[misc]
    """SlurmSpawner, with courses."""

    def get_req_subvars(self) -> dict[str, Any]:
        """Return what the job's script is made of. Called once the course is known to be the user's."""
        return {**super().get_req_subvars(), **JOBS.get(self.chosen_course() or "", {})}


c = get_config()  # type: ignore[name-defined]  # noqa: F821 - JupyterHub gives it to this file

c.JupyterHub.spawner_class = CourseSlurmSpawner
# The nodes reach the Hub there; not 127.0.0.1.
c.JupyterHub.hub_ip = "0.0.0.0"  # noqa: S104
# Nobody waits longer than that for a server's job on the Hub's page.
c.SlurmSpawner.start_timeout = 600
# A job without steps: the server, and its kernels with it, are the job itself.
c.SlurmSpawner.req_srun = ""

c.GPUPoolSpawnerMixin.courses_dir = COURSES
# Each server's pool is that of its job. The Hub's page shows what the cluster has.
c.GPUPoolSpawnerMixin.pool_url = "embedded:"
c.GPUPoolSpawnerMixin.hub_pool_url = "slurm:"
