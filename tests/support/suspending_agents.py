"""Real node agents that suspend, over the stand-in for the driver that ``cuda_stub`` is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_pool.devices.activity import has_open
from gpu_pool_client import _procfs as procfs
from support.cuda_stub import Driver

#: What a kernel opens that uses CUDA: a device that every container has, and nobody else opens.
UVM = "/dev/full"
#: What agents see: one card, and of the driver's stand-in which processes hold memory. In the environment is,
#: where pods are no containers, a folder that has the uid of the pod of each process.
PROGRAM = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from gpu_pool.cli import main
from gpu_pool.cluster.node_agent import program, suspending
from gpu_pool.cluster.node_agent.sampling import Container
from gpu_pool.cluster.node_agent.sampling import NodeSample, container_on_this_node
from gpu_pool_client import Device, PodDeviceUse

GPU, states, pods = "GPU-gpu-0", Path(os.environ["DRIVER_STUB"]), os.environ.get("PODS_STUB")

def container(pid):
    if not pods:
        return container_on_this_node(pid)
    path = Path(pods, str(pid))
    return Container(path.read_text(), "") if path.exists() else None

def sample(sampler, devices):
    uses = []
    for each in states.glob("[0-9]*"):
        state, mib, *_ = each.read_text().split() or ("failed", "0")
        whose = container(int(each.name))
        if whose is not None and state in ("running", "locked"):
            uses.append(PodDeviceUse(whose.pod, whose.container, GPU, int(mib), utilisation=0.0))
    return NodeSample((GPU,), tuple(uses), True)

class Suspender(suspending.PodSuspender):
    def __init__(self, folder, settings):
        settings.tuning = type(settings.tuning)(cuda_device=os.environ["UVM_STUB"], memory_free_within=0)
        super().__init__(folder, settings, container)

suspending.PodSuspender = Suspender
program.sample_node = sample
program.discover = lambda: SimpleNamespace(devices=(Device(GPU, 0, "H100", 81559, driver="580.95.05"),))
sys.exit(main(sys.argv[1:]))
"""


def uses_cuda(kept: str) -> str:
    """Return a cell that keeps a text, and opens what a process opens that uses CUDA."""
    return f"kept = {kept!r}; held = open({UVM!r}, 'w'); print('opened')"


def users_of_cuda() -> list[int]:
    """Return the pids of the processes of this machine that have it open."""
    return [pid for pid in procfs.pids() if has_open(pid, UVM)]


@contextmanager
def suspending_agent(url: str, token: str, folder: Path, driver: Driver, libraries: Path) -> Iterator[Path]:
    """Run an agent on this machine; give the folder in which is written whose pod a process is in."""
    pods, written = folder / "pods", folder / "agent-token"
    pods.mkdir(exist_ok=True)
    written.write_text(token)
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "DRIVER_STUB": str(driver.folder),
        "PODS_STUB": str(pods),
        "UVM_STUB": UVM,
    }
    words = ["node-agent", "--pool", url, "--token-file", str(written), "--every", "1s"]
    words += ["--suspend-in", str(folder / "suspended"), "--suspend-untested"]
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=env, stderr=log)
    try:
        yield pods
        assert process.poll() is None, (folder / "agent.log").read_text()
    finally:
        process.terminate()
        process.wait()
