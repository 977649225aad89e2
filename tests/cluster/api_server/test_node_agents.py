"""Node agents before a real API server: who they are by real tokens, and a real one over stand-in GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cli.cluster_checks import check_agents
from gpu_pool.devices.sampling import FIRST_NAMESPACE
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import NotAllowed, Pool, connect
from gpu_pool_client._processes import pid_namespace
from support.cgroups import in_cgroup
from support.charts import rendered_chart
from support.clusters import hami
from support.control_plane import Cluster
from support.hub import HubService
from support.kernel_pods import backend_of, cluster_pool, command, held, notebook, running, volume
from support.kube_examples import one
from support.nvml_stub import Machine
from support.pools import eventually
from support.pools import running as sleeping
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

ACCOUNT = "gpu-pool-node-agent"
GPU = "GPU-n1-0"
CONTAINER = "a" * 64


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> str:
    """A node with one GPU, shared by HAMi, whose pods run as processes of this machine."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    made = hami("agents-1", count=50)
    made["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(made)
    return "agents-1"


@pytest.fixture
def agent_pod(cluster: Cluster, node: str, namespace: str) -> str:
    """The pod of a node agent, as the cluster knows it; return the namespace."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
    other = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "another"}}
    cluster.apply(
        account, other, pod("agent", node, ACCOUNT), pod("other", node, "another"), namespace=namespace
    )
    return namespace


def pod(name: str, node: str, account: str) -> dict[str, Any]:
    container = {"name": "agent", "image": "example.org/agent:1", "command": ["sleep", "600"]}
    spec = {"nodeName": node, "serviceAccountName": account, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def token(
    cluster: Cluster, namespace: str, account: str = ACCOUNT, *more: str, audience: str = "gpu-pool"
) -> str:
    """Return a token as a kubelet gets it for a pod; ``more`` binds it to one."""
    words = ("create", "token", account, "-n", namespace, "--audience", audience)
    return cluster.kubectl(*words, *more).strip()


def bound(name: str = "agent") -> tuple[str, ...]:
    return "--bound-object-kind=Pod", f"--bound-object-name={name}"


@pytest.fixture
async def pool(cluster: Cluster, agent_pod: str, tmp_path: Path) -> AsyncIterator[GpuPool]:
    settings = {"node_agent": f"{agent_pod}/{ACCOUNT}"}
    async with cluster_pool(tmp_path / "store.db", cluster.kubeconfig, agent_pod, **settings) as pool:
        yield pool


async def test_the_cluster_says_whose_agent_has_a_token(
    pool: GpuPool, cluster: Cluster, agent_pod: str, node: str
) -> None:
    agents = backend_of(pool).agents
    assert await agents.node_of(token(cluster, agent_pod, ACCOUNT, *bound())) == node
    wrong = {
        "for the API server": token(
            cluster, agent_pod, ACCOUNT, *bound(), audience="https://kubernetes.default.svc"
        ),
        "bound to no pod": token(cluster, agent_pod),
        "another account's": token(cluster, agent_pod, "another", *bound("other")),
        "made up": "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJub2RlIn0.c2lnbmVk",
    }
    for each in wrong.values():
        with pytest.raises(NotAllowed):
            await agents.node_of(each)


async def test_the_token_of_a_pod_that_is_gone_is_nobody_s(
    pool: GpuPool, cluster: Cluster, agent_pod: str
) -> None:
    agents, known = backend_of(pool).agents, token(cluster, agent_pod, ACCOUNT, *bound())
    cluster.kubectl("delete", "pod", "agent", "-n", agent_pod, "--force", "--grace-period=0")

    async def is_refused() -> bool:
        try:
            await agents.node_of(known)
        except NotAllowed:
            return True
        return False

    await eventually(is_refused)


async def test_a_pool_that_names_no_account_believes_nobody(
    cluster: Cluster, agent_pod: str, tmp_path: Path
) -> None:
    async with cluster_pool(tmp_path / "store.db", cluster.kubeconfig, agent_pod) as pool:
        with pytest.raises(NotAllowed, match="takes no reports"):
            await backend_of(pool).agents.node_of(token(cluster, agent_pod, ACCOUNT, *bound()))


@pytest.mark.usefixtures("node")
async def test_the_cluster_accepts_the_chart_s_agents_and_gives_the_service_its_right(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """The namespace has to be privileged, for the process ids of the node, and for nothing else."""
    there = ("--set", "nodeAgent.enabled=true", "--set", f"nodeAgent.namespace={namespace}")
    chart = rendered_chart("jupyterhub", *there, "--set", "nodeAgent.createNamespace=false")
    of_cluster = [each for each in chart if each["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    objects = [each for each in chart if each["metadata"].get("namespace") == namespace]
    objects += of_cluster
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    cluster.apply(*objects, flags=["--validate=strict"])
    daemons = one(objects, "DaemonSet", ACCOUNT)["spec"]["template"]
    spec = {**daemons["spec"], "nodeName": "agents-1"}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "chosen", **daemons["metadata"]},
        "spec": spec,
    }
    cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(made))
    reviewer = "--as=system:serviceaccount:jupyterhub:gpu-pool"
    may = cluster.kubectl("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", reviewer)
    assert may.strip().endswith("yes")
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in of_cluster]
    cluster.kubectl("delete", *names)


async def test_the_doctor_counts_the_nodes_whose_agents_are_ready(
    cluster: Cluster, node: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    (none,) = await check_agents([node])
    assert "there are none" in none.text
    made = pod("labelled", node, "default")
    made["metadata"]["labels"] = {
        "app.kubernetes.io/name": "gpu-pool",
        "app.kubernetes.io/component": "node-agent",
    }
    cluster.apply(made, namespace=namespace)
    await eventually(lambda: check_agents([node]), lambda seen: seen[0].state == "ok", within=60)
    count, missing = await check_agents([node, "elsewhere"])
    assert count.text == "1 of 2 nodes with GPUs have an agent whose reports are taken"
    assert missing.text == "elsewhere has no agent's pod"
    cluster.kubectl("delete", "pod", "labelled", "-n", namespace, "--force", "--grace-period=0")


# -- The program ---------------------------------------------------------------


@pytest.fixture
async def served(
    cluster: Cluster,
    agent_pod: str,
    cluster_children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[HubService]:
    """Serve ada, whom a stand-in Hub knows, and the agents of nodes, whom the cluster knows."""
    home = volume("claim-ada", agent_pod, "ReadWriteMany")
    cluster.apply(*home, notebook("ada", agent_pod), namespace=agent_pod)
    settings = f"""
c.KubernetesSettings.kubeconfig = "{cluster.kubeconfig}"
c.KubernetesSettings.namespace = "{agent_pod}"
c.KubernetesSettings.node_agent = "{agent_pod}/{ACCOUNT}"
"""
    monkeypatch.setenv("GPU_POOL_TOKEN", "of-ada")
    async with behind_stand_in(cluster_children, tmp_path / "service", settings, "--kubernetes") as (
        hub,
        service,
    ):
        hub.users["of-ada"] = "ada"
        yield service


@contextmanager
def agent(url: str, machine: Machine, token_file: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node agent over stand-in GPUs."""
    words = ["node-agent", "--pool", url, "--token-file", str(token_file), "--every", "1s"]
    environment = {**os.environ, **machine.environment, "GPU_POOL_URL": ""}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_pool.cli", *words], env=environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def scenario(pid: int, mib: int) -> str:
    """Return what one GPU shows on which a process computes."""
    return f"gpu {GPU} Tesla V100-SXM2-32GB\nmemory 32768 0\nprocess {pid} {mib}\nworks {pid} 40\n"


async def kernel(pool: Pool, cluster: Cluster, namespace: str) -> tuple[str, str]:
    """Start a kernel; return its lease's id and its pod's uid."""
    await eventually(pool.status, lambda status: status.devices)
    lease = await held(pool)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    (made,) = cluster.get("pods", "-n", namespace, "-l", "app.kubernetes.io/component=gpu-kernel")["items"]
    return lease.id, made["metadata"]["uid"]


@pytest.mark.skipif(
    pid_namespace() != FIRST_NAMESPACE, reason="in a container the driver's pids mean nothing"
)
async def test_an_agent_reports_what_a_kernel_uses(
    served: HubService, cluster: Cluster, agent_pod: str, tmp_path: Path
) -> None:
    secret, log = tmp_path / "token", tmp_path / "agent.log"
    secret.write_text(token(cluster, agent_pod, "another", *bound("other")))
    async with connect(served.url) as pool:
        lease, uid = await kernel(pool, cluster, agent_pod)
        with sleeping() as process, in_cgroup(process.pid, f"kubepods/burstable/pod{uid}/{CONTAINER}"):
            machine = Machine(tmp_path, scenario(process.pid, 412))
            with agent(served.url, machine, secret, log):
                await eventually(
                    lambda: "not that of the node agents' service account" in log.read_text(), within=60
                )
                assert (await pool.activity(lease)).memory_mib is None
                # The kubelet replaces tokens before they expire.
                secret.write_text(token(cluster, agent_pod, ACCOUNT, *bound()))

                async def uses(mib: int) -> bool:
                    return (await pool.activity(lease)).memory_mib == mib

                await eventually(lambda: uses(412), within=60)
                found = await pool.activity(lease)
                assert (found.initialised, found.working) == (True, True)
                assert "is reported to" in log.read_text()
                machine.show(scenario(process.pid, 500))
                await eventually(lambda: uses(500), within=60)
                machine.show(scenario(os.getpid(), 7_000))  # a process of the node's own
                await eventually(lambda: uses(0), within=60)
        await pool.release(lease)
        await eventually(
            pool.history, lambda history: [each.peak_mib for each in history] == [500], within=60
        )
    # That they report is no line each.
    assert "node/agents-1" not in served.service.log


async def test_who_is_no_agent_reports_nothing(
    served: HubService, cluster: Cluster, agent_pod: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, "gpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\n")
    secret, log = tmp_path / "token", tmp_path / "agent.log"
    secret.write_text("x" * 40)
    with agent(served.url, machine, secret, log):
        await eventually(lambda: "The cluster does not know this token" in log.read_text(), within=60)
    secret.unlink()
    with agent(served.url, machine, secret, log):
        await eventually(lambda: "cannot be read" in log.read_text(), within=60)
