"""The example for DockerSpawner, with a real JupyterHub and a real Docker.

They are skipped where dockerspawner, Docker, its bridge, root or the image is missing.
``GPU_POOL_TEST_DOCKER_IMAGE`` names an image with JupyterHub and jupyter-gpu-pool.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path

import pytest

from gpu_pool_client import LeaseState
from gpu_pool_client._processes import pid_namespace
from support import example_hubs as example
from support.hub_with_proxy import ROOT, proxy_command

pytest.importorskip("dockerspawner", reason="dockerspawner is not installed: no extra has it")
EXAMPLE = ROOT / "examples/jupyterhub/docker/jupyterhub_config.py"
IMAGE = os.environ.get("GPU_POOL_TEST_DOCKER_IMAGE", "localhost/gpu-pool-notebook:0.1.0")
_DOCKER = """
c.DockerSpawner.image = {image!r}
c.DockerSpawner.prefix = settings["name"]
c.DockerSpawner.volumes = {{}}
c.Spawner.cmd = None
c.GPUPoolSpawnerMixin.pool_url = settings["url"] + "/services/gpu-pool"
c.GPUPoolSpawnerMixin.hub_pool_url = settings["pool"]
"""
#: Servers as system users, who are seen at the socket of a pool that knows no Hub.
_AT_THE_SOCKET = """
from dockerspawner import SystemUserSpawner
from gpu_pool_spawner import GPUPoolSpawnerMixin

class SystemUserCourseSpawner(GPUPoolSpawnerMixin, SystemUserSpawner):
    pass

c.JupyterHub.spawner_class = SystemUserCourseSpawner
c.SystemUserSpawner.host_homedir_format_string = str(Path.cwd() / "homes" / "{username}")
c.DockerSpawner.volumes = {str(Path(settings["socket"]).parent): "/run/gpu-pool"}
c.GPUPoolSpawnerMixin.pool_url = "unix:/run/gpu-pool/pool.sock"
del c.JupyterHub.services[0]["url"], c.JupyterHub.services[0]["oauth_no_confirm"]
c.JupyterHub.services[0]["command"][:0] = ["env", "--unset=JUPYTERHUB_SERVICE_URL"]
c.JupyterHub.load_roles = [each for each in c.JupyterHub.load_roles if each["name"] == "test"]
"""


def test_the_example_is_a_configuration() -> None:
    found = example.configuration(EXAMPLE, "DockerSpawner")
    assert found.DockerSpawner.remove is True


def docker(*command: str) -> str:
    said = subprocess.PIPE
    return subprocess.run(
        ["docker", *command], check=True, stdout=said, stderr=subprocess.STDOUT, text=True
    ).stdout


@pytest.fixture
def bridge() -> str:
    """Return this machine's address on Docker's bridge; skip if there is none, or no image."""
    if os.geteuid() != 0 or proxy_command() is None:
        pytest.skip("needs root, and configurable-http-proxy")
    try:
        shown = json.loads(docker("network", "inspect", "bridge"))
        docker("image", "inspect", IMAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no Docker with the image {IMAGE}: {error}")
    return str(shown[0]["IPAM"]["Config"][0].get("Gateway") or "172.17.0.1")


def container_of(user: str) -> tuple[str, dict[str, str]]:
    """Return the name of a user's container, and its variables."""
    (name,) = docker("ps", "--format", "{{.Names}}", "--filter", f"name=-{user}$").split()
    (shown,) = json.loads(docker("inspect", name))
    return name, dict(each.split("=", 1) for each in shown["Config"]["Env"])


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_container_is_its_user_by_its_token(bridge: str, tmp_path: Path) -> None:
    async with example.hub_of(EXAMPLE, tmp_path, _DOCKER.format(image=IMAGE), bridge) as hub:
        assert b"You are not in this course" in await example.refused(hub, "games", "bio")
        await example.start(hub, "games", "ml")
        name, told = container_of("games")
        assert (told["GPU_POOL_COURSE"], told["JUPYTERHUB_USER"]) == ("ml", "games")
        lease = await example.kernel_of(hub, "games", 2)
        assert (lease.holder.user, lease.holder.course, lease.state) == ("games", "ml", LeaseState.HELD)
        # Nobody sees its process: it ends when nobody renews it.
        docker("kill", name)
        await example.none_is_left(hub)

        # The container of the next course is another one.
        await example.stop(hub, "games")
        await example.start(hub, "games", "art")
        assert container_of("games")[1]["GPU_POOL_COURSE"] == "art"
        assert (await example.kernel_of(hub, "games", 5)).holder.course == "art"
        await example.stop(hub, "games")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_kernels_of_a_system_users_container_are_seen_at_the_socket(
    bridge: str, tmp_path: Path
) -> None:
    config = _DOCKER.format(image=IMAGE) + _AT_THE_SOCKET
    async with example.hub_of(EXAMPLE, tmp_path, config, bridge) as hub:
        (hub.folder / "homes" / "games").mkdir()
        os.chown(hub.folder / "homes" / "games", *pwd.getpwnam("games")[2:4])
        await example.start(hub, "games", "art")
        name, _ = container_of("games")
        lease = await example.kernel_of(hub, "games", 5)
        process = lease.holder.process
        assert (process.namespace, process.is_alive()) == (pid_namespace(), True)
        assert str(process.pid) in docker("top", name, "-eo", "pid").split()
        # Its end is seen: no heartbeat is waited for.
        docker("kill", name)
        await example.none_is_left(hub)
        await example.stop(hub, "games")
