"""HAMi-core, the hook around CUDA by which HAMi, Volcano, Koordinator and KAI hold limits inside a container.

It is loaded into each process and refuses what is past a limit, so a process
that gets around it is free of it: cooperative. Its regulator of compute is
about five points off at any time and regulates nothing in small slices.
"""

from __future__ import annotations

from typing import Final

from gpu_pool_client import Enforcement, Limit, Strength

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
