"""A real Jupyter Server whose kernels are pods, on a real API server and scheduler."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from support.clusters import hami
from support.control_plane import Cluster
from support.fixtures import jupyter_env, manager
from support.frontend import page_of
from support.hub import Hub, serving_hub
from support.jupyter_env import IPYKERNEL, JupyterEnv, Managers, eventually
from support.pod_pages import add_server, jupyter, kernels, nothing_runs, of_cluster, opened
from support.service import ForkServer, Service, serving

__all__ = ["jupyter_env", "manager"]

#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()


@pytest.fixture(scope="module")
def card(cluster: Cluster) -> Cluster:
    """A node with one GPU of 32 GiB that HAMi shares."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami("hami-1", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    return cluster


@pytest.fixture
async def service(
    card: Cluster, namespace: str, children: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """``gpu-pool serve`` for the cluster, and the pod of a notebook server."""
    add_server(card, namespace, USER)
    async with serving(children, tmp_path / "service", of_cluster(card, namespace)) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield service


@pytest.mark.parametrize(
    ("size", "count"),
    [
        pytest.param("50%", 2, id="two"),
        pytest.param("2%", 50, id="fifty", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
async def test_the_one_more_than_fit_is_first_in_line_and_runs_when_one_ends(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service, size: str, count: int
) -> None:
    kernel = jupyter_env.install("course", size)
    async with jupyter(jupyter_env) as server, AsyncExitStack() as stack:
        pages = []
        for number in range(count):
            page = await stack.enter_async_context(opened(server, jupyter_env, f"{number}.ipynb", kernel))
            cell = await page.run("import os; print(os.environ['GPU_POOL_SLICE'])").done(within=120)
            assert cell.outputs == [f"{size}\n"]
            pages.append(page)
        assert len(kernels(card, namespace)) == count
        last = await stack.enter_async_context(opened(server, jupyter_env, "last.ipynb", kernel))
        cell = last.run("print('my turn')")
        await cell.shows("You are next in the queue")
        assert len(kernels(card, namespace)) == count
        await pages[0].shut_down()
        assert (await cell.done(within=120)).outputs == ["my turn\n"]


@pytest.mark.long
async def test_interrupt_restart_input_and_shutdown(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service
) -> None:
    kernel = jupyter_env.install("course")
    async with jupyter(jupyter_env) as server:
        async with opened(server, jupyter_env, "a.ipynb", kernel) as page:
            cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
            await cell.shows("begun")
            await page.do("interrupt")
            assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
            assert (await page.run("print(input())", allow_stdin=True).done()).outputs == ["an answer\n"]
            (before,) = kernels(card, namespace)
            await page.do("restart")
            assert (await page.run("print('cell' in dir())").done(within=120)).outputs == ["False\n"]
            (after,) = kernels(card, namespace)
            assert after["metadata"]["uid"] == before["metadata"]["uid"]
            await page.shut_down()
        await eventually(lambda: nothing_runs(card, namespace))


@pytest.mark.long
async def test_a_pod_that_is_evicted_is_told_of(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service
) -> None:
    kernel = jupyter_env.install("course")
    async with jupyter(jupyter_env) as server, opened(server, jupyter_env, "a.ipynb", kernel) as page:
        await page.run("1").done(within=120)
        (pod,) = kernels(card, namespace)
        assert card.agent is not None
        card.agent.evict(namespace, pod["metadata"]["name"], "The node was low on resource: memory.")
        cell = page.run("import time; time.sleep(600)")
        text = " ".join("".join((await cell.done(within=120)).outputs).split())
        assert "GpuSliceNotGranted" in text
        assert "The node was low on resource: memory." in text
        assert "Its variables are gone." in text
        assert (await page.run("print('anew')").done(within=120)).outputs == ["anew\n"]


@pytest.mark.long
async def test_the_service_restarts_and_nobody_notices(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service
) -> None:
    kernel = jupyter_env.install("course")
    async with jupyter(jupyter_env) as server, opened(server, jupyter_env, "a.ipynb", kernel) as page:
        await page.run("x = 1").done(within=120)
        await service.end(signal.SIGKILL)
        assert (await page.run("print(x)").done()).outputs == ["1\n"]
        await service.start()
        assert (await page.run("print(x)").done()).outputs == ["1\n"]
        assert len(kernels(card, namespace)) == 1


@pytest.mark.long
async def test_a_killed_server_leaves_no_pod(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service
) -> None:
    kernel = jupyter_env.install("course")
    async with jupyter(jupyter_env) as server, opened(server, jupyter_env, "a.ipynb", kernel) as page:
        await page.run("1").done(within=120)
        os.kill(server.process.pid, signal.SIGKILL)
        await eventually(lambda: nothing_runs(card, namespace))


@pytest.mark.long
async def test_behind_a_hub_a_pod_gets_no_token_and_ends_when_its_server_is_not_heard_of(
    jupyter_env: JupyterEnv,
    card: Cluster,
    namespace: str,
    children: ForkServer,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_server(card, namespace, "ada")
    token = await hub.start_server("ada")
    settings = f"{of_cluster(card, namespace)}\nc.ServeApp.ttl = 3.0"
    async with serving_hub(children, hub, tmp_path / "service", settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        monkeypatch.setenv("JUPYTERHUB_API_TOKEN", token)
        kernel = jupyter_env.install("course")
        async with jupyter(jupyter_env) as server, opened(server, jupyter_env, "a.ipynb", kernel) as page:
            cell = await page.run("import os; print(dict(os.environ))").done(within=120)
            assert "GPU_POOL_SLICE" in cell.outputs[0]
            assert token not in cell.outputs[0]
            os.kill(server.process.pid, signal.SIGKILL)
            await eventually(lambda: nothing_runs(card, namespace))


@pytest.mark.long
async def test_a_wrapped_kernel_runs_in_a_pod(
    jupyter_env: JupyterEnv, card: Cluster, namespace: str, service: Service, manager: Managers
) -> None:
    """As frontends start them that ignore provisioners."""
    wrap = [
        sys.executable,
        "-m",
        "gpu_pool_provisioner.wrap",
        "--slice",
        "2%",
        "-f",
        "{connection_file}",
    ]
    spec = {"argv": [*wrap, "--", *IPYKERNEL], "display_name": "wrapped", "language": "python"}
    folder = jupyter_env.folder / "data" / "kernels" / "wrapped"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    async with page_of(manager("wrapped")) as (km, page):
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
        assert len(kernels(card, namespace)) == 1
    await km.shutdown_kernel()
    await eventually(lambda: nothing_runs(card, namespace))
