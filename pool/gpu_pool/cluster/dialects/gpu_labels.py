"""The labels that NVIDIA's GPU feature discovery puts on nodes.

From https://github.com/NVIDIA/k8s-device-plugin, release 0.20,
``docs/gpu-feature-discovery/README.md`` and ``internal/lm/resource.go``.
"""

from __future__ import annotations

from typing import Final

from gpu_pool.cluster.dialects.objects import Node, whole

PRODUCT: Final = "nvidia.com/gpu.product"
MEMORY: Final = "nvidia.com/gpu.memory"
#: Labels that tell GPU nodes apart, best first.
KINDS: Final = (PRODUCT, MEMORY)

_MAX_MIB: Final = 2**20 * 16


def driver_version(node: Node) -> str:
    """Return the driver's version, empty where no label says it."""
    full = node.label("nvidia.com/cuda.driver-version.full")
    if full:
        return full
    parts = [node.label(f"nvidia.com/cuda.driver.{part}") for part in ("major", "minor", "rev")]
    return ".".join(part for part in parts if part)


def memory_mib(node: Node, resource: str = "nvidia.com/gpu") -> int:
    """Return the memory of each GPU in MiB, 0 where no label says it.

    Some releases wrote bytes, which no GPU has so many MiB of (gpu-feature-discovery#26).
    """
    value = whole(node.label(f"{resource}.memory"))
    return value if value < _MAX_MIB else value // 2**20


def model(node: Node, resource: str = "nvidia.com/gpu") -> str:
    """Return the GPUs' model without what sharing adds to it, ``NVIDIA GPU`` where no label says it."""
    return node.label(f"{resource}.product").removesuffix("-SHARED").split("-MIG-")[0] or "NVIDIA GPU"


def compute_capability(node: Node) -> tuple[int, int]:
    """Return the GPUs' compute capability, (0, 0) where no label says it."""
    major, minor = (whole(node.label(f"nvidia.com/gpu.compute.{part}")) for part in ("major", "minor"))
    return major, minor
