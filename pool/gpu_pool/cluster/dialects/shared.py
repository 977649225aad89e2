"""Whole devices that the pool claims and divides itself, as on one machine.

Each device is had by one ResourceClaim that selects it by its uuid, and that every pod of a lease on it
names: pods of one namespace may share a claim, up to 256 of them (``status.reservedFor`` of the API
``resource.k8s.io/v1``). So the scheduler assigns devices, and nothing but the pool knows of slices: any
size, to the thousandth and to the MiB, and no configuration beforehand.

Where the GPU of a node is the pool's by replicas of the device plugin, its pods ask for one of these instead.
A device that any other claim has is not the pool's. What a kernel's pod has of its devices is
written on it, since its claim says only which these are. How the claims come and go:
``gpu_pool.cluster.device_claims``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from gpu_pool.cluster.dialects.amounts import (
    Cut,
    cut,
    runtime_class,
    tolerations,
)
from gpu_pool.cluster.dialects.base import (
    WHOLE_GPU,
    Dialect,
    DialectOptions,
    DialectTable,
    Gpu,
    PodBans,
    PodHolding,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.device_plugin import node_offers
from gpu_pool.cluster.dialects.objects import (
    POOL_LABEL,
    PREFIX,
    Cluster,
    Manifest,
    Node,
    Pod,
    label_value,
    mapping,
    whole,
)
from gpu_pool.cluster.dialects.resource_slices import (
    DRIVER,
    GPU_CLASS,
    MIG_CLASS,
    ListedDevice,
    claim_holds,
    claimed_devices,
    read_devices,
)
from gpu_pool_client import Enforcement, Limit, NeverFits, Slice, SliceRequest, Strength

# Nodes whose only GPU is one pool's, by replicas of NVIDIA's device plugin instead of a claim.
#
# A replica (time-slicing) gives a pod the GPU and limits nothing, so the pool can divide the GPU as it
# divides a claimed one. But the plugin chooses which GPU a pod gets, so a node may have one alone; and a
# replica that no pod has is free for anybody. No pod of the pool's could keep them for it: how many a pod
# has cannot change while it runs, and between its end and the begin of a kernel they are anybody's. So an
# administrator gives the node to the pool, by a taint with the namespace of its kernels, which these alone
# tolerate:
#
#     kubectl taint node NODE jupyter-gpu-pool/shared=NAMESPACE:NoSchedule
#
# Who tolerates it all the same and asks for a replica is seen, and nothing more is granted there.

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
            yield _replica_node(node, options, most, by_claims=node.name in listed)


def _is_ours(taint: Manifest) -> bool:
    return taint.get("key") == TAINT and taint.get("effect") in _REPELLING


def _listing_node(slice_: Manifest) -> str:
    spec = mapping(slice_.get("spec"))
    return str(spec.get("nodeName") or "") if spec.get("driver") == "gpu.nvidia.com" else ""


def _replica_node(node: Node, options: DialectOptions, most: int, *, by_claims: bool) -> ReplicaNode:
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


API: Final = "resource.k8s.io/v1"
#: Where a claim says which device it is for: its uuid and its node.
DEVICE: Final = f"{PREFIX}/device"
NODE: Final = f"{PREFIX}/node"
#: Where a kernel's pod says what it has of its devices: ``GPU-a=20/655``, thousandths and MiB.
SLICES: Final = f"{PREFIX}/slices"
#: How many kernels may share a device: a claim serves 256 pods, of which one keeps it, and a kernel that is
#: started anew may for a moment be two.
MOST_PODS: Final = 250
#: What a uuid may be that is written into CEL.
_UUID: Final = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)
_WRITTEN: Final = re.compile(r"([0-9A-Za-z-]{1,64})=([0-9]{1,4})/([0-9]{1,8})", re.ASCII)
_MOST_WRITTEN: Final = 64

#: What holds a slice of a device: the kernel itself, as far as it does.
CAPS: Final = Enforcement(
    Limit(
        Strength.COOPERATIVE,
        "framework caps: jax, cupy; torch, tensorflow only in a Python kernel whose image has "
        "jupyter-gpu-pool",
    ),
    Limit(Strength.NONE, "time-slicing limits nothing"),
)


def claim_name(pool: str, uuid: str) -> str:
    """Return the name of a pool's claim of a device."""
    digest = hashlib.sha256(f"{label_value(pool)}\0{uuid}".encode()).hexdigest()
    return f"gpu-pool-device-{digest[:16]}"


def is_claim_of(claim: Manifest, pool: str, namespace: str) -> bool:
    """Whether a claim is one of a pool's, by where it is, its name and its labels."""
    metadata = mapping(claim.get("metadata"))
    uuid = str(mapping(metadata.get("annotations")).get(DEVICE, ""))
    return (
        bool(uuid)
        and metadata.get("namespace") == namespace
        and metadata.get("name") == claim_name(pool, uuid)
        and mapping(metadata.get("labels")).get(POOL_LABEL) == label_value(pool)
    )


class Shared(Dialect):
    """Whole devices by NVIDIA's DRA driver, which the pool divides."""

    table = DialectTable(
        name="shared",
        title="the pool's own division of whole GPUs",
        memory="cooperative",
        compute="none",
        smallest="what CUDA itself takes",
        rounding="none",
        quota=(),
        bans=PodBans(environment=frozenset({"NVIDIA_VISIBLE_DEVICES"})),
        source="dra-driver-nvidia-gpu, 2026-08; Kubernetes' API resource.k8s.io/v1",
        rank=200,
        by_pool=True,
        seen="without GPUs or the driver: claims of listed devices, on Kubernetes 1.36.2",
    )

    def evidence(self) -> str:
        """Look for the device class of NVIDIA's DRA driver, and for devices that a claim can have alone."""
        if self.missing():
            return ""
        words = (
            f"there is the device class {GPU_CLASS}, and claims can have {len(self._devices)} devices whole"
        )
        replicas = f"{len(self._replicas)} nodes are the pool's, with replicas of their only GPU"
        found = (words if self._devices else "", replicas if self._replicas else "")
        return "; ".join(filter(None, found))

    def missing(self) -> str:
        """Say what the cluster lacks for it, in a sentence; empty if it lacks nothing."""
        if self._replicas:
            return ""
        if self.unfit and not self._devices:
            return f"The node {self.unfit[0].name} is set aside for the pool, but {self.unfit[0].why_not}."
        if not self.cluster.device_classes & {GPU_CLASS, MIG_CLASS}:
            return (
                f"The cluster has no device class {GPU_CLASS}: either its Kubernetes does not serve {API} "
                "(1.34 and newer do), or NVIDIA's DRA driver is not installed."
            )
        if self._devices:
            return ""
        if not self._claimable:
            return f"No ResourceSlice of the driver {DRIVER} lists a device that one claim can have whole."
        return (
            f"None of {len(self._claimable)} devices is set aside for the pool by shared_nodes "
            f"({self.options.shared_nodes}) and shared_most ({self.options.shared_most})."
        )

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the devices that the pool may claim. Those that others have are closed."""
        by_replicas = (node.gpu for node in self._replicas.values() if node.gpu is not None)
        return (*(self._shown(each) for each in self._devices), *by_replicas)

    @property
    def tolerated(self) -> tuple[Manifest, ...]:
        """See ``Dialect.tolerated``: the taint of nodes that are the pool's."""
        return (toleration(self.options.namespace),)

    @property
    def unfit(self) -> tuple[ReplicaNode, ...]:
        """The nodes that are set aside for the pool, and whose GPU it cannot have."""
        return tuple(each for each in self._set_aside if each.why_not)

    @property
    def replicated(self) -> tuple[ReplicaNode, ...]:
        """The nodes whose only GPU is the pool's by replicas."""
        return tuple(self._replicas.values())

    def is_replicated(self, uuid: str) -> bool:
        """Whether a device is the pool's by replicas, and not by a claim."""
        return uuid in self._by_replica

    def replicated_on(self, node: str) -> str:
        """Return the uuid of a node's only device, where it is the pool's by replicas; else nothing."""
        found = self._replicas.get(node)
        return "" if found is None or found.gpu is None else found.gpu.device.uuid

    def translate(self, request: SliceRequest) -> Translation:
        """Say what a slice is worth. What a pod names of it depends on the devices: see :meth:`parts`."""
        missing = self.missing()
        if missing:
            raise NeverFits(
                f"You asked for {request.named}. {missing}",
                "Ask the administrator, who can look with gpu-pool doctor --cluster.",
            )
        size = cut(request, self.gpus(), self.options, self.table.title)
        enforcement = WHOLE_GPU if request.whole_devices else CAPS
        truth = SliceStatement(
            request.count, size.milli, size.memory_mib, enforcement, notes=size.notes, counted=request
        )
        return Translation(self.table.name, self._base(size), truth)

    def parts(self, slices: Sequence[Slice]) -> PodParts:
        """Return what the pod of a lease with these slices needs: the claims of its devices, or a replica."""
        claims = tuple(
            {"name": f"gpu-{number}", "resourceClaimName": claim_name(self.options.pool, part.device.uuid)}
            for number, part in enumerate(slices)
            if not self.is_replicated(part.device.uuid)
        )
        nodes = [
            self._by_replica[part.device.uuid] for part in slices if self.is_replicated(part.device.uuid)
        ]
        written = " ".join(f"{part.device.uuid}={part.milli}/{part.memory_mib}" for part in slices)
        gpus = tuple(Gpu(part.device.node, part.device) for part in slices)
        base = self._base(Cut(gpus, None, None, 0))
        if nodes:
            base = replace(base, tolerations=(*base.tolerations, *self.tolerated))
        limits = {node.resource: "1" for node in nodes}
        return replace(base, claims=claims, limits=limits, annotations={SLICES: written})

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Return what a kernel of the pool says that it has; others have whole devices."""
        if pod.namespace == self.options.namespace and pod.labels.get(POOL_LABEL) == label_value(
            self.options.pool
        ):
            return tuple(_written(pod.annotation(SLICES)))
        node = self._replicas.get(pod.node)
        by_replica = () if node is None else node.hold_of(pod)
        return (*by_replica, *self._held_by_others.get((pod.namespace, pod.name), ()))

    def claim(self, uuid: str) -> dict[str, Any] | None:
        """Return the claim of a device, to be created; None where it is not listed."""
        found = next((each for each in self._devices if each.gpu.device.uuid == uuid), None)
        if found is None:
            return None
        attributes = f"device.attributes['{DRIVER}']"
        expression = f"'uuid' in {attributes} && {attributes}.uuid == '{uuid}'"
        exactly: dict[str, Any] = {
            "deviceClassName": MIG_CLASS if found.profile else GPU_CLASS,
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [{"cel": {"expression": expression}}],
        }
        if found.shares:  # or it would have one of them, and others the rest
            exactly["capacity"] = {"requests": {"shares": str(found.shares)}}
        return {
            "apiVersion": API,
            "kind": "ResourceClaim",
            "metadata": {
                "name": claim_name(self.options.pool, uuid),
                "namespace": self.options.namespace,
                "labels": {
                    "app.kubernetes.io/managed-by": PREFIX,
                    POOL_LABEL: label_value(self.options.pool),
                },
                "annotations": {DEVICE: uuid, NODE: found.gpu.node},
            },
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }

    def is_listed(self, uuid: str) -> bool:
        """Whether a device is one that the pool may have."""
        return self.is_replicated(uuid) or any(each.gpu.device.uuid == uuid for each in self._devices)

    def taken(self, uuid: str) -> bool:
        """Whether another claim than the pool's has a device."""
        return uuid in self._taken

    @cached_property
    def _claimable(self) -> tuple[ListedDevice, ...]:
        """The devices that one claim can have whole and be known by: each has a uuid, and one that shows."""
        return tuple(
            each
            for each in read_devices(self.cluster, self.options).devices
            if each.is_offered and not each.unlimited and _UUID.fullmatch(each.gpu.device.uuid)
        )

    @cached_property
    def _devices(self) -> tuple[ListedDevice, ...]:
        """Those of them that are set aside for the pool: always the same ones, whoever has them."""
        chosen = tuple(
            each for each in self._claimable if _selects(self.options.shared_nodes, self._node(each))
        )
        return chosen[: self.options.shared_most]

    @cached_property
    def _set_aside(self) -> tuple[ReplicaNode, ...]:
        return tuple(replica_nodes(self.cluster, self.options, MOST_PODS))

    @cached_property
    def _replicas(self) -> dict[str, ReplicaNode]:
        """The nodes whose GPU is the pool's by replicas, by name."""
        return {each.name: each for each in self._set_aside if each.gpu is not None}

    @cached_property
    def _by_replica(self) -> dict[str, ReplicaNode]:
        return {each.gpu.device.uuid: each for each in self._replicas.values() if each.gpu is not None}

    def _node(self, device: ListedDevice) -> Node:
        return self.cluster.node(device.gpu.node)

    @cached_property
    def _others(self) -> tuple[Manifest, ...]:
        pool, namespace = self.options.pool, self.options.namespace
        return tuple(each for each in self.cluster.resource_claims if not is_claim_of(each, pool, namespace))

    @cached_property
    def _taken(self) -> frozenset[str]:
        return claimed_devices(self._others, self._devices)

    @cached_property
    def _leaving(self) -> frozenset[str]:
        """The devices whose claim of the pool is being deleted: no pod can use it any more."""
        pool, namespace = self.options.pool, self.options.namespace
        found = (
            mapping(each.get("metadata"))
            for each in self.cluster.resource_claims
            if is_claim_of(each, pool, namespace)
        )
        return frozenset(
            str(mapping(each.get("annotations")).get(DEVICE))
            for each in found
            if each.get("deletionTimestamp")
        )

    @cached_property
    def _held_by_others(self) -> dict[tuple[str, str], tuple[PodHolding, ...]]:
        return claim_holds(replace(self.cluster, resource_claims=self._others), self._devices)

    def _shown(self, listed: ListedDevice) -> Gpu:
        gpu, notes = listed.gpu, listed.gpu.notes
        uuid = gpu.device.uuid
        if uuid in self._taken:
            notes += ("another claim of the cluster has it",)
        elif uuid in self._leaving:
            notes += ("the pool's claim of it is being deleted",)
        closed = gpu.drained or uuid in self._taken or uuid in self._leaving
        return replace(gpu, device=replace(gpu.device, contexts=MOST_PODS), drained=closed, notes=notes)

    def _base(self, size: Cut) -> PodParts:
        return PodParts(
            runtime_class=runtime_class(self.cluster, self.options),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )


def _selects(selector: str, node: Node) -> bool:
    """Whether a node has all of these labels: ``key=value`` or ``key``, with commas between them."""
    wanted = (each.strip().partition("=") for each in selector.split(",") if each.strip())
    return all(node.label(key) == value if sign else key in node.labels for key, sign, value in wanted)


def _written(text: str) -> Iterator[PodHolding]:
    """Yield what is written on a kernel's pod, as far as it can be read."""
    words: Iterable[str] = text.split()[:_MOST_WRITTEN]
    for match in filter(None, map(_WRITTEN.fullmatch, words)):
        yield PodHolding(int(match[2]), int(match[3]), match[1])
