"""What a request means in whole MiB and thousandths, and on which of a cluster's GPUs it can be.

Where an administrator has fixed the sizes (replicas of a GPU, MIG instances), a
dialect reads the nodes' offers, finds the one that is closest to what was asked
for, says what it really is, and refuses when it differs too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster.dialects.base import (
    WHOLE_GPU,
    DialectOptions,
    Gpu,
    PodHolding,
    Rounding,
    SliceStatement,
)
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, Node
from gpu_pool_client import (
    WHOLE,
    BadRequest,
    Enforcement,
    Limit,
    NeverFits,
    SliceRequest,
    Strength,
    format_memory,
    format_share,
)
from gpu_pool_client._free import accepts

#: The label that every kubelet sets, and so the last resort for naming nodes.
HOSTNAME = "kubernetes.io/hostname"
_TAINTS = ("nvidia.com/gpu",)


@dataclass(frozen=True, slots=True)
class Cut:
    """A request in numbers: the same on every GPU that it may be placed on."""

    #: All GPUs it may be placed on, enough of them on each node.
    gpus: tuple[Gpu, ...]
    #: Thousandths of a GPU's compute; None for memory of GPUs whose size is unknown.
    milli: int | None
    #: MiB on each GPU; None for a share of GPUs whose size is unknown.
    memory_mib: int | None
    #: MiB of the smallest of these GPUs, 0 if unknown.
    smallest_mib: int
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes it may be placed on, in order."""
        return tuple(sorted({gpu.node for gpu in self.gpus}))


def cut(request: SliceRequest, gpus: Sequence[Gpu], options: DialectOptions, title: str) -> Cut:
    """Return what the request means on the GPUs that could hold it.

    A share is counted for the smallest of these GPUs, so that it is nowhere
    more than was asked for. Raises NeverFits if there is none.
    """
    eligible = _accepted(request, gpus, title)
    known = [gpu for gpu in eligible if gpu.device.memory_mib]
    candidates = known if known and not request.whole_devices else eligible
    eligible = [gpu for gpu in candidates if _holds(request, gpu, options)]
    if not eligible:
        raise _too_small(request, known, options)
    eligible = _enough_on_a_node(request, eligible)
    sizes = sorted({gpu.device.memory_mib for gpu in eligible})
    notes: tuple[str, ...] = ()
    if len(sizes) > 1 and not request.whole_devices:
        notes = (
            f"The GPUs have {format_memory(sizes[0])} to {format_memory(sizes[-1])}; the slice is computed "
            "for the smallest.",
        )
    return Cut(tuple(eligible), *_amounts(request, sizes[0]), sizes[0], notes)


def _amounts(request: SliceRequest, total: int) -> tuple[int | None, int | None]:
    """Return (milli, MiB); of the two, what follows from an unknown size is None."""
    if request.milli is not None:
        return request.milli, total * request.milli // WHOLE if total else None
    memory = request.memory_mib or 0
    return -(-memory * WHOLE // total) if total else None, memory


def _accepted(request: SliceRequest, gpus: Sequence[Gpu], title: str) -> list[Gpu]:
    if not gpus:
        raise NeverFits(
            f"You asked for {request.named}; no node of this cluster offers GPUs through {title}.",
            "Ask the administrator, who can look with gpu-pool doctor --cluster.",
        )
    accepted = [gpu for gpu in gpus if accepts(request.filters, gpu.device)]
    if not accepted:
        models = ", ".join(sorted({gpu.device.label for gpu in gpus}))
        raise NeverFits(
            f"You asked for {request.named}; no GPU of this cluster matches that. There are: {models}.",
            "Leave out the filters, or relax them.",
        )
    return accepted


def _holds(request: SliceRequest, gpu: Gpu, options: DialectOptions) -> bool:
    total = gpu.device.memory_mib
    memory = _amounts(request, total)[1]
    if memory is None:
        return True
    return options.context_mib <= memory and (not total or memory <= total)


def _too_small(request: SliceRequest, gpus: Sequence[Gpu], options: DialectOptions) -> NeverFits:
    largest = max((gpu.device.memory_mib for gpu in gpus), default=0)
    memory = _amounts(request, largest)[1] or 0
    if memory < options.context_mib:
        least = f"{options.context_mib}MiB"
        return NeverFits(
            f"{request.size} is {memory} MiB on the largest GPU here, and CUDA itself takes about "
            f"{options.context_mib} MiB before the first tensor, so nothing would be left.",
            f"Ask for at least {least}.",
        )
    return NeverFits(
        f"You asked for {request.named}; the largest GPU here has {format_memory(largest)}.",
        f"Ask for at most {format_memory(largest)} on one GPU.",
    )


def _enough_on_a_node(request: SliceRequest, gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs of the nodes that have as many as are asked for, since a pod is on one node."""
    per_node = Counter(gpu.node for gpu in gpus)
    most = max(per_node.values())
    if most < request.count:
        raise NeverFits(
            f"You asked for {request.count} GPUs on one node; no node has more than {most} that match.",
            f"Ask for at most {most}.",
        )
    return [gpu for gpu in gpus if per_node[gpu.node] >= request.count]


def refuse_index(request: SliceRequest, title: str) -> None:
    """Raise BadRequest if a GPU is asked for by its number and this system cannot be told so."""
    if request.filters.index:
        raise BadRequest(
            f"You asked for index=; {title} chooses the GPU itself.", "Leave out index=; model= can be used."
        )


def refuse_limit(
    request: SliceRequest, title: str, why: str = "gives a slice one size, and no limit above it"
) -> None:
    """Raise BadRequest if a limit above the guarantee is asked for and this system cannot be told so."""
    if request.has_limit:
        raise BadRequest(
            f"You asked for {request.named}; {title} {why}.",
            f"Ask for {request.guarantee}: the guarantee alone can be had here.",
        )


def refuse_several(request: SliceRequest, title: str, why: str) -> None:
    """Raise NeverFits if parts of several GPUs are asked for and this system cannot promise that."""
    if request.count > 1 and not request.whole_devices:
        raise NeverFits(
            f"You asked for {request.size}; {title} cannot promise parts of different GPUs: {why}.",
            "Ask for a part of one GPU, or for whole GPUs.",
        )


def up_to(milli: int, grain: int) -> int:
    """Round thousandths up to a multiple of the grain, and at least to one."""
    return max(grain, -(-milli // grain) * grain)


def rounded_share(what: str, asked: int, granted: int, why: str) -> tuple[Rounding, ...]:
    """Return the rounding between two shares in thousandths, nothing where there is none."""
    return () if asked == granted else (Rounding(what, format_share(asked), format_share(granted), why),)


def rounded_memory(asked: int, granted: int, why: str) -> tuple[Rounding, ...]:
    """Return the rounding between two amounts of memory in MiB, nothing where there is none."""
    if asked == granted:
        return ()
    return (Rounding("memory", format_memory(asked), format_memory(granted), why),)


def pin(
    names: Iterable[str], others: Iterable[str], cluster: Cluster, keys: Sequence[str]
) -> tuple[Manifest, ...]:
    """Return the requirements on node labels that these nodes meet and the other GPU nodes do not.

    The first of ``keys`` that tells them apart is used, else the hostname.
    Nothing is required where there are no others.
    """
    wanted, rest = set(names), set(others)
    if not rest - wanted:
        return ()
    for key in (*keys, HOSTNAME):
        values = {cluster.node(name).label(key) for name in wanted}
        if "" not in values and not values & {cluster.node(name).label(key) for name in rest - wanted}:
            return ({"key": key, "operator": "In", "values": sorted(values)},)
    return ({"key": HOSTNAME, "operator": "In", "values": sorted(wanted)},)


def tolerations(nodes: Iterable[Node]) -> tuple[Manifest, ...]:
    """Return what tolerates the taints by which GPU nodes keep other pods away, if these nodes have them."""
    found = {
        (str(taint.get("key")), str(taint.get("effect")))
        for node in nodes
        for taint in node.taints
        if taint.get("key") in _TAINTS
    }
    return tuple({"key": key, "operator": "Exists", "effect": effect} for key, effect in sorted(found))


def runtime_class(cluster: Cluster, options: DialectOptions) -> str | None:
    """Return the RuntimeClass that gives a container its GPU, None where the default runtime does."""
    return options.runtime_class or ("nvidia" if "nvidia" in cluster.runtime_classes else None)


_NOTHING: Final = Limit(Strength.NONE, "time-slicing limits nothing")
_UNKNOWN: Final = Limit(Strength.NONE, "no label of the node says whether its GPUs are shared")
_UNKNOWN_MIG: Final = Limit(Strength.NONE, "no label of the node says whether its MIG instances are shared")
#: What holds a slice, by the way in which a GPU is shared.
ENFORCED: Final = {
    "whole": WHOLE_GPU,
    "unknown": Enforcement(_UNKNOWN, _UNKNOWN),
    "unknown-mig": Enforcement(_UNKNOWN_MIG, _UNKNOWN_MIG),
    "mig": Enforcement(Limit(Strength.HARD, "a MIG instance"), Limit(Strength.HARD, "a MIG instance")),
    "mps": Enforcement(Limit(Strength.COOPERATIVE, "NVIDIA MPS"), Limit(Strength.COOPERATIVE, "NVIDIA MPS")),
    "time-slicing": Enforcement(_NOTHING, _NOTHING),
}
#: GPUs whose compute MIG divides by four; all others divide it by seven.
_QUARTERED: Final = ("A30", "RTX-PRO-6000")
_FIRMNESS: Final = (Strength.HARD, Strength.COOPERATIVE, Strength.NONE)


@dataclass(frozen=True, slots=True)
class FixedOffer:
    """One size of slice that one node hands out."""

    #: The resource of which a pod asks for one.
    resource: str
    #: A key of :data:`ENFORCED`.
    mode: str
    milli: int
    #: MiB; 0 where the node does not show it.
    memory_mib: int
    #: What it is, in words: ``one of 50 replicas of a GPU``.
    label: str
    #: The GPUs or MIG instances that are handed out whole or in replicas.
    gpus: tuple[Gpu, ...]
    #: What limits it, if not just its mode says so.
    held_by: Enforcement | None = None

    @property
    def enforcement(self) -> Enforcement:
        """What holds it."""
        return self.held_by or ENFORCED[self.mode]

    @property
    def hold(self) -> PodHolding:
        """What a pod holds that has one."""
        return PodHolding(self.milli, self.memory_mib)

    def excess(self, request: SliceRequest) -> int:
        """How much of what was asked for it is, in thousandths: 1000 is exactly that, less is too little."""
        if request.milli is not None:
            return self.milli * WHOLE // request.milli
        return self.memory_mib * WHOLE // (request.memory_mib or 1)

    def useful(self, options: DialectOptions) -> bool:
        """Whether CUDA fits into it and leaves something, as far as one can tell."""
        return not self.memory_mib or self.memory_mib >= options.context_mib

    def rounded(self, request: SliceRequest) -> tuple[Rounding, ...]:
        """Say how it differs from what was asked for."""
        if request.milli is None:
            return rounded_memory(request.memory_mib or 0, self.memory_mib, self.label)
        share = self.gpus[0].device.memory_mib * request.milli // WHOLE
        # Of a MIG instance nobody knows how much memory its GPU has.
        is_mig = self.gpus[0].device.mig_profile is not None or self.mode == "mig"
        memory = () if is_mig else rounded_memory(share, self.memory_mib, self.label)
        return (*rounded_share("compute", request.milli, self.milli, self.label), *memory)

    def __str__(self) -> str:
        memory = f", {format_memory(self.memory_mib)}" if self.memory_mib else ""
        return f"{self.label} ({format_share(self.milli)}{memory})"


def closest(
    request: SliceRequest, offers: Sequence[FixedOffer], options: DialectOptions
) -> tuple[FixedOffer, ...]:
    """Return the offers to take, all of one kind: the firmest memory limit first, then the smallest.

    An offer is never less than was asked for, nor more than ``options.most_milli``
    thousandths of it. Raises NeverFits, with what there is, if none is left.
    """
    useful = [offer for offer in offers if offer.useful(options)]
    near = [offer for offer in useful if WHOLE <= offer.excess(request) <= options.most_milli]
    if not near:
        raise _none_near(request, useful or offers, options)
    best = min(near, key=lambda each: (*_kind(each)[:2], each.memory_mib, each.resource))
    return tuple(each for each in near if _kind(each) == _kind(best))


def _kind(offer: FixedOffer) -> tuple[int, int, str]:
    return _FIRMNESS.index(offer.enforcement.memory.strength), offer.milli, offer.resource


def statement(
    request: SliceRequest, offers: Sequence[FixedOffer], notes: tuple[str, ...] = ()
) -> SliceStatement:
    """Return the truth about a slice that is one of these offers of one kind."""
    least = min(offers, key=lambda offer: offer.memory_mib)
    return SliceStatement(
        1, least.milli, least.memory_mib or None, least.enforcement, least.rounded(request), notes
    )


def refuse_whole(request: SliceRequest, offers: Sequence[FixedOffer]) -> NeverFits:
    """Return the refusal of whole GPUs where all are handed out in parts."""
    there = "; ".join(sorted({str(offer) for offer in offers}))
    return NeverFits(
        f"You asked for {request.named}; no GPU here can be granted whole. There are: {there}.",
        "Ask for a part of a GPU, or ask the administrator.",
    )


def _none_near(request: SliceRequest, offers: Sequence[FixedOffer], options: DialectOptions) -> NeverFits:
    if not offers:
        return NeverFits(
            f"You asked for {request.named}; GPUs can only be granted whole here.", "Ask for whole GPUs."
        )
    sizes = sorted({(offer.milli, offer.memory_mib, str(offer)) for offer in offers})
    there = "; ".join(label for _, _, label in sizes)
    useful = [milli for milli, memory, _ in sizes if not memory or memory >= options.context_mib]
    size = format_share(useful[0]) if useful else ""
    return NeverFits(
        f"You asked for {request.named}; slices have fixed sizes here. The one granted must be at least as "
        f"large, at most {options.most_milli / WHOLE:g} times as large, and larger than the "
        f"{options.context_mib} MiB that CUDA itself takes. There are: {there}.",
        f"Ask for {size}, or for another size named here." if useful else "Ask for whole GPUs.",
    )


def mig_milli(profile: str, model: str) -> int:
    """Return the thousandths of a GPU's compute that a MIG profile such as ``1g.5gb`` has, rounded down."""
    slices = profile.partition("g.")[0]
    parts = 4 if any(name in model for name in _QUARTERED) else 7
    return min(WHOLE, int(slices) * WHOLE // parts) if slices.isdecimal() else 0
