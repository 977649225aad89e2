"""JupyterHub with DockerSpawner: every server is a container, and its kernels have slices of the GPUs.

docs/administrator/other-spawners.md says what each part is for. Add an
authenticator, and change what is written in capitals.
"""

import os
import sys

from dockerspawner import DockerSpawner

from gpu_pool_spawner import GPUPoolSpawnerMixin

#: Where containers reach this machine: the address of Docker's bridge.
MACHINE = "172.17.0.1"
#: Has JupyterHub of the same version as the Hub, JupyterLab, and jupyter-gpu-pool.
IMAGE = "localhost/gpu-pool-notebook:0.1.0"
COURSES = "/etc/gpu-pool/courses"
SOCKET = "/run/gpu-pool/gpu-pool.sock"


class CourseDockerSpawner(GPUPoolSpawnerMixin, DockerSpawner):  # type: ignore[misc]
    """DockerSpawner, with courses."""


c = get_config()  # type: ignore[name-defined]  # noqa: F821 - JupyterHub gives it to this file

c.JupyterHub.spawner_class = CourseDockerSpawner
c.JupyterHub.hub_ip = MACHINE
c.DockerSpawner.image = IMAGE
# A container that is kept has the course, and the kernels, of the time when it was made.
c.DockerSpawner.remove = True
c.DockerSpawner.volumes = {"gpu-pool-home-{username}": "/home/jovyan"}

c.GPUPoolSpawnerMixin.courses_dir = COURSES
c.GPUPoolSpawnerMixin.pool_url = f"http://{MACHINE}:10101/services/gpu-pool"
c.GPUPoolSpawnerMixin.hub_pool_url = f"unix:{SOCKET}"

if "GPU_POOL_DEVICES" not in os.environ:  # real GPUs: needs NVIDIA's Container Toolkit
    from docker.types import DeviceRequest

    c.DockerSpawner.extra_host_config = {
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])],
    }

# The pool. It runs outside all containers, as root, and the Hub starts it. Its own settings are in
# /etc/jupyter/gpu_pool_config.py, with the same courses: c.PoolSettings.courses_dir = COURSES
c.JupyterHub.services = [
    {
        "name": "gpu-pool",
        "url": f"http://{MACHINE}:10101",
        "command": [sys.executable, "-m", "gpu_pool.cli", "serve", "--socket", SOCKET],
        "oauth_no_confirm": True,
        "environment": {
            name: os.environ[name] for name in ("GPU_POOL_DEVICES", "PATH") if name in os.environ
        },
    }
]
c.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "access:services!service=gpu-pool"]}]
