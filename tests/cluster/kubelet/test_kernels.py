"""Kernels in real containers on a real kubelet, of the image that the Containerfile makes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.clusters import node
from support.control_plane import Cluster
from support.fixtures import jupyter_env, manager
from support.frontend import Frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.kernel_pods import server_with_home
from support.kubelet import RealCluster, make_home
from support.node_agent import NodeAgent
from support.service import ForkServer, Service, serving
from support.slice_pages import cells, serving_pages
from support.supervisors import IS_FORKED

__all__ = ["jupyter_env", "manager"]

#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()
#: Leaves a process without a parent, and says whether somebody waits for it once it has ended.
ORPHAN = """
import os, pathlib, subprocess, time
made = subprocess.run(["sh", "-c", "sleep 0.1 & echo $!"], capture_output=True, text=True)
while pathlib.Path("/proc", made.stdout.strip()).exists() and time.sleep(0.1) is None:
    pass
print(True)
"""
#: Seconds in which a pod is there, on two cores that have other things to do.
LONG = 120


@pytest.fixture
def home(cluster: Cluster, namespace: str, tmp_path: Path) -> Path:
    """Start the pod of a notebook server, and return its home."""
    folder = tmp_path / "home"
    make_home(folder, tmp_path)
    cluster.apply(*server_with_home(USER, namespace, folder, cluster.image), namespace=namespace)
    # From now on: kernels keep the strictest rules.
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return folder


@pytest.fixture
async def service(
    cluster: Cluster,
    namespace: str,
    home: Path,
    children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Service]:
    """``gpu-pool serve`` for the cluster, beside it."""
    async with serving(children, tmp_path / "service", of_cluster(cluster, namespace)) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield service


def of_cluster(cluster: Cluster, namespace: str, more: str = "") -> str:
    """Return the settings of a service for the cluster."""
    return f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(cluster.kubeconfig)!r}
c.KubernetesSettings.namespace = {namespace!r}
{more}"""


def kernels(cluster: Cluster, namespace: str) -> list[Any]:
    selector = "app.kubernetes.io/component=gpu-kernel"
    found: list[Any] = cluster.get("pods", "-n", namespace, "-l", selector)["items"]
    return found


async def none_left(cluster: Cluster, namespace: str) -> None:
    await eventually(
        lambda: asyncio.to_thread(kernels, cluster, namespace), lambda found: not found, within=LONG
    )


async def said(page: Frontend, code: str) -> str:
    """Return what a cell prints."""
    return "".join((await page.run(code).done(within=LONG)).outputs)


async def test_a_cell_runs_and_its_kernel_may_nothing_that_it_need_not(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, cluster: Cluster, namespace: str, home: Path
) -> None:
    async with page_of(manager(jupyter_env.install("course"))) as (km, page):
        assert await said(page, "print(6 * 7)") == "42\n"
        assert (
            await said(page, "import os; print(os.getuid(), os.getgid(), os.getcwd())")
            == "1000 100 /home/jovyan\n"
        )
        status = await said(page, "print(open('/proc/self/status').read())")
        rights = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        assert (rights["CapEff"], rights["CapBnd"]) == ("0" * 16, "0" * 16)
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
        assert await said(page, "print(os.path.exists('/var/run/secrets/kubernetes.io'))") == "False\n"
        await said(page, "open('mine.txt', 'w').write('kept')")
        assert (home / "mine.txt").read_text() == "kept"
        assert (home / "mine.txt").stat().st_mode & 0o777 == 0o644
        # Its keys: where it may write them, and nobody else may read them.
        file = "/run/gpu-pool/connection.json"
        assert await said(page, f"print(oct(os.stat({file!r}).st_mode))") == "0o100600\n"
        mounted = await said(page, "print(open('/proc/self/mounts').read())")
        assert "tmpfs /run/gpu-pool tmpfs rw" in mounted
        assert "tmpfs /run/gpu-pool-secret tmpfs ro" in mounted
    await km.shutdown_kernel()
    await none_left(cluster, namespace)


async def test_pages_are_told_of_a_kernel_in_a_pod_and_give_its_slice_back(
    jupyter_env: JupyterEnv, service: Service, cluster: Cluster, namespace: str
) -> None:
    async with serving_pages(jupyter_env) as pages, pages.page() as page:
        kernel_id = await pages.start("one.ipynb", jupyter_env.install("course"))
        held = await page.sees_slice(state="held", within=LONG)
        (pod,) = kernels(cluster, namespace)
        assert held["node"] == pod["spec"]["nodeName"]
        assert held["devices"]
        # A pod cannot change its size while it runs.
        assert "resize" not in held["actions"]
        later = await pages.done(kernel_id, "resize", size="10%", at_restart=True)
        assert later["at_restart"]
        await pages.ask("POST", f"api/kernels/{kernel_id}/restart", {})
        await page.sees_slice(state="held", size="10%", within=LONG)
        async with cells(pages, kernel_id) as frontend:
            assert await said(frontend, "print(6 * 7)") == "42\n"
        await pages.done(kernel_id, "give-back")
        await none_left(cluster, namespace)


async def test_signals_zombies_and_interrupts_are_as_outside_a_container(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, cluster: Cluster, namespace: str
) -> None:
    async with page_of(manager(jupyter_env.install("course"))) as (km, page):
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
        assert await said(page, "import os; print(os.getpid() != 1)") == "True\n"
        # Orphans are taken over and waited for.
        assert await said(page, ORPHAN) == "True\n"
        # A signal without a handler ends it, as it does anywhere.
        page.run("import signal; os.kill(os.getpid(), signal.SIGTERM)")
        await eventually(km.is_alive, lambda alive: not alive, within=LONG)
    await km.shutdown_kernel()
    await none_left(cluster, namespace)


async def test_a_restart_keeps_the_pod_and_so_does_a_kernel_that_is_killed(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, cluster: Cluster, namespace: str
) -> None:
    async with page_of(manager(jupyter_env.install("course"))) as (km, page):
        assert await said(page, "x = 1; import os; print(6 * 7)") == "42\n"
        assert await said(page, f"print({IS_FORKED})") == "True\n"
        (before,) = kernels(cluster, namespace)
        for now in (False, True):
            await km.restart_kernel(now=now)
            assert await said(page, f"print('x' in dir(), {IS_FORKED})") == "False True\n"
        page.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

        async def has_ended() -> bool:
            return not await km.is_alive()

        await eventually(has_ended, within=LONG)
        await km.restart_kernel()
        told = " ".join((await said(page, "print('on')")).split())
        assert "its variables are gone. It was ended by the signal SIGKILL." in told
        page.run("import os; os.abort()")
        await eventually(has_ended, within=LONG)
        await km.restart_kernel()
        told = " ".join((await said(page, "print('on')")).split())
        assert (
            "It was ended by the signal SIGABRT. Its last output: Fatal Python error: Aborted: File" in told
        )
        (after,) = kernels(cluster, namespace)
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        (status,) = after["status"]["containerStatuses"]
        assert (status["restartCount"], list(status["state"])) == (0, ["running"])
        # Another user's code, or another kernel's, has not its key.
        assert "gpu-pool-supervisor-" in json.dumps(after["spec"]["volumes"])
    await km.shutdown_kernel()
    await none_left(cluster, namespace)


async def test_a_kernel_that_uses_more_memory_than_its_pod_may_have_is_told_so(
    jupyter_env: JupyterEnv,
    manager: Managers,
    cluster: Cluster,
    namespace: str,
    home: Path,
    children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = of_cluster(cluster, namespace, "c.KubernetesSettings.memory_mib = 256\n")
    async with serving(children, tmp_path / "service", settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with page_of(manager(jupyter_env.install("course"))) as (km, page):
            assert await said(page, "print(1)") == "1\n"
            page.run("all = [bytearray(2**20) for _ in range(2**10)]")
            await eventually(km.is_alive, lambda alive: not alive, within=LONG)
            await km.restart_kernel()
            told = " ".join((await said(page, "print('on')")).split())
            assert "more than the memory of its pod or job (not of the GPU), and was ended." in told
        await km.shutdown_kernel()
        await none_left(cluster, namespace)


async def test_a_kernel_that_cannot_start_says_why(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, cluster: Cluster, namespace: str
) -> None:
    name = jupyter_env.install("course")
    file = jupyter_env.folder / "data" / "kernels" / name / "kernel.json"
    spec = json.loads(file.read_text())
    spec["argv"] = ["python3", "-m", "no_such_kernel", "-f", "{connection_file}"]
    file.write_text(json.dumps(spec))
    async with page_of(manager(name)) as (_, page):
        told = " ".join((await said(page, "1")).split())
    assert "It ended with status 1. Its last output:" in told
    assert "No module named no_such_kernel" in told


async def test_what_is_not_there_yet_is_waited_for_and_told(
    jupyter_env: JupyterEnv,
    manager: Managers,
    own_cluster: RealCluster,
    namespace: str,
    children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Neither the home nor the image is there.
    folder = tmp_path / "later"
    made = server_with_home(USER, namespace, folder, own_cluster.image, type="Directory")
    own_cluster.apply(*made, namespace=namespace)
    settings = of_cluster(own_cluster, namespace, 'c.KubernetesSettings.image = "localhost/later:1"\n')
    async with serving(children, tmp_path / "service", settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with page_of(manager(jupyter_env.install("course"))) as (km, page):
            cell = page.run("print(6 * 7)")
            await cell.shows("Your home folder cannot be connected at the moment")
            make_home(folder, tmp_path)
            await cell.shows("software cannot be fetched at the moment")
            await asyncio.to_thread(own_cluster.ctr, "images", "tag", own_cluster.image, "localhost/later:1")
            assert (await cell.done(within=3 * LONG)).outputs[-1] == "42\n"
        await km.shutdown_kernel()
    told = service.log
    assert "FailedMount: MountVolume.SetUp failed" in told
    assert "ErrImagePull: " in told


async def test_a_lost_machine_is_told_and_given_up_and_what_comes_back_ends(
    jupyter_env: JupyterEnv,
    manager: Managers,
    own_cluster: RealCluster,
    namespace: str,
    home: Path,
    children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = of_cluster(own_cluster, namespace, "c.KubernetesSettings.lost_after = 5\n")
    async with serving(children, tmp_path / "service", settings) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        async with page_of(manager(jupyter_env.install("course"))) as (_, page):
            assert await said(page, "print(1)") == "1\n"
            cell = page.run("import time; time.sleep(600)")
            with another_node(own_cluster, tmp_path), node_silent(own_cluster):
                await cell.shows("Its machine does not answer at the moment.")
                told = " ".join("".join((await cell.done(within=LONG)).outputs).split())
                assert "no longer answered" in told
        # The node ends what it was told to end meanwhile.
        await none_left(own_cluster, namespace)


@contextmanager
def another_node(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Add a node that answers: where none does, Kubernetes takes itself for the one that is cut off."""
    with NodeAgent(cluster.kubeconfig, folder / "nodes") as agent:
        agent.add(node("cpu-1"))
        yield


@contextmanager
def node_silent(cluster: RealCluster) -> Iterator[None]:
    """Keep the node from being heard of, as if its cable had been pulled; its containers go on."""
    cluster.signal("kubelet", signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.signal("kubelet", signal.SIGCONT)
