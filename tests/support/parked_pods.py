"""Students who share one GPU that the pool divides, each with a notebook server whose kernels are pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_pool.cluster.dialects.shared import claim_name
from gpu_pool_client import Lease, LeaseState, Pool, connect
from support.agent_reports import ACCOUNT, reporting
from support.control_plane import Cluster
from support.hub import HubService
from support.jupyter_env import JupyterEnv
from support.pod_pages import Page, jupyter, opened
from support.server import Server
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

GPU = "GPU-gpu-0"
CLAIM = claim_name("gpu-pool", GPU)
#: Seconds in which a pod is there, on two cores that have other things to do.
LONG = 120
#: Prints what a kernel has kept, and which GPU it sees.
KEPT = "import os; print(kept, os.environ.get('CUDA_VISIBLE_DEVICES'))"


@dataclass
class Students:
    """A service whose kernels give way after a second, and the notebook servers of ada and bob."""

    service: HubService
    #: As an administrator.
    pool: Pool
    #: Of the agent of the GPU's node.
    token: str
    cluster: Cluster
    namespace: str
    folder: Path
    stack: AsyncExitStack

    async def server(self, user: str) -> tuple[Server, JupyterEnv]:
        """Start somebody's notebook server, with a folder of its own."""
        folder = self.folder / user
        folder.mkdir()
        env = JupyterEnv(folder, self.service.url)
        variables = {
            "GPU_POOL_TOKEN": f"of-{user}",
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        return await self.stack.enter_async_context(jupyter(env, **variables)), env

    async def notebook(self, user: str) -> tuple[Page, Server]:
        """Open a notebook of somebody's whose kernel asks for a whole GPU."""
        server, env = await self.server(user)
        page = await self.stack.enter_async_context(opened(server, env, "a.ipynb", env.install("all", "1")))
        return page, server

    async def small(self, user: str, size: str) -> Page:
        """Open a notebook of somebody's whose kernel asks for this size."""
        server, env = await self.server(user)
        kernel = env.install(f"of-{user}", size)
        return await self.stack.enter_async_context(opened(server, env, "a.ipynb", kernel))

    async def leases(self, state: LeaseState) -> list[Lease]:
        return [each for each in (await self.pool.status()).leases if each.state is state]

    async def is_parked(self) -> bool:
        """Whether a kernel's slice is lent to others."""
        return bool(await self.leases(LeaseState.PARKED))

    def users_of_gpu(self) -> list[str]:
        """Return the names of the pods for which the claim is reserved."""
        claim = self.cluster.get("resourceclaim", "-n", self.namespace, CLAIM)
        return sorted(each["name"] for each in claim["status"]["reservedFor"])

    def reporting(self) -> AbstractAsyncContextManager[None]:
        """Let the node's agent say again and again that no kernel uses the GPU."""
        return reporting(self.service.url, self.token, GPU)


@asynccontextmanager
async def students_of(
    cluster: Cluster,
    namespace: str,
    token: str,
    children: ForkServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str = "",
) -> AsyncIterator[Students]:
    """Serve the cluster to ada and bob, whose servers' pods are there, with ``more`` settings."""
    settings = f"""
c.KubernetesSettings.kubeconfig = "{cluster.kubeconfig}"
c.KubernetesSettings.namespace = "{namespace}"
c.KubernetesSettings.node_agent = "{namespace}/{ACCOUNT}"
c.KubernetesSettings.dialect = "shared"
c.PoolSettings.default_course = {{"yield_after": "1s"}}
{more}
"""
    async with behind_stand_in(children, folder / "service", settings, "--kubernetes") as (hub, service):
        hub.users |= {"of-ada": "ada", "of-bob": "bob", "of-root": "root"}
        hub.admins.add("root")
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        monkeypatch.setenv("GPU_POOL_TOKEN", "of-root")
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(connect(service.url))
            yield Students(service, pool, token, cluster, namespace, folder, stack)
    # Their processes end before the machine does that they are on.
    await asyncio.to_thread(cluster.kubectl, "delete", "pods", "--all", "-n", namespace)
