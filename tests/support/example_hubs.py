"""A real JupyterHub as an example of ours configures it, with what a test has of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from traitlets.config.loader import Config, PyFileConfigLoader

from gpu_pool_client import Lease, LeaseState, connect
from support.hub_with_proxy import Hub
from support.jupyter_env import eventually
from support.ports import free_ports

COURSES = {
    "ml": "title: ML\nwho: {groups: [ml]}\nslices: [{name: Small, request: 2%}]\n",
    "art": "title: Art\nwho: {users: [games]}\nslices: [{name: Small, request: 5%}]\n",
    "bio": "title: Biology\nwho: {users: [alan]}\nslices: [{name: Small, request: 2%}]\n",
}
#: Accounts that every Debian has.
GROUPS = {"ml": ["games", "nobody"]}
#: What this test has and an administrator has not: other ports, and names in place of those in capitals.
_TEST = """
settings = json.loads(os.environ["EXAMPLE_OF_THIS_TEST"])
load_subconfig(settings["example"])
c.Spawner.args = []
c.Spawner.environment = {{"HOME": "/tmp"}}
c.GPUPoolSpawnerMixin.courses_dir = str(Path.cwd() / "courses")
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


def configuration(example: Path, of: str) -> Config:
    """Return what an example configures; fail if its spawner is no ``of`` with courses and these traits."""
    found: Config = PyFileConfigLoader(str(example)).load_config()
    spawner = found.JupyterHub.spawner_class
    assert [each.__name__ for each in spawner.__mro__[1:3]] == ["GPUPoolSpawnerMixin", of]
    for name in (of, "GPUPoolSpawnerMixin"):
        assert set(found[name]) <= set(spawner.class_traits())
    return found


@asynccontextmanager
async def hub_of(example: Path, folder: Path, more: str, address: str = "127.0.0.1") -> AsyncIterator[Hub]:
    """Run it, with ``more`` of a configuration, which finds the test's ``settings``."""
    (port,) = free_ports(1)
    (folder / "run").mkdir()
    for each in (folder, *folder.parents[:2], folder / "run"):
        each.chmod(0o755)  # servers are other users'
    hub = Hub(folder / "hub", GROUPS, COURSES, config=_TEST.format(more=more))
    hub.pool = f"unix:{folder}/run/pool.sock"
    settings = {
        "example": str(example),
        "name": f"test-{port}",
        "url": f"http://{address}:{port}",
        "socket": str(folder / "run/pool.sock"),
        "pool": hub.pool,
        "token": hub.token,
    }
    (hub.folder / "gpu_pool_config.py").write_text(
        f"c.PoolSettings.courses_dir = {str(hub.courses)!r}\n"
        'c.ServeApp.ttl, c.ServeApp.system_users = 6, "{username}"\n'
    )
    hub.variables["EXAMPLE_OF_THIS_TEST"] = json.dumps(settings)
    hub.variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    await hub.start()
    try:
        yield hub
    finally:
        await hub.end()


async def start(hub: Hub, user: str, course: str) -> None:
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", {"course": course})
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready(user))


async def refused(hub: Hub, user: str, course: str) -> bytes:
    """Return with what words a server is refused."""
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", {"course": course})
    assert answer.code == 403, answer.body
    return bytes(answer.body)


async def stop(hub: Hub, user: str) -> None:
    await hub.api("DELETE", f"users/{user}/server")
    await eventually(
        lambda: hub.api("GET", f"users/{user}"), lambda seen: not json.loads(seen.body)["servers"]
    )


async def kernel_of(hub: Hub, user: str, percent: int) -> Lease:
    """Start a kernel; return its lease."""
    answer = await hub.api("POST", f"/user/{user}/api/kernels", {"name": f"python3-gpu-{percent}pct"})
    assert answer.code == 201, hub.log
    (found,) = [each for each in await leases(hub) if each.holder.user == user]
    return found


async def leases(hub: Hub) -> list[Lease]:
    async with connect(hub.pool) as pool:
        return [each for each in (await pool.status()).leases if each.state is not LeaseState.ENDED]


async def none_is_left(hub: Hub) -> None:
    await eventually(lambda: leases(hub), lambda seen: not seen, within=60)
