"""Kernels of two students on a real kubelet: the one that keeps memory on the GPU is suspended by the agent.

The agent runs as the chart runs it, as root with two capabilities, over a stand-in for the driver.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpu_pool_client import LeaseState
from support import cuda_stub
from support.agent_daemons import ACCOUNT, daemons
from support.cuda_stub import Driver
from support.fixtures import jupyter_env
from support.jupyter_env import JupyterEnv, eventually
from support.kernel_pods import server_with_home
from support.kubelet import NODE, PAUSE, RealCluster, make_home
from support.parked_pods import GPU, KEPT, LONG, Students, students_of
from support.pod_pages import kernels, nothing_runs
from support.service import ForkServer
from support.suspending_agents import PROGRAM, UVM, uses_cuda

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(900)
#: Prints the number by which the node knows the process of a kernel that uses CUDA.
FIND = (
    f"for each in /proc/[0-9]*; do ls -l $each/fd 2>/dev/null | grep -q -- '-> {UVM}' "
    "&& echo ${each#/proc/}; done; true"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with the stand-in for the driver, and with NVIDIA's bindings for the image's Python."""
    made = Path(tempfile.mkdtemp(prefix="gpu-pool-test-"))
    made.chmod(0o755)
    cuda_stub.build(made)
    bindings = ("cuda-bindings", "cuda-pathfinder")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*pip, "--python-version=3.13", f"--target={made / 'packages'}", *bindings], check=False
    )
    if done.returncode:
        pytest.skip("NVIDIA's bindings for the image's Python cannot be had")
    (made / "driver").mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def students(
    jupyter_env: JupyterEnv,
    card: RealCluster,
    namespace: str,
    cluster_children: ForkServer,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Students]:
    for user in ("ada", "bob"):
        home = tmp_path / f"home-{user}"
        make_home(home, tmp_path)
        card.apply(*server_with_home(user, namespace, home, card.image), namespace=namespace)
    agents = f"{namespace}-agents"
    settings = f"""
c.KubernetesSettings.placeholder_image = {PAUSE!r}
c.KubernetesSettings.node_agent = "{agents}/{ACCOUNT}"
"""
    card.kubectl("create", "namespace", agents)
    card.kubectl("label", "namespace", agents, "pod-security.kubernetes.io/enforce=privileged")
    # As NVIDIA's GPU feature discovery labels nodes.
    card.kubectl("label", "node", NODE, "nvidia.com/gpu.present=true")
    try:
        async with students_of(
            card, namespace, "", cluster_children, tmp_path, monkeypatch, settings
        ) as students:
            url = f"http://{card.machine.outside}:{students.service.hub.service_port}/services/gpu-pool"
            variables = {
                "DRIVER_STUB": str(folder / "driver"),
                "UVM_STUB": UVM,
                "PYTHONPATH": str(folder / "packages"),
            }
            suspend = {"enabled": True, "untested": True}
            made = daemons(card, agents, url, folder, PROGRAM, variables, suspend=suspend)
            card.apply(*made)
            yield students
    finally:
        card.kubectl("label", "node", NODE, "nvidia.com/gpu.present-")
        card.kubectl("delete", "namespace", agents, "--wait=false")


async def test_a_kernel_that_keeps_memory_is_suspended_and_comes_back_in_the_same_container(
    students: Students, card: RealCluster, namespace: str, folder: Path
) -> None:
    agents, driver = f"{namespace}-agents", Driver(folder / "driver")
    ada, _ = await students.notebook("ada")
    assert (await ada.run(uses_cuda("of ada")).done(within=LONG)).outputs[-1] == "opened\n"
    (first,) = kernels(card, namespace)
    (pid,) = map(int, card.machine.run("sh", "-c", FIND).split())
    (driver.folder / str(pid)).write_text("running 512 1\n")
    await asyncio.to_thread(card.kubectl, "-n", agents, "rollout", "status", "daemonset", ACCOUNT)
    bob, _ = await students.notebook("bob")
    try:
        cell = await bob.run("kept = 'of bob'; print(kept)").done(within=LONG)
    except AssertionError:
        log = card.kubectl("-n", agents, "logs", f"daemonset/{ACCOUNT}", "--tail=30")
        raise AssertionError(log) from None
    assert cell.outputs[-1] == "of bob\n"
    assert driver.state(pid) == "checkpointed"
    (parked,) = await students.leases(LeaseState.PARKED)
    assert parked.holder.user == "ada"
    # The next agent finds what this one has suspended.
    card.kubectl("-n", agents, "delete", "pods", "--all")
    assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
    assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
    after = {each["metadata"]["uid"]: each for each in kernels(card, namespace)}
    (status,) = after[first["metadata"]["uid"]]["status"]["containerStatuses"]
    assert (status["restartCount"], list(status["state"])) == (0, ["running"])
    await ada.shut_down()
    await bob.shut_down()
    await eventually(lambda: nothing_runs(card, namespace), within=LONG)
