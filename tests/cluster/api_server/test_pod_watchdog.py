"""A kernel in a pod that uses too much memory, as its user sees it: told in the cell, interrupted, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, Pool, connect
from support.agent_reports import ACCOUNT, add_agent, reporting
from support.clusters import hami
from support.control_plane import Cluster
from support.fixtures import jupyter_env, manager
from support.frontend import page_of
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.pod_pages import add_server, kernels, nothing_runs
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

__all__ = ["jupyter_env", "manager"]

NODE, GPU = "watched-1", "GPU-watched-1-0"


@pytest.fixture(scope="module")
def card(cluster: Cluster) -> Cluster:
    """A node with one GPU of 32 GiB that HAMi shares."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami(NODE, count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    return cluster


@dataclass
class Watched:
    """A service whose watchdog is quick, ada's pool there, and the token of the agent of its only node."""

    pool: Pool
    url: str
    token: str
    card: Cluster
    namespace: str

    @asynccontextmanager
    async def using(self, mib: int) -> AsyncIterator[None]:
        """Let the node's agent say again and again that the only kernel uses so much."""
        (pod,) = await asyncio.to_thread(kernels, self.card, self.namespace)
        use = {"pod": pod["metadata"]["uid"], "memory_mib": mib}
        async with reporting(self.url, self.token, GPU, [use]):
            yield


@pytest.fixture
async def watched(
    card: Cluster,
    namespace: str,
    cluster_children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Watched]:
    add_server(card, namespace, "ada")
    token = add_agent(card, namespace, NODE)
    settings = f"""
c.KubernetesSettings.kubeconfig = "{card.kubeconfig}"
c.KubernetesSettings.namespace = "{namespace}"
c.KubernetesSettings.node_agent = "{namespace}/{ACCOUNT}"
c.PoolSettings.watchdog_after = 0.5
c.PoolSettings.interrupt_after = 0.5
c.PoolSettings.end_after = 5
"""
    monkeypatch.setenv("GPU_POOL_TOKEN", "of-ada")
    async with behind_stand_in(cluster_children, tmp_path / "service", settings, "--kubernetes") as (
        hub,
        service,
    ):
        hub.users["of-ada"] = "ada"
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with connect(service.url) as pool:
            yield Watched(pool, service.url, token, card, namespace)
    # Their processes end before the machine does that they are on.
    await asyncio.to_thread(card.kubectl, "delete", "pods", "--all", "-n", namespace)


async def test_a_cell_is_told_and_interrupted_and_a_kernel_that_frees_its_memory_goes_on(
    jupyter_env: JupyterEnv, manager: Managers, watched: Watched
) -> None:
    async with page_of(manager(jupyter_env.install("course", "2%"))) as (_, page):
        await page.run("kept = 42").done(within=120)
        (lease,) = (await watched.pool.status()).leases
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        async with watched.using(4000):
            told = " ".join("".join((await cell.done(within=120)).outputs).split())
        assert "This slice uses 4000MiB of GPU 0's memory, and was granted 655MiB." in told
        assert "UTC what runs is interrupted" in told
        assert "What ran was interrupted." in told
        assert "KeyboardInterrupt" in told
        async with watched.using(412):
            await eventually(
                lambda: watched.pool.get_lease(lease.id), lambda seen: seen.notice == "", within=60
            )
            assert (await page.run("print(kept)").done()).outputs == ["42\n"]
            assert (await watched.pool.activity(lease.id)).memory_mib == 412
            shown = (await page.run("print(get_ipython().run_line_magic('gpu', ''))").done()).outputs
            used = "This kernel uses 412 MiB of the 655 MiB that it may use, as its node sees it.\n"
            assert "".join(shown).startswith(used)
            assert "655 MiB granted; use is measured on this kernel's node" in "".join(shown)


async def test_a_cell_that_runs_out_of_memory_says_what_its_slice_has_and_what_is_used(
    jupyter_env: JupyterEnv, manager: Managers, watched: Watched
) -> None:
    async with page_of(manager(jupyter_env.install("course", "2%"))) as (_, page):
        await page.run("class OutOfMemoryError(RuntimeError): __module__ = 'torch.cuda'").done(within=120)
        (lease,) = (await watched.pool.status()).leases
        async with watched.using(412):
            await eventually(
                lambda: watched.pool.activity(lease.id),
                lambda activity: activity.memory_mib == 412,
                within=60,
            )
            cell = page.run("raise OutOfMemoryError('CUDA out of memory.')")
            told = " ".join("".join((await cell.done(within=120)).outputs).split())
        assert "GPU memory ran out: this kernel's slice is 2%, with 655 MiB of memory" in told
        assert "This kernel uses 412 MiB of the 655 MiB that it may use, as its node sees it." in told


async def test_a_kernel_that_stays_over_its_memory_ends_with_its_slice_and_its_next_cell_says_why(
    jupyter_env: JupyterEnv, manager: Managers, watched: Watched
) -> None:
    async with page_of(manager(jupyter_env.install("course", "2%"))) as (_, page):
        await page.run("1").done(within=120)
        (lease,) = (await watched.pool.status()).leases
        stubborn = "while True:\n try:\n  time.sleep(600)\n except KeyboardInterrupt:\n  pass"
        cell = page.run(f"print('begun', flush=True); import time\n{stubborn}")
        await cell.shows("begun")
        async with watched.using(4000):
            told = " ".join("".join((await cell.done(within=120)).outputs).split())
        assert "it used more GPU memory than it was granted" in told
        assert "Start again with a larger slice." in told
        assert (await watched.pool.get_lease(lease.id)).end_reason is EndReason.OVER_MEMORY
        await eventually(lambda: nothing_runs(watched.card, watched.namespace))
        assert (await page.run("print('anew')").done(within=120)).outputs == ["anew\n"]
