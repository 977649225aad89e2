"""Labels of NVIDIA's GPU feature discovery on nodes, and label values that hostile input cannot break.

The former are from https://github.com/NVIDIA/k8s-device-plugin, release 0.20,
``docs/gpu-feature-discovery/README.md`` and ``internal/lm/resource.go``.

A label value has at most 63 characters, letters, digits, ``-``, ``_`` and
``.``, and begins and ends with a letter or digit
(https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

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


#: Longest label value.
MAX_LABEL: Final = 63
#: Prefix of the labels that this project sets.
PREFIX: Final = "jupyter-gpu-pool"

_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_MADE: Final = re.compile(r".*---[0-9a-f]{16}", re.ASCII)
_BAD: Final = re.compile(r"[^A-Za-z0-9_.]+", re.ASCII)
_HASH_LENGTH: Final = 16


def label_value(text: str) -> str:
    """Return a valid label value for any text, a user's or course's name for instance.

    A text that is a valid value stays as it is, unless it looks like one that
    was made here. Every other text becomes what is readable of it, ``---`` and
    the first 64 bits of its SHA-256: two texts share a value only if those bits
    are equal, so nobody takes another's name by spelling theirs alike.
    """
    if _LABEL.fullmatch(text) and not _MADE.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    readable = _BAD.sub("-", text[:MAX_LABEL])[: MAX_LABEL - _HASH_LENGTH - 3].strip("-_.")
    return f"{readable or 'x'}---{digest}"


def identity_labels(user: str, course: str | None = None) -> dict[str, str]:
    """Return the labels by which a pod is found again: whose it is, and that this project made it."""
    labels = {"app.kubernetes.io/managed-by": PREFIX, f"{PREFIX}/user": label_value(user)}
    return {**labels, f"{PREFIX}/course": label_value(course)} if course is not None else labels


def content_name(content: Mapping[str, Any]) -> str:
    """Return an object's name made from what is in it, so that the same content is one object."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "gpu-pool-" + hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
