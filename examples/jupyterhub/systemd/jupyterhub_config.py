"""JupyterHub with SystemdSpawner: every server is a unit of systemd, and its kernels have slices of the GPUs.

docs/administrator/other-spawners.md says what each part is for. Add an
authenticator, and change what is written in capitals. Users need accounts on
this machine.
"""

import os
import sys

from systemdspawner import SystemdSpawner

from gpu_pool_spawner import GPUPoolSpawnerMixin

COURSES = "/etc/gpu-pool/courses"
SOCKET = "/run/gpu-pool/gpu-pool.sock"


class CourseSystemdSpawner(GPUPoolSpawnerMixin, SystemdSpawner):  # type: ignore[misc]
    """SystemdSpawner, with courses."""


c = get_config()  # type: ignore[name-defined]  # noqa: F821 - JupyterHub gives it to this file

c.JupyterHub.spawner_class = CourseSystemdSpawner
# Never isolate_devices: servers would see no GPU.
c.SystemdSpawner.isolate_tmp = True
c.SystemdSpawner.mem_limit = "8G"

c.GPUPoolSpawnerMixin.courses_dir = COURSES
# Servers use the socket, where the pool sees who asks, and every process.
c.GPUPoolSpawnerMixin.pool_url = f"unix:{SOCKET}"

# The pool. It runs as root, and the Hub starts it. Its own settings are in
# /etc/jupyter/gpu_pool_config.py, with the same courses and the same users:
#   c.PoolSettings.courses_dir = COURSES
#   c.ServeApp.system_users = "{username}"
c.JupyterHub.services = [
    {
        "name": "gpu-pool",
        "url": "http://127.0.0.1:10101",
        "command": [
            *(sys.executable, "-m", "gpu_pool.cli", "serve"),
            *("--socket", SOCKET, "--mode", "0666"),
        ],
        "oauth_no_confirm": True,
        "environment": {
            name: os.environ[name] for name in ("GPU_POOL_DEVICES", "PATH") if name in os.environ
        },
    }
]
c.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "access:services!service=gpu-pool"]}]
