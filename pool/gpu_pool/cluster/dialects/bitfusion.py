"""Bitfusion, for clusters that still have it: GPUs of another machine, over the network.

The rules, from https://github.com/vmware/bitfusion-with-kubernetes-integration
(``bitfusion_device_plugin/README.md``; the product is at its end of life):

- ``bitfusion.io/gpu-amount`` with ``bitfusion.io/gpu-percent`` (1 to 100, of
  each GPU's memory) or ``bitfusion.io/gpu-memory`` with a unit;
- annotations say what its webhook does and which client is in the image;
- the webhook rewrites containers with a ``command`` only, and rejects a pod in
  which another container has a ``command`` and no amount;
- nodes offer a constant 1000 ``bitfusion.io/gpu``: what GPUs there are is known
  to Bitfusion's servers alone.
"""

from __future__ import annotations

from typing import Final

from gpu_pool.cluster.dialects.amounts import refuse_limit, rounded_share, up_to
from gpu_pool.cluster.dialects.base import (
    Dialect,
    DialectTable,
    Gpu,
    PodBans,
    PodHolding,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.objects import MAX_GPUS, Pod, PodContainer, held_together, mib
from gpu_pool_client import BadRequest, Enforcement, Filters, Limit, NeverFits, SliceRequest, Strength

_GPU: Final = "bitfusion.io/gpu"
_AMOUNT: Final = "bitfusion.io/gpu-amount"
_PERCENT: Final = "bitfusion.io/gpu-percent"
_MEMORY: Final = "bitfusion.io/gpu-memory"
_GRAIN: Final = 10
_SERVER: Final = Enforcement(
    Limit(Strength.COOPERATIVE, "Bitfusion's server"), Limit(Strength.NONE, "Bitfusion limits memory only")
)


class Bitfusion(Dialect):
    """Bitfusion's device plugin and webhook."""

    table = DialectTable(
        name="bitfusion",
        title="Bitfusion",
        memory="cooperative",
        compute="none",
        smallest="1% of a GPU's memory",
        rounding="memory up to 1%, or to 1 MiB",
        quota=("requests.bitfusion.io/gpu",),
        bans=PodBans(
            annotations=frozenset({"auto-management/bitfusion", "bitfusion-client/filter"}),
            resources=("nvidia.com/", "bitfusion.io/"),
        ),
        source="bitfusion-with-kubernetes-integration",
        rank=80,
    )

    def evidence(self) -> str:
        """Its plugin advertises a constant on nodes."""
        found = [node for node in self.cluster.nodes if node.amount(_GPU)]
        return f"{len(found)} nodes offer {_GPU}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return nothing: the GPUs are on Bitfusion's servers, and no node shows them."""
        return ()

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for percent or MiB of remote GPUs."""
        refuse_limit(request, self.table.title)
        self._check(request)
        percent = up_to(request.milli or 0, _GRAIN) // _GRAIN
        size = {_MEMORY: f"{request.memory_mib}Mi"} if request.memory_mib else {_PERCENT: str(percent)}
        system, version = self.options.bitfusion_client
        pod = PodParts(
            annotations={
                "auto-management/bitfusion": "all",
                "bitfusion-client/os": system,
                "bitfusion-client/version": version,
            },
            limits={_AMOUNT: str(request.count), **size},
            needs_command=True,
        )
        milli = None if request.memory_mib else percent * _GRAIN
        rounded = rounded_share("memory", request.milli or 0, milli or 0, "Bitfusion counts whole percents")
        of = "" if request.memory_mib else f"It is {percent}% of a GPU's memory. "
        notes = (f"{of}How much memory its GPUs have, and how much is free, only Bitfusion's server knows.",)
        truth = SliceStatement(request.count, milli, request.memory_mib, _SERVER, rounded, notes)
        return Translation(self.table.name, pod, truth)

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read its containers' limits, which are for each of their GPUs; these are on another machine."""
        held = held_together(pod.containers, map(_amounts, pod.containers))
        count = min(MAX_GPUS, held.get("gpus", 0))
        return tuple(
            PodHolding(_nth(held.get("milli", 0), count, n), _nth(held.get("mib", 0), count, n))
            for n in range(count)
        )

    def _check(self, request: SliceRequest) -> None:
        if request.filters != Filters():
            raise BadRequest(
                f"You asked for {request.named}; Bitfusion chooses among its servers' GPUs itself.",
                "Leave the filters out.",
            )
        if not self.evidence():
            raise NeverFits(
                f"You asked for {request.named}; no node of this cluster offers {_GPU}.",
                "Ask the administrator, who can look with gpu-pool doctor --cluster.",
            )
        if request.memory_mib and request.memory_mib < self.options.context_mib:
            raise NeverFits(
                f"You asked for {request.named}; CUDA itself takes about {self.options.context_mib} MiB.",
                f"Ask for at least {self.options.context_mib}MiB.",
            )


def _amounts(container: PodContainer) -> dict[str, int]:
    """Return what a container has of all its GPUs together."""
    limits = container.limits
    count = min(MAX_GPUS, limits.get(_AMOUNT, 0))
    milli, memory = _GRAIN * min(100, limits.get(_PERCENT, 0)), mib(limits.get(_MEMORY, 0))
    return {"gpus": count, "milli": count * milli, "mib": count * memory}


def _nth(total: int, parts: int, number: int) -> int:
    """Return one of so many whole parts, which are the total together."""
    return total * (number + 1) // parts - total * number // parts
