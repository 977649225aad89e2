"""GKE's GPU sharing: replicas by time-sharing or MPS, chosen by node labels.

The rules, from https://cloud.google.com/kubernetes-engine/docs/how-to/timesharing-gpus
and ``…/nvidia-mps-gpus``: the nodes' labels say the strategy and how many
containers share a GPU, at most 48, and another one into which MIG instances it is divided
(``…/how-to/gpus-multi``); the pod selects those labels and asks for
one ``nvidia.com/gpu``; more than one is an UnexpectedAdmissionError.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    ENFORCED,
    FixedOffer,
    closest,
    cut,
    mig_milli,
    pin,
    refuse_index,
    refuse_limit,
    refuse_several,
    refuse_whole,
    statement,
    tolerations,
)
from gpu_pool.cluster.dialects.base import (
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
from gpu_pool.cluster.dialects.objects import MAX_GPUS, Node, Pod, driver_version, memory_mib, whole
from gpu_pool_client import WHOLE, Device, SliceRequest
from gpu_pool_client._free import accepts

ACCELERATOR: Final = "cloud.google.com/gke-accelerator"
STRATEGY: Final = "cloud.google.com/gke-gpu-sharing-strategy"
CLIENTS: Final = "cloud.google.com/gke-max-shared-clients-per-gpu"
#: The profile of the MIG instances into which a node pool's GPUs are divided.
_PARTITION: Final = "cloud.google.com/gke-gpu-partition-size"
_GPU: Final = "nvidia.com/gpu"
_MODES: Final = {"time-sharing": "time-slicing", "mps": "mps"}


class Gke(Dialect):
    """GPU node pools of Google Kubernetes Engine."""

    table = DialectTable(
        name="gke",
        title="GKE",
        memory="cooperative with MPS, none with time-sharing",
        compute="cooperative with MPS, none with time-sharing",
        smallest="1/48 of a GPU",
        rounding="up to a replica, at most 1.5 times what was asked for",
        quota=("requests.nvidia.com/gpu",),
        bans=PodBans(environment=frozenset({"NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"})),
        source="GKE's documentation of GPU sharing",
        rank=50,
    )

    def evidence(self) -> str:
        """GKE labels its GPU nodes."""
        found = [node for node in self.cluster.nodes if ACCELERATOR in node.labels and node.amount(_GPU)]
        return f"{len(found)} nodes carry the label {ACCELERATOR}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs; which of a node's a pod has is not shown."""
        return tuple(gpu for offer in self._offers() for gpu in offer.gpus)

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, or for one replica of the kind that is closest."""
        refuse_index(request, self.table.title)
        refuse_limit(request, self.table.title)
        refuse_several(request, self.table.title, "one replica is the most that a container gets")
        offers = [each for each in self._offers() if accepts(request.filters, each.gpus[0].device)]
        right = [each for each in offers if (each.mode == "whole") == request.whole_devices]
        if not offers:
            cut(request, self.gpus(), self.options, self.table.title)
        if request.whole_devices and not right:
            raise refuse_whole(request, offers)
        if request.whole_devices:
            size = cut(request, [gpu for each in right for gpu in each.gpus], self.options, self.table.title)
            truth = SliceStatement(request.count, WHOLE, size.memory_mib, ENFORCED["whole"])
            return self._pod(request, [each for each in right if each.gpus[0].node in size.nodes], truth)
        taken = closest(request, right, self.options)
        return self._pod(request, taken, statement(request, taken))

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Return one entry per replica or GPU that the pod has."""
        offer = self._by_node.get(pod.node)
        return (offer.hold,) * pod.count(_GPU) if offer else ()

    @cached_property
    def _by_node(self) -> dict[str, FixedOffer]:
        return {node.name: offer for node in self.cluster.nodes if (offer := _offer(node, self.options))}

    def _offers(self) -> tuple[FixedOffer, ...]:
        return tuple(self._by_node.values())

    def _pod(
        self, request: SliceRequest, taken: tuple[FixedOffer, ...] | list[FixedOffer], truth: SliceStatement
    ) -> Translation:
        nodes = sorted({each.gpus[0].node for each in taken})
        others = {gpu.node for gpu in self.gpus()}
        node = self.cluster.node(nodes[0])
        parts = PodParts(
            limits={_GPU: str(request.count)},
            node_selector={
                key: node.label(key) for key in (STRATEGY, CLIENTS, _PARTITION) if key in node.labels
            },
            node_affinity=pin(nodes, others, self.cluster, (ACCELERATOR,)),
            tolerations=tolerations(map(self.cluster.node, nodes)),
        )
        return Translation(self.table.name, parts, truth)


def _offer(node: Node, options: DialectOptions) -> FixedOffer | None:
    """Return what one ``nvidia.com/gpu`` of this node is, None if it is not one of GKE's."""
    if ACCELERATOR not in node.labels or node.amount(_GPU) <= 0:
        return None
    profile = node.label(_PARTITION)
    mode = _MODES.get(node.label(STRATEGY), "mig" if profile else "whole")
    clients = max(1, whole(node.label(CLIENTS))) if mode in _MODES.values() else 1
    shown, accelerator = memory_mib(node), node.label(ACCELERATOR)
    total = shown if profile else options.usable_mib(shown, node)
    size = mig_milli(profile, accelerator.upper()) if profile else WHOLE
    gpus = tuple(
        Gpu(
            node.name,
            Device(
                f"{node.name}/{_GPU}/{index}",
                index,
                accelerator,
                total,
                clients,
                milli=size,
                driver=driver_version(node),
                mig_profile=profile or None,
            ),
            node.cordoned,
        )
        for index in range(min(MAX_GPUS, -(-node.amount(_GPU) // clients)))
    )
    milli = 100 // clients * 10 * size // WHOLE if mode == "mps" else size // clients
    what = f"a MIG instance {profile}" if profile else "a GPU"
    alone = what if profile else "a whole GPU"
    label = alone if mode in ("whole", "mig") else f"one of {clients} replicas of {what}"
    return FixedOffer(_GPU, mode, milli, total // clients, label, gpus) if milli > 0 else None
