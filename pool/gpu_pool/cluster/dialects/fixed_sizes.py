"""Slices whose size an administrator has fixed: replicas of a GPU, and MIG instances.

Their dialects read the nodes, find the offer that is closest to what was
asked for, say what it really is, and refuse when it differs too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster.dialects.amounts import rounded_memory, rounded_share
from gpu_pool.cluster.dialects.base import WHOLE_GPU, DialectOptions, Gpu, Hold, Rounding, SliceStatement
from gpu_pool_client import (
    WHOLE,
    Enforcement,
    Limit,
    NeverFits,
    SliceRequest,
    Strength,
    format_memory,
    format_share,
)

_NOTHING: Final = Limit(Strength.NONE, "time-slicing limits nothing")
_UNKNOWN: Final = Limit(Strength.NONE, "no label of the node says whether its GPUs are shared")
#: What holds a slice, by the way in which a GPU is shared.
ENFORCED: Final = {
    "whole": WHOLE_GPU,
    "unknown": Enforcement(_UNKNOWN, _UNKNOWN),
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
    words: str
    #: The GPUs or MIG instances that are handed out whole or in replicas.
    gpus: tuple[Gpu, ...]

    @property
    def enforcement(self) -> Enforcement:
        """What holds it."""
        return ENFORCED[self.mode]

    @property
    def hold(self) -> Hold:
        """What a pod holds that has one."""
        return Hold(self.milli, self.memory_mib)

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
            return rounded_memory(request.memory_mib or 0, self.memory_mib, self.words)
        share = self.gpus[0].device.memory_mib * request.milli // WHOLE
        memory = () if self.mode == "mig" else rounded_memory(share, self.memory_mib, self.words)
        return (*rounded_share("compute", request.milli, self.milli, self.words), *memory)

    def __str__(self) -> str:
        memory = f", {format_memory(self.memory_mib)}" if self.memory_mib else ""
        return f"{self.words} ({format_share(self.milli)}{memory})"


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
    best = min(near, key=_preference)
    return tuple(each for each in near if _preference(each) == _preference(best))


def _preference(offer: FixedOffer) -> tuple[int, int, str]:
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
        f"You asked for {request.named}; no GPU here is handed out whole. There are: {there}.",
        "Ask for a part of a GPU, or ask the administrator.",
    )


def _none_near(request: SliceRequest, offers: Sequence[FixedOffer], options: DialectOptions) -> NeverFits:
    if not offers:
        return NeverFits(
            f"You asked for {request.named}; GPUs are handed out whole only here.", "Ask for whole GPUs."
        )
    sizes = sorted({(offer.milli, offer.memory_mib, str(offer)) for offer in offers})
    there = "; ".join(words for _, _, words in sizes)
    useful = [milli for milli, memory, _ in sizes if not memory or memory >= options.context_mib]
    size = format_share(useful[0]) if useful else ""
    return NeverFits(
        f"You asked for {request.named}; slices have fixed sizes here. One is given that is at least what "
        f"was asked for, at most {options.most_milli / WHOLE:g} times that, and holds the "
        f"{options.context_mib} MiB that CUDA itself takes. There are: {there}.",
        f"Ask for {size}, or for another size named here." if useful else "Ask for whole GPUs.",
    )


def mig_milli(profile: str, model: str) -> int:
    """Return the thousandths of a GPU's compute that a MIG profile such as ``1g.5gb`` has, rounded down."""
    slices = profile.partition("g.")[0]
    parts = 4 if any(name in model for name in _QUARTERED) else 7
    return min(WHOLE, int(slices) * WHOLE // parts) if slices.isdecimal() else 0
