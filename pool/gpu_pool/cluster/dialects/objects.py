"""What a cluster shows: nodes, labels, pods and names, read from objects as the Kubernetes API returns them.

Readers never raise on what a node or pod says of itself: what is missing or unreadable counts as absent,
since a device plugin of another version must not take the whole cluster's list down.

Labels of GPUs are those of NVIDIA's GPU feature discovery (https://github.com/NVIDIA/k8s-device-plugin,
release 0.20, ``docs/gpu-feature-discovery/README.md`` and ``internal/lm/resource.go``). A label value has at
most 63 characters, letters, digits, ``-``, ``_`` and ``.``, and begins and ends with a letter or digit
(https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar

#: A Kubernetes object as the API returns it in JSON.
Manifest = Mapping[str, Any]


_SUFFIXES: Final = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"([+-]?[0-9.]{1,32}(?:[eE][+-]?[0-9]{1,2})?)([kMGTPE]i?|Ki|m|)", re.ASCII)
_FINISHED: Final = ("Succeeded", "Failed")


#: Most GPUs, replicas or instances that a node or pod is believed to have.
MAX_GPUS: Final = 1024


def quantity(value: object) -> int:
    """Return a quantity such as ``32Gi`` or ``8000M`` in whole units, rounded down; 0 if unreadable."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return 0
    try:
        number = Decimal(match[1])
    except InvalidOperation:
        return 0
    return int(number / 1000 if match[2] == "m" else number * _SUFFIXES[match[2]])


def mib(value: object) -> int:
    """Return a quantity of bytes in whole MiB."""
    return quantity(value) // 2**20


def whole(value: object) -> int:
    """Return the whole number that a label says, 0 if it says none."""
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text, re.ASCII) else 0


def mapping(value: object) -> Mapping[str, Any]:
    """Return the mapping, or an empty one in place of anything else."""
    # What JSON is read as is told apart much faster, and is asked for hundreds of times for each kernel.
    return value if type(value) is dict or isinstance(value, Mapping) else {}


def texts(value: object) -> Mapping[str, str]:
    """Return the texts of a mapping by name, or nothing in place of anything else."""
    return {str(key): text for key, text in mapping(value).items() if isinstance(text, str)}


def listing(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return the mappings of a list, or nothing in place of anything else."""
    found = value if isinstance(value, list | tuple) else ()
    return tuple(each for each in found if isinstance(each, Mapping))


@dataclass(frozen=True, slots=True)
class Node:
    """What is read of a node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    #: Extended and other resources that pods may hold, in whole units.
    allocatable: Mapping[str, int] = field(default_factory=dict)
    taints: tuple[Manifest, ...] = ()
    #: Types of its conditions that are True.
    conditions: frozenset[str] = frozenset()
    #: Whether no further pod is to be placed on it.
    cordoned: bool = False

    @classmethod
    def read(cls, manifest: Manifest) -> Node:
        """Read a Node object."""
        metadata, spec, status = (mapping(manifest.get(key)) for key in ("metadata", "spec", "status"))
        return cls(
            name=str(metadata.get("name", "")),
            labels=texts(metadata.get("labels")),
            annotations=texts(metadata.get("annotations")),
            allocatable={k: quantity(v) for k, v in mapping(status.get("allocatable")).items()},
            taints=listing(spec.get("taints")),
            conditions=_true(listing(status.get("conditions"))),
            cordoned=bool(spec.get("unschedulable")),
        )

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return "Ready" in self.conditions

    @property
    def is_open(self) -> bool:
        """Whether further pods may be placed on it, as far as its taints are tolerated."""
        return self.is_ready and not self.cordoned

    def label(self, key: str) -> str:
        """Return a label's value, empty where there is none."""
        return str(self.labels.get(key, ""))

    def amount(self, resource: str) -> int:
        """Return how much of a resource it offers in all."""
        return self.allocatable.get(resource, 0)

    def count(self, resource: str) -> int:
        """Return how many of a countable resource it offers, as far as that can be believed."""
        return min(MAX_GPUS, max(0, self.amount(resource)))

    def resources(self, prefix: str) -> tuple[str, ...]:
        """Return the names, in order, of what it offers that begin so."""
        return tuple(sorted(k for k, v in self.allocatable.items() if k.startswith(prefix) and v > 0))


def _true(conditions: Iterable[Manifest]) -> frozenset[str]:
    return frozenset(str(each.get("type")) for each in conditions if each.get("status") == "True")


@dataclass(frozen=True, slots=True)
class PodContainer:
    """What is read of one of a pod's containers."""

    #: What it may hold, in whole units.
    limits: Mapping[str, int] = field(default_factory=dict)
    #: Whether it has to end before those after it start.
    is_init: bool = False
    #: Whether it is started among those and then runs for as long as the pod (``restartPolicy: Always``).
    is_sidecar: bool = False


_Key = TypeVar("_Key")


def held_together(
    containers: Iterable[PodContainer], amounts: Iterable[Mapping[_Key, int]]
) -> dict[_Key, int]:
    """Return what a pod holds whose containers, in the order in which they are started, hold this.

    That is Kubernetes' own arithmetic: all that run together when the pod runs, or one of those that end
    before, with the sidecars that were started before it, if that is more.
    """
    running: Counter[_Key] = Counter()
    most: Counter[_Key] = Counter()
    for container, found in zip(containers, amounts, strict=False):
        if container.is_init and not container.is_sidecar:
            most |= running + Counter(found)
        else:
            running += Counter(found)
    return dict(most | running)


@dataclass(frozen=True, slots=True)
class Pod:
    """What is read of a pod."""

    namespace: str
    name: str
    #: The node that it runs on or is bound to; empty while it waits.
    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    #: What all its containers hold together at most, in whole units.
    limits: Mapping[str, int] = field(default_factory=dict)
    #: These, in the order in which they are started.
    containers: tuple[PodContainer, ...] = ()
    #: When its deadline ends it; None where nothing says.
    ends: datetime | None = None

    @classmethod
    def read(cls, manifest: Manifest) -> Pod | None:
        """Read a Pod object; None if it has finished and so holds nothing."""
        metadata, spec, status = (mapping(manifest.get(key)) for key in ("metadata", "spec", "status"))
        if status.get("phase") in _FINISHED:
            return None
        containers = _containers(spec)
        return cls(
            namespace=str(metadata.get("namespace", "default")),
            name=str(metadata.get("name", "")),
            node=str(spec.get("nodeName") or ""),
            labels=texts(metadata.get("labels")),
            annotations=texts(metadata.get("annotations")),
            limits=_of_pod(spec, containers),
            containers=containers,
            ends=_end(spec.get("activeDeadlineSeconds"), status.get("startTime")),
        )

    def annotation(self, key: str) -> str:
        """Return an annotation's value, empty where there is none."""
        return str(self.annotations.get(key, ""))

    def limit(self, resource: str) -> int:
        """Return how much of a resource its containers hold together."""
        return self.limits.get(resource, 0)

    def count(self, resource: str) -> int:
        """Return how many of a countable resource they hold, as far as that can be believed."""
        return min(MAX_GPUS, max(0, self.limit(resource)))


def _containers(spec: Manifest) -> tuple[PodContainer, ...]:
    init = (
        PodContainer(_limits(each), is_init=True, is_sidecar=each.get("restartPolicy") == "Always")
        for each in listing(spec.get("initContainers"))
    )
    return (*init, *(PodContainer(_limits(each)) for each in listing(spec.get("containers"))))


def _limits(owner: Manifest) -> dict[str, int]:
    """Return the limits of a container, or of a whole pod; nobody holds less than nothing."""
    resources = mapping(owner.get("resources"))
    said = {**_extended(mapping(resources.get("requests"))), **mapping(resources.get("limits"))}
    return {str(name): max(0, quantity(value)) for name, value in said.items()}


def _extended(requests: Manifest) -> Manifest:
    """Return the requests for resources of which the limit is the same."""
    return {name: value for name, value in requests.items() if "/" in str(name)}


def _of_pod(spec: Manifest, containers: Sequence[PodContainer]) -> dict[str, int]:
    """Return what a pod holds: what it says of itself as a whole or its containers do, and its overhead."""
    total = held_together(containers, [each.limits for each in containers]) | _limits(spec)
    for name, value in mapping(spec.get("overhead")).items():
        total[str(name)] = total.get(str(name), 0) + max(0, quantity(value))
    return total


def _end(seconds: object, started: object) -> datetime | None:
    """Return when a deadline of so many seconds ends what started then."""
    if isinstance(seconds, int) and isinstance(started, str):
        with suppress(ValueError, OverflowError):
            return datetime.fromisoformat(started.replace("Z", "+00:00")) + timedelta(seconds=seconds)
    return None


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a cluster shows of its GPUs and of how they are shared."""

    nodes: tuple[Node, ...] = ()
    #: Names of custom resource definitions: ``queues.scheduling.run.ai``.
    crds: frozenset[str] = frozenset()
    runtime_classes: frozenset[str] = frozenset()
    device_classes: frozenset[str] = frozenset()
    #: ResourceSlices and ResourceClaims as the API returns them.
    resource_slices: tuple[Manifest, ...] = ()
    resource_claims: tuple[Manifest, ...] = ()
    #: DeviceTaintRules, which taint devices of ResourceSlices.
    device_taint_rules: tuple[Manifest, ...] = ()
    _by_name: Mapping[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})

    @classmethod
    def read(
        cls,
        nodes: Iterable[Manifest] = (),
        *,
        crds: Iterable[Manifest] = (),
        runtime_classes: Iterable[Manifest] = (),
        device_classes: Iterable[Manifest] = (),
        resource_slices: Iterable[Manifest] = (),
        resource_claims: Iterable[Manifest] = (),
        device_taint_rules: Iterable[Manifest] = (),
    ) -> Cluster:
        """Read the objects that the API lists, nodes in the order of their names."""
        return cls(
            nodes=tuple(sorted(map(Node.read, nodes), key=lambda node: node.name)),
            crds=_names(crds),
            runtime_classes=_names(runtime_classes),
            device_classes=_names(device_classes),
            resource_slices=tuple(resource_slices),
            resource_claims=tuple(resource_claims),
            device_taint_rules=tuple(device_taint_rules),
        )

    def node(self, name: str) -> Node:
        """Return the node of that name, one that shows nothing if there is none."""
        return self._by_name.get(name) or Node(name)


def _names(manifests: Iterable[Manifest]) -> frozenset[str]:
    return frozenset(str(mapping(each.get("metadata")).get("name", "")) for each in manifests)


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
#: Which pool has made an object.
POOL_LABEL: Final = f"{PREFIX}/pool"

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
