"""A cluster of the fake API whose devices the pool claims whole, and what its scheduler would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_pool.cluster.device_claims import HOLDER_LABEL
from gpu_pool.cluster.dialects.shared import MOST_PODS, claim_name
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Device, PodDeviceUse
from support.clusters import claim_of, listed, named, node, resource_slice
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import command, held, running
from support.pools import eventually

DRA = "/apis/resource.k8s.io/v1"
CLAIM = claim_name("gpu-pool", "GPU-gpu-0")
#: The node whose one GPU NVIDIA's DRA driver lists, in the tests over a real API server.
WHOLE_NODE = "whole-1"
#: The class of devices that NVIDIA's DRA driver brings along.
DEVICE_CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "gpu.nvidia.com"},
    "spec": {
        "selectors": [
            {
                "cel": {
                    "expression": "device.driver == 'gpu.nvidia.com' && "
                    "device.attributes['gpu.nvidia.com'].type == 'gpu'"
                }
            }
        ]
    },
}
#: The device gpu-0 as a pool shows it.
WHOLE_CARD = Device(
    "GPU-gpu-0",
    0,
    "Tesla V100 SXM2 32GB",
    32768,
    contexts=MOST_PODS,
    driver="550.54.15",
    node="n1",
)


def lists_devices(fake: FakeKubernetes, *devices: str, generation: int = 1, on: str = "n1") -> None:
    """Let a node list these devices."""
    listing = resource_slice(*map(listed, devices), name=on, generation=generation)
    listing["metadata"]["name"] = f"{on}-gpus"
    fake.put_of(DRA, "resourceslices", listing)


def has_dra(fake: FakeKubernetes, *devices: str) -> None:
    """Let the cluster have NVIDIA's DRA driver, and these devices on its node n1."""
    fake.absent = {"devicetaintrules"}
    fake.put("nodes", node("n1"))
    fake.put_of(DRA, "deviceclasses", named("gpu.nvidia.com")[0])
    lists_devices(fake, *devices)


def assign(fake: FakeKubernetes, name: str = CLAIM, device: str = "gpu-0") -> None:
    """Give a claim its device, as the scheduler does."""
    fake.change("resourceclaims", name, **claim_of(device, name=name)["status"])


def holders(fake: FakeKubernetes) -> list[dict[str, Any]]:
    """Return the pods that hold devices."""
    pods = [found for key, found in fake.objects.items() if key[2] == "pods"]
    return [pod for pod in pods if HOLDER_LABEL in pod["metadata"].get("labels", {})]


async def start_whole(pool: GpuPool, fake: FakeKubernetes, text: str = "2%") -> str:
    """Start a kernel of ada's whose device is then the pool's, and return its lease's id."""
    lease = await held(pool, text)
    await pool.launch(lease.id, command())
    assign(fake)
    fake.run(f"gpu-pool-{lease.id}-1")
    await running(pool, lease.id)
    await eventually(lambda: holders(fake))
    return lease.id


async def says(pool: GpuPool, fake: FakeKubernetes, used: Mapping[str, int], gpu: str = "GPU-gpu-0") -> None:
    """Let the agent of the node say what the kernels of leases use, in MiB, and no others anything."""
    uids = {lease: fake.get("pods", f"gpu-pool-{lease}-1")["metadata"]["uid"] for lease in used}
    uses = [PodDeviceUse(uids[lease], "", gpu, mib) for lease, mib in used.items()]
    assert pool.backend.agents is not None
    await pool.backend.agents.report("n1", [gpu], uses, complete=True)
