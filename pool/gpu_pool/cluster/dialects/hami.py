"""HAMi: integer percent and MiB, held by a hook around CUDA inside the container.

The rules, from HAMi 2.10 (https://github.com/Project-HAMi/HAMi):

- limits ``nvidia.com/gpu`` (number), ``nvidia.com/gpumem`` (MiB on each) or
  ``nvidia.com/gpumem-percentage``, never both, and ``nvidia.com/gpucores``
  (percent of each). Memory and cores are always written: left out, they mean
  all of a GPU, and no cores mean no limit (``pkg/device/nvidia/device.go``);
- 100 cores on a GPU ask for it alone;
- the scheduler is named here, too. The webhook that would do it is
  ``failurePolicy: Ignore``: while it is down, a pod without the name would go
  to the default scheduler, and nothing would limit it (``pkg/scheduler/webhook.go``,
  ``charts/hami/templates/scheduler/webhook.yaml``);
- the same webhook denies privileged containers, pods with ``nodeName``, and
  pods over a ResourceQuota: there is no queue;
- the label ``hami.io/webhook: ignore`` and ``CUDA_DISABLE_CONTROL=true`` lift
  the limits, so a pod must not bring them along.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from gpu_pool.cluster.dialects.amounts import Cut, cut, rounded_share, runtime_class, tolerations, up_to
from gpu_pool.cluster.dialects.base import (
    WHOLE_GPU,
    Dialect,
    DialectOptions,
    DialectTable,
    Gpu,
    Hold,
    PodBans,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.hami_core import HOOK_VARIABLES, hami_register, held_by_hook, holdings
from gpu_pool.cluster.dialects.objects import Node, Pod
from gpu_pool_client import WHOLE, NeverFits, SliceRequest

REGISTER: Final = "hami.io/node-nvidia-register"
_CORDON: Final = "hami.io/device-cordon"
_ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_SCHEDULER: Final = "hami-scheduler"
_GRAIN: Final = 10


class Hami(Dialect):
    """HAMi's device plugin, scheduler and webhook."""

    table = DialectTable(
        name="hami",
        title="HAMi",
        memory="cooperative",
        compute="cooperative from 10% on",
        smallest="1% of compute, and what CUDA itself takes",
        rounding="memory to 1 MiB, compute up to 1%",
        quota=("limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"),
        at_once=4,  # it locks a node for each pod that it binds, and sixty at once take minutes (HAMi#915)
        bans=PodBans(
            labels=frozenset({"hami.io/webhook"}),
            annotations=frozenset({"nvidia.com/use-gpuuuid", "nvidia.com/use-gputype"}),
            environment=HOOK_VARIABLES,
        ),
        source="HAMi 2.10",
        rank=10,
        seen="without GPUs or its plugin: its scheduler of 2026-08, on Kubernetes 1.36.2",
    )

    def evidence(self) -> str:
        """HAMi's device plugin registers the GPUs of its nodes in an annotation."""
        nodes = [node for node in self.cluster.nodes if hami_register(node.annotations.get(REGISTER, ""))]
        return f"{len(nodes)} nodes carry the annotation {REGISTER}" if nodes else ""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the registered GPUs; unhealthy ones and those cordoned by HAMi are drained."""
        return self._registered

    @cached_property
    def _registered(self) -> tuple[Gpu, ...]:
        return tuple(gpu for node in self.cluster.nodes for gpu in _on(node, self.options))

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for MiB and percent of compute, or for whole GPUs alone."""
        every = self.gpus()
        shared = [gpu for gpu in every if gpu.mode in ("", "hami-core")]
        if every and not shared:
            raise NeverFits(
                f"You asked for {request.named}; all GPUs here are in HAMi's {every[0].mode} mode, "
                "which takes no shares.",
                "Ask the administrator for nodes in HAMi's own mode, hami-core.",
            )
        size = cut(request, shared, self.options, "HAMi")
        pod = PodParts(
            annotations=_choice(size, every, self.options),
            limits=_limits(request, size),
            scheduler_name=_SCHEDULER,
            runtime_class=runtime_class(self.cluster, self.options),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        return Translation("hami", pod, _statement(request, size))

    def holds(self, pod: Pod) -> tuple[Hold, ...]:
        """Read what HAMi's scheduler wrote down when it placed the pod."""
        return holdings(pod, pod.annotation(_ALLOCATED))


def _on(node: Node, options: DialectOptions) -> tuple[Gpu, ...]:
    stopped = {uuid.strip() for uuid in node.annotations.get(_CORDON, "").split(",")}
    return tuple(
        each.gpu(node, options, node.cordoned or each.uuid in stopped)
        for each in hami_register(node.annotations.get(REGISTER, ""))
    )


def _cores(request: SliceRequest, size: Cut) -> int:
    """Return thousandths of compute: a whole percent, at least one."""
    return min(WHOLE, up_to(size.milli or request.milli or 0, _GRAIN))


def _limits(request: SliceRequest, size: Cut) -> dict[str, str]:
    limits = {"nvidia.com/gpu": str(request.count)}
    if request.whole_devices:
        limits["nvidia.com/gpumem-percentage"] = "100"
    else:
        limits["nvidia.com/gpumem"] = str(size.memory_mib)
    return {**limits, "nvidia.com/gpucores": str(_cores(request, size) // _GRAIN)}


def _choice(size: Cut, every: Sequence[Gpu], options: DialectOptions) -> dict[str, str]:
    """Name the GPUs that will do where not all do: by model if that tells them apart, else one by one."""
    chosen = {"hami.io/gpu-scheduler-policy": options.policy} if options.policy else {}
    wanted = {gpu.device.uuid for gpu in size.gpus}
    others = [gpu.device.model.upper() for gpu in every if gpu.device.uuid not in wanted]
    if not others:
        return chosen
    models = sorted({gpu.device.model for gpu in size.gpus})
    if any(model.upper() in other for model in models for other in others):
        return {**chosen, "nvidia.com/use-gpuuuid": ",".join(sorted(wanted))}
    return {**chosen, "nvidia.com/use-gputype": ",".join(models)}


def _statement(request: SliceRequest, size: Cut) -> SliceStatement:
    cores = _cores(request, size)
    least = min((gpu.device.contexts or 0 for gpu in size.gpus), default=0)
    notes = ["Over a namespace's quota HAMi denies the pod at once; it does not queue."]
    if least and not request.whole_devices and least * cores < WHOLE:
        notes.append(
            f"HAMi lets at most {least} pods share a GPU here (deviceSplitCount), "
            f"fewer than the {WHOLE // cores} slices of this size that would fit."
        )
    return SliceStatement(
        count=request.count,
        milli=cores,
        memory_mib=size.memory_mib,
        enforcement=WHOLE_GPU if request.whole_devices else held_by_hook("HAMi's hook around CUDA", cores),
        rounded=rounded_share("compute", size.milli or cores, cores, "HAMi counts whole percents"),
        notes=(*size.notes, *notes),
    )
