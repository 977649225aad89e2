"""Students whose kernels are pods on one GPU that the pool divides: one gives way, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.dialects.shared import claim_name
from gpu_pool_client import EndReason, Lease, LeaseState, Pool, connect
from support.agent_reports import ACCOUNT, add_agent, reporting
from support.clusters import listed, node, resource_slice
from support.control_plane import Cluster
from support.fixtures import jupyter_env
from support.hub import HubService
from support.jupyter_env import JupyterEnv, eventually
from support.pod_pages import Page, add_server, jupyter, kernels, nothing_runs, opened
from support.server import Server
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in
from support.whole_devices import DEVICE_CLASS

__all__ = ["jupyter_env"]

NODE, GPU = "parks-1", "GPU-gpu-0"
CLAIM = claim_name("gpu-pool", GPU)
#: Seconds in which a pod is there, on two cores that have other things to do.
LONG = 120
#: Prints what its kernel has kept, and whether it sees a GPU.
KEPT = "import os; print(kept, os.environ.get('CUDA_VISIBLE_DEVICES'))"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def card(cluster: Cluster) -> Iterator[Cluster]:
    """A node with one GPU, listed as NVIDIA's DRA driver does."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(node(NODE))
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    listing = resource_slice(listed("gpu-0"), name=NODE)
    cluster.apply(DEVICE_CLASS, {**about, **listing})
    yield cluster
    cluster.kubectl("delete", f"resourceslice/{listing['metadata']['name']}", "deviceclass/gpu.nvidia.com")


@dataclass
class School:
    """A service whose kernels give way after a second, and a notebook server of each of its students."""

    service: HubService
    #: As an administrator.
    pool: Pool
    token: str
    card: Cluster
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

    async def leases(self, state: LeaseState) -> list[Lease]:
        return [each for each in (await self.pool.status()).leases if each.state is state]

    async def is_parked(self) -> bool:
        return bool(await self.leases(LeaseState.PARKED))

    def claim_of(self) -> Any:
        return self.card.get("resourceclaim", "-n", self.namespace, CLAIM)

    def reporting(self) -> Any:
        """Let the node's agent say again and again that no kernel uses the GPU."""
        return reporting(self.service.url, self.token, GPU)


@pytest.fixture
async def school(
    jupyter_env: JupyterEnv,
    card: Cluster,
    namespace: str,
    cluster_children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[School]:
    for user in ("ada", "bob"):
        add_server(card, namespace, user)
    token = add_agent(card, namespace, NODE)
    settings = f"""
c.KubernetesSettings.kubeconfig = "{card.kubeconfig}"
c.KubernetesSettings.namespace = "{namespace}"
c.KubernetesSettings.node_agent = "{namespace}/{ACCOUNT}"
c.KubernetesSettings.dialect = "shared"
c.PoolSettings.default_course = {{"yield_after": "1s"}}
"""
    async with behind_stand_in(cluster_children, tmp_path / "service", settings, "--kubernetes") as (
        hub,
        service,
    ):
        hub.users |= {"of-ada": "ada", "of-bob": "bob", "of-root": "root"}
        hub.admins.add("root")
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        monkeypatch.setenv("GPU_POOL_TOKEN", "of-root")
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(connect(service.url))
            yield School(service, pool, token, card, namespace, tmp_path, stack)
    # Their processes end before the machine does that they are on.
    await asyncio.to_thread(card.kubectl, "delete", "pods", "--all", "-n", namespace)


async def test_a_student_s_kernel_gives_way_to_another_s_and_comes_back_with_its_variables(
    school: School, card: Cluster, namespace: str
) -> None:
    async with school.reporting():
        ada, _ = await school.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        (first,) = kernels(card, namespace)
        bob, _ = await school.notebook("bob")
        assert (await bob.run("kept = 'of bob'; print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        (parked,) = await school.leases(LeaseState.PARKED)
        assert (parked.holder.user, parked.asked_back) == ("ada", EndReason.YIELDED)
        # Both pods are there, on one claim, with the one that keeps it.
        assert len(school.claim_of()["status"]["reservedFor"]) == 3
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert (await bob.run(KEPT).done(within=LONG)).outputs[-1] == f"of bob {GPU}\n"
        uids = {each["metadata"]["uid"] for each in kernels(card, namespace)}
        assert len(uids) == 2
        assert first["metadata"]["uid"] in uids
        await ada.shut_down()
        await bob.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
    assert {each.reason for each in await school.pool.history()} == {"released"}


@pytest.mark.long
async def test_a_service_that_is_killed_meanwhile_finds_the_parked_kernel_again(
    school: School, card: Cluster, namespace: str
) -> None:
    async with school.reporting():
        ada, _ = await school.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        bob, _ = await school.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(school.is_parked, within=LONG)
    await school.service.service.end(signal.SIGKILL)
    await school.service.service.start()
    async with school.reporting():
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert len(kernels(card, namespace)) == 2


@pytest.mark.long
async def test_a_parked_kernel_whose_pod_is_evicted_says_so_at_its_next_cell(
    school: School, card: Cluster, namespace: str
) -> None:
    async with school.reporting():
        ada, _ = await school.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        (pod,) = kernels(card, namespace)
        bob, _ = await school.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(school.is_parked, within=LONG)
        assert card.agent is not None
        card.agent.evict(namespace, pod["metadata"]["name"], "The node was low on resource: memory.")

        async def is_over() -> bool:
            return not await school.is_parked()

        await eventually(is_over, within=LONG)
        text = " ".join("".join((await ada.run(KEPT).done(within=LONG)).outputs).split())
        assert "The node was low on resource: memory." in text
        assert "Its variables are gone." in text
        assert (await bob.run(KEPT).done(within=LONG)).outputs[-1] == f"of bob {GPU}\n"
        assert [each.reason for each in await school.pool.history()] == ["taken"]


@pytest.mark.long
async def test_a_notebook_server_that_is_killed_while_its_kernel_is_parked_leaves_no_pod(
    school: School, card: Cluster, namespace: str
) -> None:
    async with school.reporting():
        ada, server = await school.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        bob, _ = await school.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(school.is_parked, within=LONG)
        os.kill(server.process.pid, signal.SIGKILL)

        async def is_alone() -> bool:
            return len(await asyncio.to_thread(kernels, card, namespace)) == 1

        await eventually(is_alone, within=LONG)
        assert (await bob.run(KEPT).done(within=LONG)).outputs[-1] == f"of bob {GPU}\n"
        assert len(await school.pool.history()) == 1
