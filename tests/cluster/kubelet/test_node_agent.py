"""The node agent as the chart runs it, in a pod of a real kubelet: its token, its rights, what it sees."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, Lease, LeaseState, Pool, connect
from support.agent_daemons import ACCOUNT, daemons
from support.jupyter_env import eventually
from support.kernel_pods import command, held, notebook, running, volume
from support.kubelet import NODE, RealCluster
from support.nvml_stub import Machine
from support.service import ForkServer
from support.stand_in_hub import behind_stand_in

KERNELS = "app.kubernetes.io/component=gpu-kernel"
#: Here the node is in a pid namespace of its own, as no machine is whose driver names processes.
PROGRAM = """
import sys
from gpu_pool.cli import main
from gpu_pool.devices import sampling
sampling.FIRST_NAMESPACE = sampling.pid_namespace()
sys.exit(main(sys.argv[1:]))
"""
LONG = 180


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that every user of the node can read."""
    made = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def pid_of(cluster: RealCluster, namespace: str, selector: str) -> int:
    """Return the pid of a pod's container, as the node has it."""
    (pod,) = cluster.get("pods", "-n", namespace, "-l", selector)["items"]
    container = pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
    (task,) = (line.split() for line in cluster.ctr("tasks", "ls").splitlines() if line.startswith(container))
    return int(task[1])


async def test_an_agent_in_a_pod_reports_what_a_kernel_in_a_pod_uses(
    own_cluster: RealCluster,
    namespace: str,
    cluster_children: ForkServer,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, agents = own_cluster, f"{namespace}-agents"
    disk, claim = volume("claim-ada", namespace, "ReadWriteMany")
    del claim["metadata"]["annotations"]
    cluster.apply(disk, claim, notebook("ada", namespace, image=cluster.image), namespace=namespace)
    settings = f"""
c.KubernetesSettings.kubeconfig = "{cluster.kubeconfig}"
c.KubernetesSettings.namespace = "{namespace}"
c.KubernetesSettings.node_agent = "{agents}/{ACCOUNT}"
c.PoolSettings.watchdog_after = 1
c.PoolSettings.interrupt_after = 2
c.PoolSettings.end_after = 2
"""
    monkeypatch.setenv("GPU_POOL_TOKEN", "of-ada")
    cluster.kubectl("create", "namespace", agents)
    cluster.kubectl("label", "namespace", agents, "pod-security.kubernetes.io/enforce=privileged")
    # As NVIDIA's GPU feature discovery labels nodes.
    cluster.kubectl("label", "node", NODE, "nvidia.com/gpu.present=true")
    try:
        async with behind_stand_in(cluster_children, tmp_path / "service", settings, "--kubernetes") as (
            hub,
            made,
        ):
            hub.users["of-ada"] = "ada"
            machine = Machine(folder)
            url = f"http://{cluster.machine.outside}:{made.hub.service_port}/services/gpu-pool"
            scenario = {"NVML_STUB_SCENARIO": str(folder / "scenario.txt")}
            cluster.apply(*daemons(cluster, agents, url, folder, PROGRAM, scenario))
            async with connect(made.url) as pool:
                await reports(pool, cluster, namespace, agents, machine)
    finally:
        cluster.kubectl("label", "node", NODE, "nvidia.com/gpu.present-")
        cluster.kubectl("delete", "namespace", agents, "--wait=false")


async def reports(pool: Pool, cluster: RealCluster, namespace: str, agents: str, machine: Machine) -> None:
    """Start a kernel, let it use the GPU, and see that the pool knows it."""

    def log() -> str:
        return cluster.kubectl("-n", agents, "logs", "daemonset/gpu-pool-node-agent", "--tail=20")

    await eventually(pool.status, lambda status: status.devices, within=LONG)
    lease = await held(pool)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    pid = await asyncio.to_thread(pid_of, cluster, namespace, KERNELS)
    machine.show(f"gpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\nprocess {pid} 412\nworks {pid} 40\n")
    await asyncio.to_thread(cluster.kubectl, "-n", agents, "rollout", "status", "daemonset", ACCOUNT)
    try:
        await eventually(
            lambda: pool.activity(lease.id), lambda activity: activity.memory_mib == 412, within=LONG
        )
    except AssertionError:
        raise AssertionError(await asyncio.to_thread(log)) from None
    found = await pool.activity(lease.id)
    assert (found.initialised, found.working) == (True, True)
    # Another user than root, without capabilities, which may do nothing to anybody.
    agent = await asyncio.to_thread(pid_of, cluster, agents, "app.kubernetes.io/component=node-agent")
    status = cluster.machine.run("cat", f"/proc/{agent}/status")
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert told["Uid"].split() == ["64173"] * 4
    assert {told[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (told["Seccomp"], told["NoNewPrivs"]) == ("2", "1")
    # What stays over its memory is told so, and ends with its pod.
    assert "the pool's watchdog" in (await pool.get_lease(lease.id)).enforcement.memory.by
    machine.show(f"gpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32768 0\nprocess {pid} 30000\nworks {pid} 40\n")
    seen: list[Lease] = []

    async def has_ended() -> bool:
        seen.append(await pool.get_lease(lease.id))
        return seen[-1].state is LeaseState.ENDED

    await eventually(has_ended, within=LONG)
    assert any("what runs is interrupted" in each.notice for each in seen)
    assert any(each.interrupt_at is not None for each in seen)
    assert seen[-1].end_reason is EndReason.OVER_MEMORY
    assert "This slice used 30000MiB of GPU" in seen[-1].notice

    async def is_gone() -> bool:
        left = await asyncio.to_thread(cluster.get, "pods", "-n", namespace, "-l", KERNELS)
        return not left["items"]

    await eventually(is_gone, within=LONG)
