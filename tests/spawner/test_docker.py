"""The example for DockerSpawner, with a real JupyterHub and a real Docker.

They are skipped where dockerspawner, Docker, its bridge, root or the image is missing.
``GPU_POOL_TEST_DOCKER_IMAGE`` names an image with JupyterHub and jupyter-gpu-pool.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from traitlets.config.loader import Config, PyFileConfigLoader

from gpu_pool_client import Lease, LeaseState, connect
from gpu_pool_client._processes import pid_namespace
from support.hub_with_proxy import ROOT, Hub, proxy_command
from support.jupyter_env import eventually
from support.ports import free_ports

dockerspawner = pytest.importorskip("dockerspawner", reason="dockerspawner is not installed: no extra has it")
EXAMPLE = ROOT / "examples/jupyterhub/docker/jupyterhub_config.py"
IMAGE = os.environ.get("GPU_POOL_TEST_DOCKER_IMAGE", "localhost/gpu-pool-notebook:0.1.0")
COURSES = {
    "ml": "title: ML\nwho: {groups: [ml]}\nslices: [{name: Small, request: 2%}]\n",
    "art": "title: Art\nwho: {users: [games]}\nslices: [{name: Small, request: 5%}]\n",
    "bio": "title: Biology\nwho: {users: [alan]}\nslices: [{name: Small, request: 2%}]\n",
}
#: What this test has and an administrator has not: other ports, and names in place of those in capitals.
_TEST = """
settings = json.loads(os.environ["DOCKER_OF_THIS_TEST"])
load_subconfig(settings["example"])
c.DockerSpawner.image = settings["image"]
c.DockerSpawner.prefix = settings["prefix"]
c.DockerSpawner.volumes = {{}}
c.Spawner.cmd = None
c.Spawner.args = []
c.Spawner.environment = {{"HOME": "/tmp"}}
c.GPUPoolSpawnerMixin.courses_dir = str(Path.cwd() / "courses")
c.GPUPoolSpawnerMixin.pool_url = settings["url"] + "/services/gpu-pool"
c.GPUPoolSpawnerMixin.hub_pool_url = settings["pool"]
c.JupyterHub.services[0]["url"] = settings["url"]
c.JupyterHub.services[0]["command"] = [
    *(sys.executable, "-m", "gpu_pool.cli", "serve", "--socket", settings["socket"]),
    *("--store", str(Path.cwd() / "served.db"), "--mode", "0666"),
]
c.JupyterHub.services[0]["environment"]["JUPYTER_CONFIG_DIR"] = str(Path.cwd())
c.JupyterHub.services.append({{"name": "test", "api_token": settings["token"]}})
c.JupyterHub.load_roles.append(
    {{
        "name": "test",
        "services": ["test"],
        "scopes": ["admin:users", "admin:servers", "access:servers", "tokens"],
    }}
)
{more}
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
    found: Config = PyFileConfigLoader(str(EXAMPLE)).load_config()
    spawner = found.JupyterHub.spawner_class
    assert [each.__name__ for each in spawner.__mro__[1:3]] == ["GPUPoolSpawnerMixin", "DockerSpawner"]
    for name in ("DockerSpawner", "GPUPoolSpawnerMixin"):
        assert set(found[name]) <= set(spawner.class_traits())
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


Start = Callable[[str], AbstractAsyncContextManager[Hub]]


@pytest.fixture
def started(bridge: str, tmp_path: Path) -> Start:
    """Return what starts a Hub as the example says, with more of a configuration."""

    @asynccontextmanager
    async def start(more: str) -> AsyncIterator[Hub]:
        (port,) = free_ports(1)
        folder = tmp_path / "run"
        folder.mkdir(mode=0o755)
        for each in (tmp_path, *tmp_path.parents[:2]):
            each.chmod(0o755)
        hub = Hub(tmp_path / "hub", {"ml": ["games", "nobody"]}, COURSES, config=_TEST.format(more=more))
        settings = {
            "example": str(EXAMPLE),
            "image": IMAGE,
            "prefix": f"test-{port}",
            "url": f"http://{bridge}:{port}",
            "socket": str(folder / "pool.sock"),
            "pool": f"unix:{folder}/pool.sock",
            "token": hub.token,
        }
        hub.pool = settings["pool"]
        (hub.folder / "gpu_pool_config.py").write_text(
            f"c.PoolSettings.courses_dir = {str(hub.courses)!r}\n"
            'c.ServeApp.ttl, c.ServeApp.system_users = 6, "{username}"\n'
        )
        hub._more["DOCKER_OF_THIS_TEST"] = json.dumps(settings)
        hub._more["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        await hub.start()
        try:
            yield hub
        finally:
            await hub.end()
            if left := docker("ps", "-aq", "--filter", f"name={settings['prefix']}").split():
                docker("rm", "-f", *left)

    return start


async def server_of(hub: Hub, user: str, course: str) -> dict[str, str]:
    """Start a server; return its container's variables."""
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", {"course": course})
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready(user), within=120)
    (name,) = docker("ps", "--format", "{{.Names}}", "--filter", f"name=-{user}").split()
    (shown,) = json.loads(docker("inspect", name))
    return dict(each.split("=", 1) for each in shown["Config"]["Env"]) | {"container": name}


async def kernel_of(hub: Hub, user: str, percent: int) -> Lease:
    """Start a kernel; return its lease, once the kernel's process is attached or known not to be."""
    path = f"/user/{user}/api/kernels"
    answer = await hub.api("POST", path, {"name": f"python3-gpu-{percent}pct"})
    assert answer.code == 201, docker("logs", *docker("ps", "-q", "--filter", f"name=-{user}").split())
    (found,) = [each for each in await leases(hub) if each.holder.user == user]
    return found


async def leases(hub: Hub) -> list[Lease]:
    async with connect(hub.pool) as pool:
        return [each for each in (await pool.status()).leases if each.state is not LeaseState.ENDED]


async def none_is_left(hub: Hub) -> None:
    async def none() -> bool:
        return not await leases(hub)

    await eventually(none, within=60)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_container_is_its_user_by_its_token(started: Start) -> None:
    async with started("") as hub:
        assert b"You are not in this course" in (await _refused(hub, "games", "bio"))
        told = await server_of(hub, "games", "ml")
        assert (told["GPU_POOL_COURSE"], told["JUPYTERHUB_USER"]) == ("ml", "games")
        lease = await kernel_of(hub, "games", 2)
        assert (lease.holder.user, lease.holder.course, lease.state) == ("games", "ml", LeaseState.HELD)
        # Nobody sees its process: it ends when nobody renews it.
        docker("kill", told["container"])
        await none_is_left(hub)

        # The container of the next course is another one.
        await eventually(lambda: _is_gone(hub, "games"), within=60)
        told = await server_of(hub, "games", "art")
        assert told["GPU_POOL_COURSE"] == "art"
        assert (await kernel_of(hub, "games", 5)).holder.course == "art"


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_kernels_of_a_system_users_container_are_seen_at_the_socket(started: Start) -> None:
    async with started(_AT_THE_SOCKET) as hub:
        for user in ("games", "nobody"):
            (hub.folder / "homes" / user).mkdir()
            os.chown(hub.folder / "homes" / user, *pwd.getpwnam(user)[2:4])
        told = await server_of(hub, "games", "art")
        lease = await kernel_of(hub, "games", 5)
        process = lease.holder.process
        assert (process.namespace, process.is_alive()) == (pid_namespace(), True)
        pids = docker("top", told["container"], "-eo", "pid").split()[1:]
        assert str(process.pid) in pids
        # Its end is seen: no heartbeat is waited for.
        docker("kill", told["container"])
        await none_is_left(hub)


async def _refused(hub: Hub, user: str, course: str) -> bytes:
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", {"course": course})
    assert answer.code == 403, answer.body
    return bytes(answer.body)


async def _is_gone(hub: Hub, user: str) -> bool:
    await hub.api("DELETE", f"users/{user}/server")
    found: dict[str, Any] = json.loads((await hub.api("GET", f"users/{user}")).body)
    return not found["servers"]
