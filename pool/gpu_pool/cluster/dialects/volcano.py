"""Volcano's vGPUs: HAMi's numbers under Volcano's names, with memory in units of a factor.

The rules, from Volcano 1.13 (https://github.com/volcano-sh/volcano,
``docs/user-guide/how_to_use_volcano_vgpu.md``, ``pkg/scheduler/api/devices/nvidia/vgpu``)
and https://github.com/Project-HAMi/volcano-vgpu-device-plugin:

- ``volcano.sh/vgpu-number``, ``volcano.sh/vgpu-memory`` in units of the
  plugin's ``--gpu-memory-factor`` MiB, ``volcano.sh/vgpu-cores`` in percent;
  a number and cores alone are whole GPUs;
- more than 32,767 units are not asked for: raise the factor. The plugin lists
  every unit as a device, and kubelet drops a list of more than about 60,000
  (``doc/design.md``).
"""

from __future__ import annotations

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
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.hami import HOOK_VARIABLES, held_by_hook, holdings, volcano_register
from gpu_pool.cluster.dialects.objects import Pod
from gpu_pool_client import WHOLE, NotAllowed, SliceRequest

_REGISTER: Final = "volcano.sh/node-vgpu-register"
_ALLOCATED: Final = "volcano.sh/vgpu-ids-new"
_MODE: Final = "volcano.sh/vgpu-mode"
_GRAIN: Final = 10
_MOST_UNITS: Final = 32_767


class Volcano(Dialect):
    """Volcano's scheduler with its vGPU device plugin."""

    table = DialectTable(
        name="volcano",
        title="Volcano vGPU",
        memory="cooperative",
        compute="cooperative from 10% on",
        smallest="1% of compute, and what CUDA itself takes",
        rounding="memory down to the plugin's memory factor, compute up to 1%",
        quota=("limits.volcano.sh/vgpu-memory", "limits.volcano.sh/vgpu-cores"),
        bans=PodBans(
            annotations=frozenset({_MODE, "nvidia.com/use-gputype", "volcano.sh/vgpu-use-gpuuuid"}),
            environment=HOOK_VARIABLES,
            resources=("nvidia.com/", "volcano.sh/"),
        ),
        source="Volcano 1.13, volcano-vgpu-device-plugin",
        rank=20,
    )

    def evidence(self) -> str:
        """Look for nodes whose GPUs the plugin has registered in an annotation."""
        found = [node for node in self.cluster.nodes if node.annotations.get(_REGISTER)]
        return f"{len(found)} nodes carry the annotation {_REGISTER}" if found else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the registered GPUs; unhealthy ones are drained."""
        factor = self.options.volcano_memory_factor
        return tuple(
            each.gpu(node, self.options, node.cordoned)
            for node in self.cluster.nodes
            for each in volcano_register(node.annotations.get(_REGISTER, ""), factor)
        )

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for units of memory and percent of compute, or for whole GPUs."""
        refuse_index(request, self.table.title)
        refuse_limit(request, self.table.title)
        gpus = [gpu for gpu in self.gpus() if gpu.mode in ("", "hami-core")]
        size = cut(request, gpus, self.options, self.table.title)
        cores = min(WHOLE, up_to(size.milli or request.milli or 0, _GRAIN))
        limits = {"volcano.sh/vgpu-number": str(request.count), "volcano.sh/vgpu-cores": str(cores // _GRAIN)}
        memory = size.memory_mib or 0
        if not request.whole_devices:
            units = self._units(memory)
            limits["volcano.sh/vgpu-memory"] = str(units)
            memory = units * self.options.volcano_memory_factor
        held = held_by_hook("HAMi-core, through Volcano", cores)
        truth = SliceStatement(
            count=request.count,
            milli=cores,
            memory_mib=memory,
            enforcement=WHOLE_GPU if request.whole_devices else held,
            rounded=(
                *rounded_share("compute", size.milli or cores, cores, "Volcano counts whole percents"),
                *rounded_memory(size.memory_mib or 0, memory, "the plugin's memory factor"),
            ),
            notes=size.notes,
        )
        return Translation(self.table.name, self._pod(size, limits), truth)

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read what Volcano's scheduler wrote down when it placed the pod."""
        return holdings(pod, pod.annotation(_ALLOCATED), self.options.volcano_memory_factor)

    def _units(self, memory: int) -> int:
        units = memory // self.options.volcano_memory_factor
        if units > _MOST_UNITS or not units:
            raise NotAllowed(
                f"{memory} MiB are {units} units of volcano.sh/vgpu-memory; it takes 1 to {_MOST_UNITS}.",
                "Ask the administrator for another --gpu-memory-factor of Volcano's device plugin.",
            )
        return units

    def _pod(self, size: Cut, limits: dict[str, str]) -> PodParts:
        others = {gpu.node for gpu in self.gpus()}
        queue = {"volcano.sh/queue-name": self.options.queue} if self.options.queue else {}
        return PodParts(
            annotations={_MODE: "hami-core", **queue},
            limits=limits,
            scheduler_name="volcano",
            runtime_class=runtime_class(self.cluster, self.options),
            node_affinity=pin(size.nodes, others, self.cluster, ()),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
