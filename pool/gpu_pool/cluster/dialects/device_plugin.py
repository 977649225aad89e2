"""NVIDIA's device plugin: whole GPUs, replicas by time-slicing or MPS, MIG in both strategies.

The rules, from https://github.com/NVIDIA/k8s-device-plugin, release 0.20:

- a replica is one of ``nvidia.com/gpu``, or of ``nvidia.com/gpu.shared`` where
  it was renamed, and so with MIG instances; the labels ``.replicas`` and ``.sharing-strategy`` say what it
  is, below the name that was not renamed. Time-slicing limits nothing (``README.md``,
  ``internal/lm/resource.go``);
- MPS gives each replica ``total / replicas`` of memory and ``100 / replicas``
  percent, both rounded down, for at most 48 replicas, and 16 below compute
  capability 7.5, which is what the code means by Volta
  (``cmd/mps-control-daemon/mps``);
- more than one replica in a pod is refused under MPS with
  UnexpectedAdmissionError, and elsewhere may be two of the same GPU;
- MIG ``mixed`` offers ``nvidia.com/mig-1g.5gb``, with labels of that name;
  ``single`` offers ``nvidia.com/gpu``, with the profile in ``.product``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    FixedOffer,
    closest,
    cut,
    mig_milli,
    pin,
    refuse_index,
    refuse_limit,
    refuse_several,
    refuse_whole,
    runtime_class,
    statement,
    tolerations,
)
from gpu_pool.cluster.dialects.base import (
    DEFAULTS,
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
from gpu_pool.cluster.dialects.gke import STRATEGY
from gpu_pool.cluster.dialects.hami import REGISTER
from gpu_pool.cluster.dialects.objects import (
    KINDS,
    MAX_GPUS,
    Node,
    Pod,
    compute_capability,
    driver_version,
    memory_mib,
    model,
    whole,
)
from gpu_pool_client import WHOLE, Device, SliceRequest
from gpu_pool_client._free import accepts

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
#: Modes in which one of the resource is a GPU, known to be whole or taken for it where no label says more.
UNSHARED: Final = ("whole", "unknown")
_MIG: Final = "nvidia.com/mig-"
_MIG_STRATEGY: Final = "nvidia.com/mig.strategy"
#: What renameByDefault adds to the name of a resource that is shared.
_RENAMED: Final = ".shared"
#: Strategies of sharing.
_STRATEGIES: Final = ("time-slicing", "mps")
#: The first capability that the plugin takes for Volta, and most MPS replicas from there on and below.
_VOLTA: Final = (7, 5)
_MOST_REPLICAS: Final = 48
_MOST_BEFORE: Final = 16
#: Variables by which a process would choose other devices or other limits than the plugin gave it.
MPS_VARIABLES: Final = frozenset(
    {
        "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    }
)  # fmt: skip


class DevicePlugin(Dialect):
    """NVIDIA's device plugin, told apart by the labels of GPU feature discovery."""

    table = DialectTable(
        name="device-plugin",
        title="the NVIDIA device plugin",
        memory="hard with MIG, cooperative with MPS, none with time-slicing",
        compute="hard with MIG, cooperative with MPS, none with time-slicing",
        smallest="one replica (MPS: 1/48, on a V100 1/16) or one MIG instance (1/7)",
        rounding="up to a replica or MIG instance, at most 1.5 times what was asked for",
        quota=("requests.nvidia.com/gpu",),
        bans=PodBans(environment=MPS_VARIABLES),
        source="k8s-device-plugin 0.20",
        rank=90,
        seen="without GPUs: time-slicing by plugin 0.20 and its feature discovery, on Kubernetes 1.36.2",
    )

    def evidence(self) -> str:
        """Nodes offer its resources."""
        found = [node for node in self.cluster.nodes if node_offers(node)]
        return f"{len(found)} nodes offer {GPU} or MIG instances" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return GPUs and MIG instances; which of a node's a pod has is not shown."""
        return tuple(gpu for offer in self._offers() for gpu in offer.gpus)

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, or for the replica or MIG instance that is closest."""
        refuse_index(request, self.table.title)
        refuse_limit(request, self.table.title)
        offers = [each for each in self._offers() if accepts(request.filters, each.gpus[0].device)]
        if not offers:
            cut(request, self.gpus(), self.options, self.table.title)
        if request.whole_devices:
            return self._whole(request, offers)
        refuse_several(request, self.table.title, "two replicas or MIG instances can be of the same GPU")
        taken = closest(request, [each for each in offers if each.mode not in UNSHARED], self.options)
        pod = self._pod({taken[0].resource: "1"}, taken)
        return Translation(self.table.name, pod, statement(request, taken, _notes(taken[0])))

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Return one entry per replica, instance or GPU that the pod has."""
        offers = self._by_node.get(pod.node, ())
        return tuple(offer.hold for offer in offers for _ in range(pod.count(offer.resource)))

    @cached_property
    def _by_node(self) -> dict[str, tuple[FixedOffer, ...]]:
        return {node.name: node_offers(node, self.options) for node in self.cluster.nodes}

    def _offers(self) -> tuple[FixedOffer, ...]:
        return tuple(offer for offers in self._by_node.values() for offer in offers)

    def _whole(self, request: SliceRequest, accepted: list[FixedOffer]) -> Translation:
        unshared = [each for each in accepted if each.mode in UNSHARED]
        if not unshared:
            raise refuse_whole(request, accepted)
        known = [each for each in unshared if each.mode == "whole"]
        offers = known if any(len(each.gpus) >= request.count for each in known) else unshared
        size = cut(request, [gpu for each in offers for gpu in each.gpus], self.options, self.table.title)
        taken = tuple(each for each in offers if each.gpus[0].node in size.nodes)
        pod = self._pod({GPU: str(request.count)}, taken)
        least = max(taken, key=lambda each: UNSHARED.index(each.mode))
        truth = SliceStatement(request.count, WHOLE, size.memory_mib, least.enforcement)
        return Translation(self.table.name, pod, truth)

    def _pod(self, limits: dict[str, str], taken: tuple[FixedOffer, ...]) -> PodParts:
        nodes = sorted({each.gpus[0].node for each in taken})
        return PodParts(
            limits=limits,
            runtime_class=runtime_class(self.cluster, self.options),
            node_affinity=pin(nodes, self._rivals(next(iter(limits))), self.cluster, KINDS),
            tolerations=tolerations(map(self.cluster.node, nodes)),
        )

    def _rivals(self, resource: str) -> set[str]:
        """Return the nodes that offer the same resource, whatever one of it is there."""
        return {node.name for node in self.cluster.nodes if node.amount(resource)}


def node_offers(node: Node, options: DialectOptions = DEFAULTS) -> tuple[FixedOffer, ...]:
    """Return what a node hands out, by the labels of GPU feature discovery.

    Nothing, where HAMi's or GKE's plugin hands out a resource of the same name.
    """
    if REGISTER in node.annotations or STRATEGY in node.labels:
        return ()
    plain = [_plain(node, resource, options) for resource in (GPU, SHARED) if node.amount(resource) > 0]
    mixed = [_mig(node, resource, _profile(resource)) for resource in node.resources(_MIG)]
    return tuple(offer for offer in (*plain, *mixed) if offer is not None)


def _profile(resource: str) -> str:
    return resource.removeprefix(_MIG).removesuffix(_RENAMED)


def _plain(node: Node, resource: str, options: DialectOptions) -> FixedOffer | None:
    """Return what one of ``nvidia.com/gpu`` is on this node; None where nothing useful is known of it."""
    product = node.label(f"{GPU}.product")
    if node.label(_MIG_STRATEGY) == "single" and "-MIG-" in product:
        return _mig(node, resource, product.removesuffix("-SHARED").split("-MIG-")[1])
    sharing = _sharing(node, resource, GPU)
    if sharing is None:
        return None
    mode, replicas = sharing
    total = options.usable_mib(memory_mib(node), node)
    if mode in UNSHARED:
        gpus = tuple(_gpus(node, resource, node.count(resource), total))
        return FixedOffer(resource, mode, WHOLE, total, "a whole GPU", gpus)
    mps = mode == "mps"
    if mps and replicas > most_replicas(node):
        return None
    gpus = tuple(_gpus(node, resource, _number(node, resource, replicas), total, contexts=replicas))
    milli = 100 // replicas * 10 if mps else WHOLE // replicas
    label = f"one of {replicas} {'MPS ' if mps else ''}replicas of a GPU"
    return _useful(FixedOffer(resource, mode, milli, total // replicas, label, gpus))


def _sharing(node: Node, resource: str, labels: str) -> tuple[str, int] | None:
    """Return how one of the resource is shared, and by how many; None where it is, and nothing says how.

    ``labels`` is the name by which the node's labels call the resource.
    """
    replicas, strategy = whole(node.label(f"{labels}.replicas")), node.label(f"{labels}.sharing-strategy")
    there = whole(node.label(f"{labels}.count"))
    if labels != GPU or node.label(_MIG_STRATEGY) != "single":
        # More than there are: so many share each of them, whatever is said.
        replicas = max(replicas, -(-max(0, node.amount(resource)) // there) if there else 0)
    if replicas > 1:
        return ("mps" if strategy == "mps" else "time-slicing"), replicas
    if resource.endswith(_RENAMED) or strategy in _STRATEGIES:
        return None
    return ("whole" if f"{labels}.replicas" in node.labels else "unknown"), 1


def _number(node: Node, resource: str, replicas: int) -> int:
    """Return how many GPUs or instances there are of which a node offers replicas."""
    return min(MAX_GPUS, -(-max(0, node.amount(resource)) // replicas))


def _useful(offer: FixedOffer) -> FixedOffer | None:
    """Return the offer, None where it is nothing of a GPU."""
    return offer if offer.milli > 0 else None


def most_replicas(node: Node) -> int:
    """Return how many replicas the plugin's MPS starts with on this node's GPUs."""
    capability = compute_capability(node)
    return _MOST_BEFORE if (0, 0) < capability < _VOLTA else _MOST_REPLICAS


def _mig(node: Node, resource: str, profile: str) -> FixedOffer | None:
    labels = GPU if resource in (GPU, SHARED) else resource.removesuffix(_RENAMED)
    total, milli = memory_mib(node, labels), mig_milli(profile, model(node))
    sharing = _sharing(node, resource, labels)
    if not milli or sharing is None:
        return None
    mode, replicas = sharing
    number = _number(node, resource, replicas)
    gpus = tuple(_gpus(node, resource, number, total, contexts=replicas, profile=profile, milli=milli))
    if replicas > 1:
        label = f"one of {replicas} replicas of a MIG instance {profile}"
        return _useful(FixedOffer(resource, mode, milli // replicas, total // replicas, label, gpus))
    known = "mig" if mode == "whole" else "unknown-mig"
    return FixedOffer(resource, known, milli, total, f"a MIG instance {profile}", gpus)


def _gpus(
    node: Node,
    resource: str,
    count: int,
    memory: int,
    *,
    contexts: int = 1,
    profile: str | None = None,
    milli: int = WHOLE,
) -> Iterator[Gpu]:
    for index in range(count):
        device = Device(
            uuid=f"{node.name}/{resource}/{index}",
            index=index,
            model=model(node),
            memory_mib=memory,
            contexts=contexts,
            milli=milli,
            driver=driver_version(node),
            mig_profile=profile,
        )
        yield Gpu(node.name, device, node.cordoned, resource)


def _notes(offer: FixedOffer) -> tuple[str, ...]:
    if offer.mode == "time-slicing":
        return ("Nothing stops a neighbour on the same GPU from taking more memory than its part.",)
    return ()
