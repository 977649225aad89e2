"""HAMi: integer percent and MiB, held by HAMi-core, a hook around CUDA inside the container.

The hook, by which Volcano, Koordinator and KAI hold limits, too, is loaded into each process and refuses what
is past a limit, so a process that gets around it is free of it: cooperative. Its regulator of compute is
about five points off at any time and regulates nothing in small slices.

The rules, from HAMi 2.10 (https://github.com/Project-HAMi/HAMi):

- limits ``nvidia.com/gpu`` (number), ``nvidia.com/gpumem`` (MiB on each) or
  ``nvidia.com/gpumem-percentage``, never both, and ``nvidia.com/gpucores``
  (percent of each). Memory and cores are always written: left out, they mean
  all of a GPU, and no cores mean no limit (``pkg/device/nvidia/device.go``);
- of each resource one amount counts: the container's ``requests`` are read only where
  ``limits`` does not name it (there, too), so there is no guarantee with a limit above it;
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

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gpu_pool.cluster.dialects.amounts import (
    Cut,
    cut,
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
from gpu_pool.cluster.dialects.objects import (
    Node,
    Pod,
    PodContainer,
    driver_version,
    held_together,
    listing,
    whole,
)
from gpu_pool_client import WHOLE, Device, Enforcement, Limit, NeverFits, SliceRequest, Strength

#: Variables by which the hook is told its limits, or to stand aside.
HOOK_VARIABLES: Final = frozenset(
    {
        "CUDA_DISABLE_CONTROL", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT", "CUDA_OVERSUBSCRIBE",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE", "CUDA_TASK_PRIORITY", "GPU_CORE_UTILIZATION_POLICY",
        "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES",
    }
)  # fmt: skip
#: Thousandths of compute below which the regulator regulates nothing.
_LEAST_MILLI: Final = 100


def held_by_hook(words: str, milli: int) -> Enforcement:
    """Return what the hook, named in words, holds of a slice with so many thousandths of compute."""
    compute = Limit(Strength.COOPERATIVE, f"{words}, loosely")
    if milli < _LEAST_MILLI:
        compute = Limit(Strength.NONE, f"{words}, which regulates nothing below 10%")
    return Enforcement(Limit(Strength.COOPERATIVE, words), compute)


@dataclass(frozen=True, slots=True)
class RegisteredGpu:
    """One GPU as its device plugin registered it."""

    uuid: str
    index: int
    #: How many pods may share it.
    count: int
    memory_mib: int
    model: str
    mode: str = ""
    healthy: bool = True

    def gpu(self, node: Node, options: DialectOptions, drained: bool) -> Gpu:
        """Return it as a dialect's GPU."""
        contexts, memory = self.count or None, options.usable_mib(self.memory_mib, node)
        device = Device(self.uuid, self.index, self.model, memory, contexts, driver=driver_version(node))
        return Gpu(node.name, device, drained or not self.healthy, self.mode)


def read_json(text: str) -> Any:
    """Return what the JSON says, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def hami_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Read ``hami.io/node-nvidia-register``."""
    found = read_json(text)
    if found is not None:
        return tuple(_from_json(index, each) for index, each in enumerate(listing(found)) if each.get("id"))
    return tuple(
        RegisteredGpu(
            uuid=items[0],
            index=whole(items[7]) if len(items) > 8 else index,
            count=whole(items[1]),
            memory_mib=whole(items[2]),
            model=items[4],
            mode=items[8] if len(items) > 8 else "",
            healthy=items[6] == "true",
        )
        for index, items in enumerate(_fields(text, 7))
    )


def volcano_register(text: str, factor: int) -> tuple[RegisteredGpu, ...]:
    """Read ``volcano.sh/node-vgpu-register``, whose memory is in units of ``factor`` MiB."""
    return tuple(
        RegisteredGpu(
            items[0], index, whole(items[1]), whole(items[2]) * factor, items[3], items[5], items[4] == "true"
        )
        for index, items in enumerate(_fields(text, 6))
    )


def holdings(pod: Pod, text: str, factor: int = 1) -> tuple[PodHolding, ...]:
    """Read what a pod holds; 0 cores mean that its compute is not limited and not counted.

    It is written container by container, newer releases begin with those that are started first.
    """
    parts = text.removesuffix(";").split(";")
    amounts = [_amounts(part, factor) for part in parts]
    known = pod.containers if len(parts) == len(pod.containers) else tuple(PodContainer() for _ in parts)
    held = held_together(known, amounts)
    return tuple(hold for uuid in dict.fromkeys(uuid for uuid, _ in held) for hold in _on_gpu(uuid, held))


def _on_gpu(uuid: str, held: Mapping[tuple[str, str], int]) -> Iterator[PodHolding]:
    """Yield one entry for each container that shares a GPU, since each counts as one that does."""
    for number in range(held.get((uuid, "parts"), 0)):
        milli, memory = (held.get((uuid, what), 0) if not number else 0 for what in ("milli", "mib"))
        yield PodHolding(milli, memory, uuid)


def _amounts(container: str, factor: int) -> dict[tuple[str, str], int]:
    """Return the thousandths and MiB that a container has of each GPU."""
    found: Counter[tuple[str, str]] = Counter()
    for items in _fields(container, 4):
        found[items[0], "milli"] += 10 * whole(items[3])
        found[items[0], "mib"] += factor * whole(items[2])
        found[items[0], "parts"] += 1
    return dict(found)


def _from_json(index: int, found: Mapping[str, Any]) -> RegisteredGpu:
    return RegisteredGpu(
        uuid=str(found["id"]),
        index=whole(found.get("index", index)),
        count=whole(found.get("count", 0)),
        memory_mib=whole(found.get("devmem", 0)),
        model=str(found.get("type", "")),
        mode=str(found.get("mode", "")),
        # Left out when false, as Go's omitempty does.
        healthy=found.get("health") is True,
    )


def _fields(text: str, least: int) -> Iterator[list[str]]:
    """Yield the fields of each GPU that has at least so many."""
    for part in text.split(":"):
        items = part.split(",")
        if len(items) >= least and items[0]:
            yield items


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
        refuse_limit(request, "HAMi")
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

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
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
