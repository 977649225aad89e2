"""Aliyun's gpushare: whole units of memory, and compute with cGPU.

The rules, from https://github.com/AliyunContainerService/gpushare-scheduler-extender
(last changed 2023, ``docs/userguide.md``, ``pkg/utils/const.go``):

- ``aliyun.com/gpu-mem`` in GiB, or in MiB with ``--memory-unit=MiB``, of one GPU;
- it is only counted; Alibaba Cloud's cGPU limits it, and there
  ``aliyun.com/gpu-core.percentage`` limits compute.
"""

from __future__ import annotations

from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    cut,
    pin,
    refuse_index,
    refuse_limit,
    rounded_memory,
    rounded_share,
    tolerations,
    up_to,
)
from gpu_pool.cluster.dialects.base import (
    Dialect,
    DialectOptions,
    DialectTable,
    Gpu,
    PodBans,
    PodHolding,
    PodParts,
    Rounding,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.objects import KINDS, Node, Pod, driver_version, model
from gpu_pool_client import WHOLE, Device, Enforcement, Limit, NeverFits, SliceRequest, Strength

_MEMORY: Final = "aliyun.com/gpu-mem"
_COUNT: Final = "aliyun.com/gpu-count"
_CORE: Final = "aliyun.com/gpu-core.percentage"
_INDEX: Final = "ALIYUN_COM_GPU_MEM_IDX"
_GRAIN: Final = 10
_COUNTED: Final = Enforcement(
    Limit(Strength.NONE, "gpushare only counts it"), Limit(Strength.NONE, "gpushare does not know it")
)
_CGPU: Final = Enforcement(
    Limit(Strength.COOPERATIVE, "Alibaba Cloud's cGPU"), Limit(Strength.COOPERATIVE, "Alibaba Cloud's cGPU")
)


class Aliyun(Dialect):
    """Aliyun's gpushare scheduler extender and device plugin."""

    table = DialectTable(
        name="aliyun",
        title="Aliyun gpushare",
        memory="none; cooperative with cGPU",
        compute="none; cooperative with cGPU",
        smallest="1 GiB; 1 MiB with --memory-unit=MiB, and what CUDA itself takes",
        rounding="memory up to 1 GiB (or 1 MiB), at most 1.5 times what was asked for",
        quota=("requests.aliyun.com/gpu-mem",),
        bans=PodBans(
            annotations=frozenset({_INDEX, "ALIYUN_COM_GPU_MEM_ASSIGNED"}),
            environment=frozenset({"NVIDIA_VISIBLE_DEVICES", "CGPU_DISABLE", _INDEX}),
            resources=("nvidia.com/", "aliyun.com/"),
        ),
        source="gpushare-scheduler-extender, 2023",
        rank=70,
    )

    def evidence(self) -> str:
        """Its plugin advertises memory of GPUs on nodes."""
        found = [node for node in self.cluster.nodes if node.amount(_MEMORY)]
        return f"{len(found)} nodes offer {_MEMORY}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return each node's GPUs, all of a node of one size."""
        return tuple(gpu for node in self.cluster.nodes for gpu in _on(node, self.options))

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for units of memory of one GPU."""
        title = self.table.title
        refuse_index(request, title)
        refuse_limit(request, title)
        if request.count > 1:
            raise NeverFits(
                f"You asked for {request.named}; {title} gives one container memory of one GPU.",
                "Ask for one GPU or a part.",
            )
        size = cut(request, self.gpus(), self.options, title)
        asked, unit = size.memory_mib or 0, self.options.aliyun_memory_unit
        granted = -(-asked // unit) * unit
        if granted * WHOLE > asked * self.options.most_milli:
            raise NeverFits(
                f"You asked for {request}, {asked} MiB; {title} gives memory in units of {unit} MiB here.",
                f"Ask for {granted}MiB, or ask the administrator for smaller units.",
            )
        rounded = rounded_memory(asked, granted, f"units of {unit} MiB")
        share = -(-granted * WHOLE // size.smallest_mib)
        limits, cores = {_MEMORY: str(granted // unit)}, max(size.milli or 0, min(WHOLE, share))
        if self.options.memory_limiter:
            cores = min(WHOLE, up_to(size.milli or 0, _GRAIN))
            limits[_CORE] = str(cores // _GRAIN)
        rounded += self._compute(size.milli or 0, cores)
        enforcement = _CGPU if self.options.memory_limiter else _COUNTED
        pod = PodParts(
            limits=limits,
            node_affinity=pin(size.nodes, {gpu.node for gpu in self.gpus()}, self.cluster, KINDS),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        return Translation(
            self.table.name, pod, SliceStatement(1, cores, granted, enforcement, rounded, size.notes)
        )

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read its limits, and the GPU's number where the scheduler wrote it down."""
        memory = pod.limit(_MEMORY) * self.options.aliyun_memory_unit
        gpus = _on(self.cluster.node(pod.node), self.options)
        if not memory or not gpus:
            return ()
        index = pod.annotation(_INDEX)
        uuid = gpus[int(index)].device.uuid if index.isdecimal() and int(index) < len(gpus) else ""
        return (PodHolding(-(-memory * WHOLE // gpus[0].device.memory_mib), memory, uuid),)

    def _compute(self, asked: int, granted: int) -> tuple[Rounding, ...]:
        why = "cGPU counts whole percents" if self.options.memory_limiter else "in proportion to memory"
        return rounded_share("compute", asked, granted, why)


def _on(node: Node, options: DialectOptions) -> tuple[Gpu, ...]:
    count = node.count(_COUNT) or min(1, node.amount(_MEMORY))
    shown = max(0, node.amount(_MEMORY)) * options.aliyun_memory_unit
    memory = options.usable_mib(shown // count, node) if count > 0 else 0
    return tuple(
        Gpu(
            node.name,
            Device(f"{node.name}/gpu/{index}", index, model(node), memory, driver=driver_version(node)),
            node.cordoned,
        )
        for index in range(count if memory else 0)
    )
