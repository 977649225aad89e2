"""KAI: an annotation with a fraction or with MiB, placed by KAI's own scheduler and queues.

The rules, from KAI-Scheduler 0.20 (https://github.com/kai-scheduler/KAI-Scheduler;
NvFractions: its ``docs/gpu-sharing`` of later in 2026, and the operator's annotations):

- ``gpu-fraction`` is above 0 and below 1, counted in hundredths, and 0.01 is
  taken for nothing; ``gpu-memory`` is MiB without a unit; both together, or
  either with ``nvidia.com/gpu``, are denied
  (``pkg/binder/plugins/gpusharing/gpu-request/gpu_request_validator.go``,
  ``pkg/scheduler/api/resource_info/gpu_resource_requirment.go``);
- a node's memory is rounded down to 100 MiB, and a memory request up to the
  next hundredth of that (``pkg/scheduler/api/node_info``);
- nothing is enforced, unless HAMi-core's ``kai-resource-isolator`` or
  NvFractions is installed (``docs/gpu-sharing/README.md``);
- NvFractions: ``nvidia.com/container.<name>.gpu-memory.request`` and
  ``….limit`` with a unit; only nodes whose condition
  ``gpu-sharing.nvidia.com/Ready`` is True. The request is placed, counted and
  guaranteed, the limit, which is not below it, is what the container may use while
  the memory is free (``docs/gpu-sharing/README.md``, ``…/nv-fraction/README.md``);
- no ResourceQuota, Kueue or autoscaler sees a fraction.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    Cut,
    cut,
    pin,
    refuse_index,
    refuse_limit,
    rounded_memory,
    rounded_share,
    runtime_class,
    tolerations,
    up_to,
)
from gpu_pool.cluster.dialects.base import (
    WHOLE_GPU,
    Dialect,
    DialectTable,
    Gpu,
    PodBans,
    PodHolding,
    PodParts,
    Rounding,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.device_plugin import GPU, UNSHARED, node_offers
from gpu_pool.cluster.dialects.hami import HOOK_VARIABLES
from gpu_pool.cluster.dialects.objects import KINDS, MAX_GPUS, Pod, memory_mib, mib, whole
from gpu_pool_client import (
    WHOLE,
    Enforcement,
    Limit,
    NeverFits,
    NotAllowed,
    SliceRequest,
    Strength,
    format_memory,
)

QUEUE_CRD: Final = "queues.scheduling.run.ai"
_READY: Final = "gpu-sharing.nvidia.com/Ready"
_RESERVATIONS: Final = "kai-resource-reservation"
_FRACTION: Final = "gpu-fraction"
_MEMORY: Final = "gpu-memory"
_DEVICES: Final = "gpu-fraction-num-devices"
_CONTAINER: Final = "nvidia.com/container."
_GRAIN: Final = 10
_LEAST: Final = 20
#: What ``container.`` and ``.gpu-memory.request`` leave of the 63 characters of an annotation's name.
_LONGEST_CONTAINER: Final = 34

_NO_LIMIT: Final = "takes a limit above the guarantee with NvFractions, for which no node is ready"
_TIME: Final = Limit(Strength.NONE, "time-slicing limits nothing")
_COUNTED: Final = Enforcement(Limit(Strength.NONE, "KAI only counts it"), _TIME)
_HAMI: Final = Enforcement(Limit(Strength.COOPERATIVE, "HAMi-core, through kai-resource-isolator"), _TIME)
_DRIVER: Final = Enforcement(Limit(Strength.COOPERATIVE, "NVIDIA's driver, through NvFractions"), _TIME)


class Kai(Dialect):
    """KAI-Scheduler over the GPUs of NVIDIA's device plugin."""

    table = DialectTable(
        name="kai",
        title="KAI",
        memory="none; cooperative with HAMi-core or NvFractions",
        compute="none",
        smallest="2% of a GPU; with NvFractions what CUDA itself takes",
        rounding="up to 1% of a GPU; with NvFractions memory to 1 MiB",
        quota=(),
        bans=PodBans(
            annotations=frozenset(
                {
                    _FRACTION,
                    _MEMORY,
                    _DEVICES,
                    "gpu-fraction-container-name",
                    "kai-resource-isolator.io/inject",
                }
            ),
            environment=HOOK_VARIABLES,
        ),
        source="KAI-Scheduler 0.20",
        rank=40,
    )

    builds_on = ("device-plugin",)

    def evidence(self) -> str:
        """KAI's queues are a resource of the cluster."""
        found = QUEUE_CRD in self.cluster.crds and self.gpus()
        return f"there is the resource definition {QUEUE_CRD}, and nodes offer {GPU}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the unshared GPUs, where NvFractions is used those of nodes that are ready for it."""
        nodes = [node for node in self.cluster.nodes if _READY in node.conditions or not self._fractions]
        return tuple(
            _shared(gpu)
            for node in nodes
            for each in node_offers(node, self.options)
            if each.mode in UNSHARED
            for gpu in each.gpus
        )

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, or by the annotation for a fraction, for MiB or for NvFractions."""
        refuse_index(request, self.table.title)
        if not self.options.queue:
            raise NotAllowed(
                "KAI places only pods that name one of its queues, and none is set.",
                "Ask the administrator to set the queue of this course or cluster.",
            )
        if not self._fractions:
            refuse_limit(request, "KAI", _NO_LIMIT)
        size = cut(request, self.gpus(), self.options, self.table.title)
        if request.whole_devices or (request.milli and up_to(request.milli, _GRAIN) >= WHOLE):
            return self._answer({}, {GPU: str(request.count)}, size, self._whole(request, size))
        if self._fractions:
            return self._answer(self._annotations(request, size), {}, size, self._exact(request, size))
        if request.memory_mib is not None:
            return self._memory(request, size)
        return self._share(request, size)

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read its annotations. The pods by which KAI reserves GPUs hold nothing themselves."""
        if pod.namespace == _RESERVATIONS:
            return ()
        node = self.cluster.node(pod.node)
        total = self.options.usable_mib(memory_mib(node), node)
        if pod.limit(GPU):
            return (PodHolding(WHOLE, total),) * pod.count(GPU)
        part = _part(pod, total)
        return (part,) * min(MAX_GPUS, max(1, whole(pod.annotation(_DEVICES)))) if part else ()

    @cached_property
    def _fractions(self) -> bool:
        """Whether nodes are ready for NvFractions."""
        return any(_READY in node.conditions for node in self.cluster.nodes)

    def _share(self, request: SliceRequest, size: Cut) -> Translation:
        asked = request.milli or 0
        granted = max(_LEAST, up_to(asked, _GRAIN))
        if granted * WHOLE > asked * self.options.most_milli:
            raise NeverFits(
                f"You asked for {request.named}; KAI counts whole percents and treats 1% and less as "
                "nothing.",
                "Ask for 2% or more, or for an amount of memory.",
            )
        memory = size.smallest_mib // 100 * 100 * granted // WHOLE if size.smallest_mib else None
        rounded = rounded_share("compute and memory", asked, granted, "KAI counts whole percents, from 2% on")
        if granted == asked and memory is not None:
            rounded = rounded_memory(
                size.memory_mib or 0, memory, "KAI rounds a GPU's memory down to 100 MiB"
            )
        annotations = {_FRACTION: f"{granted // _GRAIN / 100:.2f}", **_several(request)}
        return self._answer(annotations, {}, size, self._truth(request, size, granted, memory, rounded))

    def _memory(self, request: SliceRequest, size: Cut) -> Translation:
        asked, total = request.memory_mib or 0, size.smallest_mib // 100 * 100
        percent = min(100, -(-asked * 100 // total)) if total else 0
        granted = total * percent // 100 if total else asked
        rounded = rounded_memory(asked, granted, "KAI rounds it up to 1% of the GPU")
        annotations = {_MEMORY: str(asked), **_several(request)}
        truth = self._truth(request, size, percent * _GRAIN or None, granted, rounded)
        return self._answer(annotations, {}, size, truth)

    def _exact(self, request: SliceRequest, size: Cut) -> SliceStatement:
        limit, notes = _limit_mib(request, size), _notes(size)
        if limit > (size.memory_mib or 0):
            amount = format_memory(limit)
            notes = (*notes, f"Up to {amount} on each GPU while that is free; NvFractions takes it back.")
        return SliceStatement(request.count, size.milli, size.memory_mib, _DRIVER, notes=notes)

    def _whole(self, request: SliceRequest, size: Cut) -> SliceStatement:
        asked = request.milli or WHOLE
        rounded = rounded_share("compute and memory", asked, WHOLE, "KAI's largest fraction is 99%")
        return SliceStatement(request.count, WHOLE, size.smallest_mib or None, WHOLE_GPU, rounded)

    def _annotations(self, request: SliceRequest, size: Cut) -> dict[str, str]:
        name = self.options.container
        if len(name) > _LONGEST_CONTAINER:
            raise NotAllowed(
                f"The container's name {name[:40]!a} has more than {_LONGEST_CONTAINER} characters, "
                "and NvFractions puts it into an annotation's name.",
                "Ask the administrator to shorten it.",
            )
        if size.memory_mib is None:
            raise NotAllowed(
                "The nodes do not show how much memory their GPUs have, which NvFractions is asked for.",
                "Ask the administrator for NVIDIA's GPU feature discovery, or ask for an amount of memory.",
            )
        key = f"{_CONTAINER}{name}.gpu-memory"
        amounts = {"request": size.memory_mib, "limit": _limit_mib(request, size)}
        return {**{f"{key}.{name}": f"{mib}Mi" for name, mib in amounts.items()}, **_several(request)}

    def _truth(
        self,
        request: SliceRequest,
        size: Cut,
        milli: int | None,
        memory: int | None,
        rounded: tuple[Rounding, ...],
    ) -> SliceStatement:
        enforcement = _HAMI if self.options.memory_limiter else _COUNTED
        return SliceStatement(request.count, milli, memory, enforcement, rounded, _notes(size))

    def _answer(
        self, annotations: dict[str, str], limits: dict[str, str], size: Cut, truth: SliceStatement
    ) -> Translation:
        others = {node.name for node in self.cluster.nodes if node.amount(GPU)}
        pod = PodParts(
            labels={"kai.scheduler/queue": self.options.queue or ""},
            annotations=annotations,
            limits=limits,
            scheduler_name="kai-scheduler",
            runtime_class=runtime_class(self.cluster, self.options),
            node_affinity=pin(size.nodes, others, self.cluster, KINDS),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        return Translation(self.table.name, pod, truth)


def _shared(gpu: Gpu) -> Gpu:
    # The plugin gives each to one pod. KAI shares it by amount alone, among any number of pods.
    return replace(gpu, device=replace(gpu.device, contexts=None))


def _several(request: SliceRequest) -> dict[str, str]:
    return {_DEVICES: str(request.count)} if request.count > 1 else {}


def _limit_mib(request: SliceRequest, size: Cut) -> int:
    """Return the most MiB that a slice may use of each GPU: what it is granted, where it has no limit."""
    limit = request.limit_mib or size.smallest_mib * (request.limit_milli or 0) // WHOLE
    return max(size.memory_mib or 0, min(limit, size.smallest_mib or limit))


def _notes(size: Cut) -> tuple[str, ...]:
    unseen = "Neither ResourceQuota nor Kueue nor an autoscaler counts fractions of KAI; its queues do."
    return (*size.notes, unseen)


def _part(pod: Pod, total: int) -> PodHolding | None:
    """Return what the annotations ask for on each GPU, None if they ask for nothing."""
    for key, value in pod.annotations.items():
        if key.startswith(_CONTAINER) and key.endswith(".gpu-memory.request"):
            return _of_memory(mib(value), total)
    if pod.annotation(_MEMORY):
        return _of_memory(whole(pod.annotation(_MEMORY)), total)
    try:
        milli = round(float(pod.annotation(_FRACTION)) * 100) * _GRAIN
    except (ValueError, OverflowError):
        return None
    return PodHolding(milli, total * milli // WHOLE) if 0 < milli <= WHOLE else None


def _of_memory(memory: int, total: int) -> PodHolding:
    return PodHolding(min(WHOLE, -(-memory * WHOLE // total)) if total else 0, memory)
