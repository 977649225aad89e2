"""What a dialect takes and gives, and how a slice is put into a pod. None of it talks to a cluster.

What a user may choose of a pod (an image, an environment, labels through spawn options) reaches the cluster
beside what a dialect adds. Nothing of it may stand in the way: such a pod is refused, never quietly mended.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from gpu_pool.cluster.dialects.objects import Cluster, Manifest, Node, Pod, listing, mapping, whole
from gpu_pool_client import (
    WHOLE,
    BadRequest,
    Device,
    Enforcement,
    Limit,
    NotAllowed,
    SliceRequest,
    Strength,
    format_memory,
    format_share,
)
from gpu_pool_client._devices import CONTEXT_MIB
from gpu_pool_client._requests import MAX_MIB

#: What holds one who has a whole GPU.
WHOLE_GPU: Final = Enforcement(Limit(Strength.HARD, "a whole GPU"), Limit(Strength.HARD, "a whole GPU"))

#: What is said, wherever its promises are, of a dialect that was read of and not used.
NOT_SEEN: Final = "not seen on a cluster"


#: A node's label by which an administrator says how many MiB the driver keeps of each of its GPUs.
RESERVED_LABEL: Final = "jupyter-gpu-pool/reserved-mib"
#: Labels of nodes: none, or some with commas between them.
_SELECTOR: Final = re.compile(r"(?:[\w./-]{1,316}(?:=[\w.-]{0,63})?(?:\s*,\s*|$)){0,16}", re.ASCII)
#: What drivers keep of a GPU at most, as far as that was seen: so many MiB, and of small ones such a part.
_USUALLY_RESERVED_MIB: Final = 640
_MOST_RESERVED_MILLI: Final = 40


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """What the nodes of a cluster do not show, and its administrator says."""

    #: Name of the container that gets the slice.
    container: str = "notebook"
    #: KAI's or Volcano's queue.
    queue: str | None = None
    #: The pod's RuntimeClass; None: ``nvidia`` where the cluster has it.
    runtime_class: str | None = None
    #: Whether HAMi-core limits memory under KAI or Koordinator, or cGPU under Aliyun.
    memory_limiter: bool = False
    #: MiB per unit of ``volcano.sh/vgpu-memory``, as the plugin's ``--gpu-memory-factor`` says.
    volcano_memory_factor: int = 1
    #: MiB per unit of ``aliyun.com/gpu-mem``: 1024, or 1 with ``--memory-unit=MiB``.
    aliyun_memory_unit: int = 1024
    #: Bitfusion's client in the image: its operating system and version.
    bitfusion_client: tuple[str, str] = ("ubuntu20", "450")
    #: HAMi's choice among GPUs: ``binpack``, ``spread``, or None for the cluster's own.
    policy: str | None = None
    #: What CUDA takes in a process before the first tensor, in MiB; smaller slices are refused.
    context_mib: int = CONTEXT_MIB
    #: MiB of each GPU that the driver keeps for itself, which no node shows; None for what is usual. Where
    #: nodes have the label :data:`RESERVED_LABEL`, that counts.
    reserved_mib: int | None = None
    #: How much larger than asked a slice of a fixed size may be, in thousandths: 1500 is half as much again.
    most_milli: int = 1500
    #: Of which nodes the dialect ``shared`` claims devices, by their labels: ``key=value`` or ``key``, with
    #: commas between them; empty for all.
    shared_nodes: str = ""
    #: How many of these devices it may claim at most, in the order of nodes and devices; None for all.
    shared_most: int | None = None
    #: The pool's name, and the namespace of its kernels: the service sets both.
    pool: str = ""
    namespace: str = ""

    def usable_mib(self, shown: int, node: Node) -> int:
        """Return what programs can have of a GPU of which its node shows so many MiB; 0 stays unknown.

        An H100 with 81,559 MiB leaves them 81,079, and a T4 with 15,360 about 14,910
        (KAI-Scheduler#2212). MIG instances are shown as what is left of them.
        """
        reserved = self.reserved_mib
        if node.label(RESERVED_LABEL).isdecimal():
            reserved = whole(node.label(RESERVED_LABEL))
        if reserved is None:
            reserved = min(_USUALLY_RESERVED_MIB, shown * _MOST_RESERVED_MILLI // WHOLE)
        return max(0, shown - reserved)

    def __post_init__(self) -> None:
        if isinstance(self.bitfusion_client, list):
            # YAML and JSON know no tuples, and looks at a cluster are kept by the options they are made with.
            object.__setattr__(self, "bitfusion_client", tuple(self.bitfusion_client))
        for name, (fits, accepted) in _ACCEPTED.items():
            if not fits(given := getattr(self, name)):
                raise BadRequest(f"{name} is {_shown(given)}.", f"Accepted: {accepted}.")
        if min(self.volcano_memory_factor, self.aliyun_memory_unit) < 1:
            raise BadRequest(
                "A unit of GPU memory is at least 1 MiB.",
                "Correct volcano_memory_factor or aliyun_memory_unit.",
            )


def _is_text(given: object) -> bool:
    return isinstance(given, str)


def _is_text_or_none(given: object) -> bool:
    return given is None or _is_text(given)


def _shown(given: object) -> str:
    try:
        return ascii(given)[:80]
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MAX_MIB


def _is_number_or_none(given: object) -> bool:
    return given is None or _is_number(given)


def _is_selector(given: object) -> bool:
    return isinstance(given, str) and _SELECTOR.fullmatch(given) is not None


def _is_switch(given: object) -> bool:
    return isinstance(given, bool)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(map(_is_text, given))


#: What each option may be, since they come from files and not from code, and how to say it.
_ACCEPTED: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "container": (_is_text, "text"),
    "queue": (_is_text_or_none, "text, or none"),
    "runtime_class": (_is_text_or_none, "text, or none"),
    "memory_limiter": (_is_switch, "true or false"),
    "volcano_memory_factor": (_is_number, "a whole number, such as 10, without quotes"),
    "aliyun_memory_unit": (_is_number, "a whole number, such as 1024, without quotes"),
    "bitfusion_client": (_is_pair, 'two texts, such as [ubuntu20, "450"]'),
    "policy": (_is_text_or_none, "text, or none"),
    "context_mib": (_is_number, "a whole number, such as 350, without quotes"),
    "reserved_mib": (_is_number_or_none, "a whole number, such as 640, without quotes, or none"),
    "most_milli": (_is_number, "a whole number, such as 1500, without quotes"),
    "shared_nodes": (_is_selector, "labels of nodes, such as jupyter-gpu-pool/shared=true, or key, or both"),
    "shared_most": (_is_number_or_none, "a whole number, such as 4, without quotes, or none"),
    "pool": (_is_text, "text"),
    "namespace": (_is_text, "text"),
}

#: What holds where an administrator has said nothing.
DEFAULTS: Final = DialectOptions()


@dataclass(frozen=True, slots=True)
class PodParts:
    """What is added to a pod so that one of its containers gets the slice."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    #: Extended resources of the container: limits, and requests of the same amount.
    limits: Mapping[str, str] = field(default_factory=dict)
    scheduler_name: str | None = None
    runtime_class: str | None = None
    #: Entries of the pod's ``resourceClaims``; the container claims all of them by name.
    claims: tuple[Manifest, ...] = ()
    #: ResourceClaimTemplates to be in its namespace first; the same name is always the same content.
    claim_templates: tuple[Manifest, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    #: Requirements on node labels; all of them must hold.
    node_affinity: tuple[Manifest, ...] = ()
    tolerations: tuple[Manifest, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Whether the container must name its ``command``, since the image's own is not rewritten (Bitfusion).
    needs_command: bool = False


@dataclass(frozen=True, slots=True)
class Rounding:
    """One amount that is not granted exactly as it was asked for."""

    #: ``compute`` or ``memory``.
    what: str
    asked: str
    granted: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: asked for {self.asked}, granted {self.granted} ({self.why})"


@dataclass(frozen=True, slots=True)
class SliceStatement:
    """The truth about a slice: what is granted on each GPU, what holds it there, what was rounded."""

    #: Number of GPUs.
    count: int
    #: Thousandths of each GPU's compute; None where nothing says how much a memory request is of a GPU.
    milli: int | None
    #: MiB on each GPU; None where the nodes do not show how much a GPU has.
    memory_mib: int | None
    enforcement: Enforcement = field(default_factory=Enforcement)
    rounded: tuple[Rounding, ...] = ()
    #: What else its user or administrator should know.
    notes: tuple[str, ...] = ()
    #: The request by which a part of a GPU is counted that is more of it than the share or memory alone says.
    counted: SliceRequest | None = None

    @property
    def nominal(self) -> tuple[str, ...]:
        """What is only counted: ``memory``, ``compute``, both or neither."""
        pairs = (("memory", self.enforcement.memory), ("compute", self.enforcement.compute))
        return tuple(what for what, limit in pairs if limit.strength is Strength.NONE)

    def __str__(self) -> str:
        memory = "an amount unknown here" if self.memory_mib is None else format_memory(self.memory_mib)
        share = "a share unknown here" if self.milli is None else format_share(self.milli)
        gpus = "on one GPU" if self.count == 1 else f"on each of {self.count} GPUs"
        lines = [
            f"{gpus}: memory: {memory}, {self.enforcement.memory}; "
            f"compute: {share}, {self.enforcement.compute}"
        ]
        return "\n".join([*lines, *map(str, self.rounded), *self.notes])


@dataclass(frozen=True, slots=True)
class Translation:
    """A slice request in a cluster's dialect."""

    dialect: str
    pod: PodParts
    statement: SliceStatement


@dataclass(frozen=True, slots=True)
class PodBans:
    """What a pod must not bring along, because it would lift the limit or spoil the request."""

    labels: frozenset[str] = frozenset()
    annotations: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()
    #: Beginnings of resource names that a container may not ask for itself.
    resources: tuple[str, ...] = ("nvidia.com/",)


@dataclass(frozen=True, slots=True)
class DialectTable:
    """What a dialect can promise, as its page in the documentation says it."""

    #: How it is written in settings: ``hami``.
    name: str
    #: How people call it.
    title: str
    #: Limits of a slice that is less than a GPU, at their firmest.
    memory: str
    compute: str
    smallest: str
    rounding: str
    #: Keys of a ResourceQuota that count its slices; empty where none can.
    quota: tuple[str, ...]
    bans: PodBans
    #: What was read for it: release and public source.
    source: str
    #: Where it comes among those that a cluster shows: the lowest is taken. See the numbers of the others.
    rank: int = 100
    #: How many pods it can place on one node at a time without stumbling; 0 where that does not matter.
    at_once: int = 0
    #: With what it was used on a cluster, and whether with GPUs; its page begins with it.
    seen: str = NOT_SEEN
    #: Whether it is the pool that divides whole devices: its service alone can, and only where it is set.
    by_pool: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or MIG instance, of a node.

    ``device.contexts`` is how many pods may share it, None where nothing says;
    ``device.memory_mib`` is 0 where the node does not show it. A uuid that the
    node does not show is made from the node's name and the GPU's number.
    """

    node: str
    device: Device
    #: Whether nothing more is to be placed on it.
    drained: bool = False
    #: The system's own word for how it is shared, such as HAMi's ``mig``.
    mode: str = ""
    #: What its administrators should know of it, in words.
    notes: tuple[str, ...] = ()
    #: Whether its node shows all that there is to know of it; else what was known before holds.
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class PodHolding:
    """What a pod holds of one GPU."""

    milli: int
    memory_mib: int
    #: The GPU's uuid; empty where the cluster does not say which GPU of the node it is.
    uuid: str = ""
    #: What several pods have together is counted once: it says the same here of each. Empty for a pod's own.
    common: str = ""


class Dialect(ABC):
    """How one system is asked for a slice, and what it shows of those that are held.

    A dialect is one file with one class and one table. It is pure: it looks at
    the cluster and the options that it is given, and at nothing else.
    """

    table: ClassVar[DialectTable]
    #: Names of dialects that are always seen beside it, because it works over them.
    builds_on: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cluster: Cluster, options: DialectOptions = DEFAULTS) -> None:
        self.cluster = cluster
        self.options = options

    @property
    def rank(self) -> int:
        """Where it comes among those that this cluster shows: the lowest is taken."""
        return self.table.rank

    @property
    def tolerated(self) -> tuple[Manifest, ...]:
        """What its pods tolerate besides what a node's own taints of GPUs ask for."""
        return ()

    @abstractmethod
    def evidence(self) -> str:
        """Say in words by what this system is seen in the cluster; empty if it is not."""

    @abstractmethod
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this system shares, by node and number."""

    @abstractmethod
    def translate(self, request: SliceRequest) -> Translation:
        """Return what a pod needs for this slice, and the truth about it.

        Raises NeverFits if no node could ever hold it, BadRequest if this
        system cannot be asked for it, NotAllowed if the administrator must
        set something first.
        """

    @abstractmethod
    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Return what a pod that is on a node holds there, one entry per GPU."""


def merged(pod: Manifest, container: str, parts: PodParts, bans: PodBans) -> dict[str, Any]:
    """Return the Pod object with the slice in the container of that name.

    Raises NotAllowed if the pod brings along what would lift the slice's
    limit or spoil its request.
    """
    check(pod, bans)
    made: dict[str, Any] = copy.deepcopy(dict(pod))
    metadata, spec = made.setdefault("metadata", {}), made.setdefault("spec", {})
    _add(metadata, "labels", parts.labels)
    _add(metadata, "annotations", parts.annotations)
    _add(spec, "nodeSelector", parts.node_selector)
    _extend(spec, "tolerations", parts.tolerations)
    _extend(spec, "resourceClaims", parts.claims)
    for key, value in (("schedulerName", parts.scheduler_name), ("runtimeClassName", parts.runtime_class)):
        if value is not None:
            spec[key] = value
    _require(spec, parts.node_affinity)
    _fill(_container(spec, container, parts), parts)
    return made


def check(pod: Manifest, bans: PodBans) -> None:
    """Raise NotAllowed if the pod brings along what would lift the limit."""
    for fault in _faults(pod, bans):
        raise NotAllowed(
            f"This pod sets {fault}, which would lift the limits of its GPU slice.",
            "Remove that from the profile and from what users may choose.",
        )


def _faults(pod: Manifest, bans: PodBans) -> Iterator[str]:
    metadata, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    yield from (f"the label {key}" for key in sorted(bans.labels & mapping(metadata.get("labels")).keys()))
    annotations = mapping(metadata.get("annotations")).keys()
    yield from (f"the annotation {key}" for key in sorted(bans.annotations & annotations))
    yield from (
        f"the annotation {key}" for key in sorted(annotations) if key.startswith("nvidia.com/container.")
    )
    if spec.get("nodeName"):
        yield "nodeName"
    for container in _containers(spec):
        yield from _container_faults(container, bans)


def _container_faults(container: Manifest, bans: PodBans) -> Iterator[str]:
    names = {str(each.get("name")) for each in listing(container.get("env"))}
    yield from (f"the variable {name}" for name in sorted(bans.environment & names))
    if bans.environment and container.get("envFrom"):
        yield "variables that cannot be read here (envFrom)"
    if mapping(container.get("securityContext")).get("privileged"):
        yield "a privileged container"
    resources = mapping(container.get("resources"))
    for kind in ("limits", "requests"):
        for name in sorted(mapping(resources.get(kind))):
            if name.startswith(bans.resources):
                yield f"the resource {name}"


def _containers(spec: Manifest) -> Iterator[Manifest]:
    for key in ("initContainers", "containers", "ephemeralContainers"):
        yield from listing(spec.get(key))


def _container(spec: dict[str, Any], name: str, parts: PodParts) -> dict[str, Any]:
    found = [each for each in spec.get("containers", ()) if each.get("name") == name]
    if not found:
        raise NotAllowed(
            f"The pod has no container {name!a} for the GPU slice.", "Name the container that gets it."
        )
    others = [each for each in _containers(spec) if each is not found[0] and each.get("command")]
    if parts.needs_command and (others or not found[0].get("command")):
        raise NotAllowed(
            "Here a GPU is given only to a container whose command is written in the profile, "
            "and no other container may have one.",
            "Ask the administrator to set cmd in the profile.",
        )
    chosen: dict[str, Any] = found[0]
    return chosen


def _fill(container: dict[str, Any], parts: PodParts) -> None:
    resources = container.setdefault("resources", {})
    for kind in ("limits", "requests"):
        _add(resources, kind, parts.limits)
    claims = tuple({"name": claim["name"]} for claim in parts.claims)
    _extend(resources, "claims", claims)
    if parts.environment:
        kept = [each for each in container.get("env", ()) if each.get("name") not in parts.environment]
        added = [{"name": name, "value": value} for name, value in sorted(parts.environment.items())]
        container["env"] = kept + added


def _require(spec: dict[str, Any], requirements: tuple[Manifest, ...]) -> None:
    """Add the requirements to each term of the pod's node affinity, since terms are alternatives."""
    if not requirements:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*term.get("matchExpressions", ()), *map(dict, requirements)]}
        for term in terms
    ]


def _add(owner: dict[str, Any], key: str, values: Mapping[str, str]) -> None:
    if values:
        owner[key] = {**mapping(owner.get(key)), **values}


def _extend(owner: dict[str, Any], key: str, values: tuple[Manifest, ...]) -> None:
    if values:
        owner[key] = [*owner.get(key, ()), *map(dict, values)]
