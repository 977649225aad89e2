"""Koordinator: percent of compute and bytes of memory, summed over the GPUs asked for.

The rules, from Koordinator 1.8 (https://github.com/koordinator-sh/koordinator,
``apis/extension/device_share.go``, ``pkg/scheduler/plugins/deviceshare/utils.go``):

- ``koordinator.sh/gpu.shared`` is the number of GPUs; ``gpu-core`` (percent)
  and ``gpu-memory`` are sums over them and must divide by it;
- ``koordinator.sh/gpu: 100`` is one whole GPU, 200 are two;
- the pod's label ``koordinator.sh/gpu-isolation-provider: HAMi-core`` makes
  the limits hold, where HAMi-core is installed; else they are only counted.
"""

from __future__ import annotations

from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    cut,
    pin,
    refuse_index,
    refuse_limit,
    rounded_share,
    runtime_class,
    tolerations,
    up_to,
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
from gpu_pool.cluster.dialects.hami import HOOK_VARIABLES, held_by_hook, read_json
from gpu_pool.cluster.dialects.objects import MAX_GPUS, Node, Pod, listing, mapping, mib, quantity, whole
from gpu_pool_client import WHOLE, Device, Enforcement, Limit, SliceRequest, Strength

_PREFIX: Final = "koordinator.sh/"
_CORE: Final = "koordinator.sh/gpu-core"
_MEMORY: Final = "koordinator.sh/gpu-memory"
_ALLOCATED: Final = "scheduling.koordinator.sh/device-allocated"
_PROVIDER: Final = "koordinator.sh/gpu-isolation-provider"
_MODEL: Final = "node.koordinator.sh/gpu-model"
_DRIVER: Final = "node.koordinator.sh/gpu-driver-version"
_GRAIN: Final = 10
_COUNTED: Final = Enforcement(
    Limit(Strength.NONE, "Koordinator only counts it"), Limit(Strength.NONE, "Koordinator only counts it")
)


class Koordinator(Dialect):
    """Koordinator's scheduler and agents."""

    table = DialectTable(
        name="koordinator",
        title="Koordinator",
        memory="none; cooperative with HAMi-core",
        compute="none; cooperative from 10% on with HAMi-core",
        smallest="1% of compute, and what CUDA itself takes",
        rounding="memory to 1 MiB, compute up to 1%",
        quota=("requests.koordinator.sh/gpu-core", "requests.koordinator.sh/gpu-memory"),
        bans=PodBans(
            labels=frozenset({_PROVIDER}),
            annotations=frozenset({_ALLOCATED, "scheduling.koordinator.sh/device-allocate-hint"}),
            environment=HOOK_VARIABLES,
            resources=("nvidia.com/", _PREFIX),
        ),
        source="Koordinator 1.8",
        rank=30,
    )

    def evidence(self) -> str:
        """Its agents advertise compute of GPUs on nodes."""
        found = [node for node in self.cluster.nodes if node.amount(_CORE)]
        return f"{len(found)} nodes offer {_CORE}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return one GPU per 100 units of compute, all of a node of one size."""
        return tuple(gpu for node in self.cluster.nodes for gpu in _on(node, self.options))

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for bytes and percent of shared GPUs, or for whole ones."""
        refuse_index(request, self.table.title)
        refuse_limit(request, self.table.title)
        size = cut(request, self.gpus(), self.options, self.table.title)
        cores = min(WHOLE, up_to(size.milli or request.milli or 0, _GRAIN))
        hooked = self.options.memory_limiter and not request.whole_devices
        if request.whole_devices:
            limits, enforcement = {"koordinator.sh/gpu": str(100 * request.count)}, WHOLE_GPU
        else:
            enforcement = held_by_hook("HAMi-core, through Koordinator", cores) if hooked else _COUNTED
            limits = {
                "koordinator.sh/gpu.shared": str(request.count),
                _CORE: str(cores // _GRAIN * request.count),
                _MEMORY: f"{(size.memory_mib or 0) * request.count}Mi",
            }
        pod = PodParts(
            labels={_PROVIDER: "HAMi-core"} if hooked else {},
            limits=limits,
            scheduler_name="koord-scheduler",
            runtime_class=runtime_class(self.cluster, self.options),
            node_affinity=pin(size.nodes, {gpu.node for gpu in self.gpus()}, self.cluster, (_MODEL,)),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        rounded = rounded_share("compute", size.milli or cores, cores, "Koordinator counts whole percents")
        truth = SliceStatement(request.count, cores, size.memory_mib, enforcement, rounded, size.notes)
        return Translation(self.table.name, pod, truth)

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read what Koordinator's scheduler wrote down when it placed the pod."""
        found = mapping(read_json(pod.annotation(_ALLOCATED) or "{}"))
        return tuple(
            PodHolding(
                _GRAIN * quantity(resources.get(_CORE, 0)),
                mib(resources.get(_MEMORY, 0)),
                _uuid(pod.node, whole(each.get("minor", 0))),
            )
            for each in listing(found.get("gpu"))
            for resources in (mapping(each.get("resources")),)
        )


def _uuid(node: str, minor: int) -> str:
    return f"{node}/gpu/{minor}"


def _on(node: Node, options: DialectOptions) -> tuple[Gpu, ...]:
    count = min(MAX_GPUS, node.amount(_CORE) // 100)
    memory = options.usable_mib(max(0, node.amount(_MEMORY)) // 2**20 // count, node) if count > 0 else 0
    model, driver = node.label(_MODEL) or "NVIDIA GPU", node.label(_DRIVER)
    return tuple(
        Gpu(node.name, Device(_uuid(node.name, index), index, model, memory, driver=driver), node.cordoned)
        for index in range(count)
    )
