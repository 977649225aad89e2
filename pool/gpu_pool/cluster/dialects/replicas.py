"""Nodes whose only GPU is one pool's, by replicas of NVIDIA's device plugin instead of a claim. Pure.

A replica (time-slicing) gives a pod the GPU and limits nothing, so the pool can divide the GPU as it divides
a claimed one. But the plugin chooses which GPU a pod gets, so a node may have one alone; and a replica that
no pod has is free for anybody. No pod of the pool's could keep them for it: how many a pod has cannot change
while it runs, and between its end and the begin of a kernel they are anybody's. So an administrator gives the
node to the pool, by a taint with the namespace of its kernels, which these alone tolerate::

    kubectl taint node NODE jupyter-gpu-pool/shared=NAMESPACE:NoSchedule

Who tolerates it all the same and asks for a replica is seen, and nothing more is granted there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool.cluster.dialects.base import DialectOptions, Gpu, PodHolding
from gpu_pool.cluster.dialects.device_plugin import node_offers
from gpu_pool.cluster.dialects.objects import PREFIX, Cluster, Manifest, Node, Pod, mapping, whole

#: The taint of a node that is a pool's.
TAINT: Final = f"{PREFIX}/shared"
_REPELLING: Final = ("NoSchedule", "NoExecute")
_COUNT: Final = "nvidia.com/gpu.count"


@dataclass(frozen=True, slots=True)
class ReplicaNode:
    """A node that is set aside for a pool."""

    name: str
    #: Why the pool cannot have its GPU, in words that follow its name; empty where it can.
    why_not: str = ""
    gpu: Gpu | None = None
    #: Of which a kernel's pod asks for one.
    resource: str = ""

    def hold_of(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Return what a pod has there that is not the pool's: the GPU, which nobody else divides."""
        if self.gpu is None or pod.node != self.name or not pod.count(self.resource):
            return ()
        device = self.gpu.device
        return (PodHolding(device.milli, device.memory_mib, device.uuid),)


def toleration(namespace: str) -> Manifest:
    """Return what tolerates the taint of the nodes of a pool whose kernels are in this namespace."""
    return {"key": TAINT, "operator": "Equal", "value": namespace}


def replica_nodes(cluster: Cluster, options: DialectOptions, most: int) -> Iterator[ReplicaNode]:
    """Yield the nodes that are the pool's by their taint; each GPU has places for ``most`` pods at most.

    Without a namespace in the options, those of all pools.
    """
    listed = {_listing_node(each) for each in cluster.resource_slices}
    for node in cluster.nodes:
        owners = {str(each.get("value") or "") for each in node.taints if _is_ours(each)}
        if owners and (not options.namespace or options.namespace in owners):
            yield _read(node, options, most, by_claims=node.name in listed)


def _is_ours(taint: Manifest) -> bool:
    return taint.get("key") == TAINT and taint.get("effect") in _REPELLING


def _listing_node(slice_: Manifest) -> str:
    spec = mapping(slice_.get("spec"))
    return str(spec.get("nodeName") or "") if spec.get("driver") == "gpu.nvidia.com" else ""


def _read(node: Node, options: DialectOptions, most: int, *, by_claims: bool) -> ReplicaNode:
    if by_claims:
        return ReplicaNode(
            node.name, "has GPUs that the DRA driver lists: only one of both may hand them out"
        )
    offers = node_offers(node, options)
    if not offers:
        return ReplicaNode(node.name, "shows no GPU of NVIDIA's device plugin")
    (offer, *others), shown = offers, whole(node.label(_COUNT))
    number = max(shown, len(offer.gpus))
    if others or number > 1:
        return ReplicaNode(
            node.name,
            f"has {max(number, 1 + len(others))} GPUs, and the device plugin chooses which one a pod gets",
        )
    if offer.mode != "time-slicing":
        return ReplicaNode(node.name, f"hands out {offer.label}, and not replicas by time-slicing")
    (gpu,) = offer.gpus
    if not gpu.device.memory_mib:
        return ReplicaNode(node.name, "does not show how much memory its GPU has (GPU feature discovery)")
    digest = hashlib.sha256(node.name.encode()).hexdigest()[:16]
    places = min(gpu.device.contexts or 1, most)
    device = replace(gpu.device, uuid=f"replica-{digest}", contexts=places)
    return ReplicaNode(node.name, gpu=replace(gpu, device=device), resource=offer.resource)
