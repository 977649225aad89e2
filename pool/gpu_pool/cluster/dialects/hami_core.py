"""HAMi-core, the hook around CUDA by which HAMi, Volcano, Koordinator and KAI hold limits inside a container.

It is loaded into each process and refuses what is past a limit, so a process
that gets around it is free of it: cooperative. Its regulator of compute is
about five points off at any time and regulates nothing in small slices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.dialects.base import DialectOptions, Gpu, Hold
from gpu_pool.cluster.dialects.labels import driver_version
from gpu_pool.cluster.dialects.objects import Container, Node, Pod, held_together, listing, whole
from gpu_pool_client import Device, Enforcement, Limit, Strength

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


def holdings(pod: Pod, text: str, factor: int = 1) -> tuple[Hold, ...]:
    """Read what a pod holds; 0 cores mean that its compute is not limited and not counted.

    It is written container by container, newer releases begin with those that are started first.
    """
    parts = text.removesuffix(";").split(";")
    amounts = [_amounts(part, factor) for part in parts]
    known = pod.containers if len(parts) == len(pod.containers) else tuple(Container() for _ in parts)
    held = held_together(known, amounts)
    return tuple(hold for uuid in dict.fromkeys(uuid for uuid, _ in held) for hold in _on_gpu(uuid, held))


def _on_gpu(uuid: str, held: Mapping[tuple[str, str], int]) -> Iterator[Hold]:
    """Yield one entry for each container that shares a GPU, since each counts as one that does."""
    for number in range(held.get((uuid, "parts"), 0)):
        milli, memory = (held.get((uuid, what), 0) if not number else 0 for what in ("milli", "mib"))
        yield Hold(milli, memory, uuid)


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
