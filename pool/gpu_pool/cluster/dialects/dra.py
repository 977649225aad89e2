"""NVIDIA's driver for dynamic resource allocation: claims instead of counted resources.

The rules, from https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu (2026-08)
and the API ``resource.k8s.io/v1``:

- a ResourceClaimTemplate asks one device class for devices: ``gpu.nvidia.com``
  for GPUs, ``mig.nvidia.com`` for MIG instances, told apart by CEL selectors;
- ``--consumable-shares`` lets claims share a GPU, and shows in ResourceSlices
  as ``allowMultipleAllocations``: with ``memory`` a claim takes what it asks
  for, in steps of 1 MiB, and everything if it asks for nothing; with a number
  each GPU has that many ``shares``; with ``unlimited`` only what is asked for
  is counted (``cmd/gpu-kubelet-plugin/consumable_shares.go``). Each mode only
  counts; none limits a process;
- without it a GPU goes to one claim, and parts are MIG instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gpu_pool.cluster.dialects.amounts import (
    ENFORCED,
    Cut,
    FixedOffer,
    closest,
    cut,
    mig_milli,
    refuse_index,
    refuse_several,
    rounded_share,
    runtime_class,
    statement,
    tolerations,
)
from gpu_pool.cluster.dialects.base import (
    Dialect,
    DialectTable,
    Gpu,
    Hold,
    PodBans,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.labels import content_name
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, Pod, listing, mapping, mib, quantity
from gpu_pool_client import (
    WHOLE,
    BadRequest,
    Device,
    Enforcement,
    Filters,
    Limit,
    NeverFits,
    SliceRequest,
    Strength,
)
from gpu_pool_client._free import accepts

API: Final = "resource.k8s.io/v1"
DRIVER: Final = "gpu.nvidia.com"
GPU_CLASS: Final = "gpu.nvidia.com"
MIG_CLASS: Final = "mig.nvidia.com"
#: What a MIG profile may be, since it is written into CEL; empty for a GPU.
_PROFILE: Final = re.compile(r"[0-9a-z.+-]{0,32}", re.ASCII)
_MODEL: Final = re.compile(r"[0-9a-z._-]{0,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device as a ResourceSlice lists it."""

    gpu: Gpu
    #: Where claims find it again: the slice's pool, and its name there.
    pool: str
    name: str
    #: MIG profile, empty for a GPU.
    profile: str
    #: Whether several claims may have parts of it.
    shared: bool
    #: Number of shares it has, 0 where it has none.
    shares: int
    #: Whether claims that ask for no memory are not counted at all.
    unlimited: bool


def listed_devices(cluster: Cluster) -> tuple[ListedDevice, ...]:
    """Return NVIDIA's devices of all slices, by node and name; those for virtual machines are left out."""
    found = [
        each
        for manifest in cluster.resource_slices
        for spec in (mapping(manifest.get("spec")),)
        if spec.get("driver") == DRIVER
        for index, device in enumerate(listing(spec.get("devices")))
        if (each := _listed_device(cluster, spec, device, index))
    ]
    return tuple(sorted(found, key=lambda each: (each.gpu.node, each.name)))


def _listed_device(cluster: Cluster, spec: Manifest, device: Manifest, index: int) -> ListedDevice | None:
    attributes = {name: _value(each) for name, each in mapping(device.get("attributes")).items()}
    profile = attributes.get("profile", "")
    if attributes.get("type") not in ("gpu", "mig") or not _PROFILE.fullmatch(profile):
        return None
    node = str(spec.get("nodeName", ""))
    capacity = mapping(device.get("capacity"))
    memory = mapping(capacity.get("memory"))
    shares = quantity(mapping(capacity.get("shares")).get("value", 0))
    shared = device.get("allowMultipleAllocations") is True
    default = mapping(memory.get("requestPolicy")).get("default")
    model = attributes.get("productName", "NVIDIA GPU")
    gpu = Device(
        uuid=attributes.get("uuid") or f"{node}/{device.get('name')}",
        index=index,
        model=model,
        memory_mib=mib(memory.get("value", 0)),
        milli=mig_milli(profile, model.replace(" ", "-")) if profile else WHOLE,
        contexts=None if shared else 1,
        driver=attributes.get("driverVersion", ""),
        mig_profile=profile or None,
    )
    return ListedDevice(
        gpu=Gpu(node, gpu, cluster.node(node).cordoned or bool(device.get("taints"))),
        pool=str(mapping(spec.get("pool")).get("name", "")),
        name=str(device.get("name", "")),
        profile=profile,
        shared=shared,
        shares=shares,
        unlimited=shared and not shares and default is not None and quantity(default) == 0,
    )


def _value(attribute: object) -> str:
    return str(next(iter(mapping(attribute).values()), ""))


def selector(filters: Filters, least_mib: int, profile: str) -> str:
    """Return the CEL expression that a device must meet, empty if any will do.

    Every text in it is of a closed alphabet, so that nobody ends the
    expression early: BadRequest for a model that is not.
    """
    model = (filters.model or "").lower()
    if not _MODEL.fullmatch(model):
        raise BadRequest(
            f"{model[:40]!a} is not a part of a GPU's name.", "Write model= with letters, digits and -."
        )
    attributes = f"device.attributes['{DRIVER}']"
    memory = max(filters.memory_mib or 0, least_mib)
    parts = []
    if profile:
        parts.append(f"{attributes}.profile == '{profile}'")
    if model:
        parts.append(f"{attributes}.productName.lowerAscii().replace(' ', '-').contains('{model}')")
    if memory:
        parts.append(f"device.capacity['{DRIVER}'].memory.compareTo(quantity('{memory}Mi')) >= 0")
    if filters.driver:
        version = ".".join(str(number) for number in (*filters.driver, 0, 0)[:3])
        parts.append(f"{attributes}.driverVersion.compareTo(semver('{version}')) >= 0")
    return " && ".join(parts)


def claim_template(device_class: str, count: int, capacity: dict[str, str], cel: str) -> dict[str, Any]:
    """Return the template of a claim for so many devices; its name follows from its content.

    Parts of several devices are kept apart by ``distinctAttribute``, since two
    parts could otherwise be of one GPU.
    """
    exactly: dict[str, Any] = {
        "deviceClassName": device_class,
        "allocationMode": "ExactCount",
        "count": count,
    }
    if capacity:
        exactly["capacity"] = {"requests": capacity}
    if cel:
        exactly["selectors"] = [{"cel": {"expression": cel}}]
    devices: dict[str, Any] = {"requests": [{"name": "gpu", "exactly": exactly}]}
    if capacity and count > 1:
        devices["constraints"] = [{"requests": ["gpu"], "distinctAttribute": f"{DRIVER}/uuid"}]
    spec = {"spec": {"devices": devices}}
    return {
        "apiVersion": API,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": content_name(spec)},
        "spec": spec,
    }


def claim_holds(cluster: Cluster, devices: Sequence[ListedDevice]) -> dict[tuple[str, str], tuple[Hold, ...]]:
    """Return what each pod, by namespace and name, has of the devices by the claims reserved for it."""
    by_place = {(each.pool, each.name): each for each in devices}
    held: dict[tuple[str, str], tuple[Hold, ...]] = {}
    for claim in cluster.resource_claims:
        namespace = str(mapping(claim.get("metadata")).get("namespace", "default"))
        holds = tuple(_results(claim, by_place))
        for user in listing(mapping(claim.get("status")).get("reservedFor")):
            if user.get("resource") == "pods":
                pod = namespace, str(user.get("name"))
                held[pod] = held.get(pod, ()) + holds
    return held


def _results(claim: Manifest, devices: Mapping[tuple[str, str], ListedDevice]) -> Iterator[Hold]:
    """Yield what a claim was given of devices that are listed."""
    allocation = mapping(mapping(claim.get("status")).get("allocation"))
    for result in listing(mapping(allocation.get("devices")).get("results")):
        device = devices.get((str(result.get("pool", "")), str(result.get("device", ""))))
        if device is not None and result.get("driver") == DRIVER:
            yield _hold(device, mapping(result.get("consumedCapacity")))


def _hold(device: ListedDevice, consumed: Manifest) -> Hold:
    """Return the whole device where the claim did not consume a part of it."""
    total, uuid = device.gpu.device.memory_mib, device.gpu.device.uuid
    if not device.shared:
        return Hold(device.gpu.device.milli, total, uuid)
    memory = mib(consumed.get("memory", 0))
    if device.shares:
        milli = -(-quantity(consumed.get("shares", 1)) * WHOLE // device.shares)
    else:
        milli = -(-memory * WHOLE // total) if total else 0
    return Hold(milli, memory, uuid)


_COUNTED: Final = Enforcement(
    Limit(Strength.NONE, "DRA only counts it"), Limit(Strength.NONE, "time-slicing limits nothing")
)


class Dra(Dialect):
    """NVIDIA's DRA driver, through claim templates."""

    table = DialectTable(
        name="dra",
        title="NVIDIA DRA",
        memory="none; hard with MIG",
        compute="none; hard with MIG",
        smallest="what CUDA itself takes, 1/N of a GPU in N shares, or one MIG instance",
        rounding="memory to 1 MiB; up to a share, or to a MIG instance at most 1.5 times what was asked for",
        quota=(f"{GPU_CLASS}.deviceclass.resource.k8s.io/devices",),
        bans=PodBans(environment=frozenset({"NVIDIA_VISIBLE_DEVICES"})),
        source="dra-driver-nvidia-gpu, 2026-08",
        rank=60,
        seen="without GPUs: the driver of 2026-08, sharing by memory, on Kubernetes 1.36.2",
    )

    def evidence(self) -> str:
        """Look for its device class, and for GPUs in its slices."""
        found = GPU_CLASS in self.cluster.device_classes and self.gpus()
        return (
            f"there is the device class {GPU_CLASS}, and {len(found)} of its devices are listed"
            if found
            else ""
        )

    @property
    def rank(self) -> int:
        """Before all that own the scheduler or the node pool, if claims can have parts of a GPU."""
        return 35 if self.shares else self.table.rank

    @property
    def shares(self) -> bool:
        """Whether claims can have parts of a GPU (consumable capacity, KEP-5075)."""
        return any(each.shared for each in self._listed if not each.profile)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the listed GPUs and MIG instances."""
        return tuple(each.gpu for each in self._listed)

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, for memory or shares of shared ones, or for the closest MIG instance."""
        refuse_index(request, self.table.title)
        gpus = [each for each in self._listed if not each.profile]
        shared = [each for each in gpus if each.shared]
        if request.whole_devices:
            return self._whole(request, gpus)
        if shared:
            return self._part(request, shared)
        refuse_several(request, self.table.title, "MIG instances can be of the same GPU")
        return self._mig(request)

    def holds(self, pod: Pod) -> tuple[Hold, ...]:
        """Read the claims that are reserved for the pod."""
        return self._held.get((pod.namespace, pod.name), ())

    @cached_property
    def _listed(self) -> tuple[ListedDevice, ...]:
        return listed_devices(self.cluster)

    @cached_property
    def _held(self) -> dict[tuple[str, str], tuple[Hold, ...]]:
        return claim_holds(self.cluster, self._listed)

    def _whole(self, request: SliceRequest, gpus: list[ListedDevice]) -> Translation:
        alone = [each for each in gpus if not each.unlimited]
        if gpus and not alone:
            raise NeverFits(
                f"You asked for {request.named}; GPUs are shared without limit here, none can be had alone.",
                "Ask for a part of a GPU, or ask the administrator.",
            )
        size = cut(request, [each.gpu for each in alone], self.options, self.table.title)
        shares = max(_shares(alone, size), default=0)
        capacity = {"shares": str(shares)} if shares else {}
        truth = SliceStatement(request.count, WHOLE, size.memory_mib, ENFORCED["whole"], notes=size.notes)
        return self._answer(request, size, GPU_CLASS, capacity, truth)

    def _part(self, request: SliceRequest, shared: list[ListedDevice]) -> Translation:
        size = cut(request, [each.gpu for each in shared], self.options, self.table.title)
        capacity = {"memory": f"{size.memory_mib}Mi"} if size.memory_mib else {}
        asked = size.milli or request.milli or 0
        shares = min(_shares(shared, size), default=0)
        milli = asked
        if shares:
            number = max(1, -(-asked * shares // WHOLE))
            capacity["shares"] = str(number)
            milli = -(-number * WHOLE // shares)
        rounded = rounded_share("compute", asked, milli, f"a GPU has {shares} shares")
        notes = (*size.notes, "Nothing stops a neighbour on the same GPU from taking more than its part.")
        truth = SliceStatement(request.count, milli or None, size.memory_mib, _COUNTED, rounded, notes)
        return self._answer(request, size, GPU_CLASS, capacity, truth)

    def _mig(self, request: SliceRequest) -> Translation:
        instances = [
            each for each in self._listed if each.profile and accepts(request.filters, each.gpu.device)
        ]
        offers = [
            FixedOffer(
                each.profile,
                "mig",
                device.milli,
                device.memory_mib,
                f"a MIG instance {each.profile}",
                (each.gpu,),
            )
            for each in instances
            for device in (each.gpu.device,)
        ]
        if not offers:
            cut(request, self.gpus(), self.options, self.table.title)
        taken = closest(request, offers, self.options)
        gpus = tuple(gpu for each in taken for gpu in each.gpus)
        size = Cut(gpus, taken[0].milli, taken[0].memory_mib, taken[0].memory_mib)
        return self._answer(request, size, MIG_CLASS, {}, statement(request, taken), taken[0].resource)

    def _answer(
        self,
        request: SliceRequest,
        size: Cut,
        device_class: str,
        capacity: dict[str, str],
        truth: SliceStatement,
        profile: str = "",
    ) -> Translation:
        gpus = (each.gpu.device for each in self._listed if not each.profile)
        smaller = any(gpu.memory_mib < size.smallest_mib for gpu in gpus)
        cel = selector(request.filters, size.smallest_mib if smaller and not profile else 0, profile)
        template = claim_template(device_class, request.count, capacity, cel)
        name = template["metadata"]["name"]
        pod = PodParts(
            claims=({"name": "gpu", "resourceClaimTemplateName": name},),
            claim_templates=(template,),
            runtime_class=runtime_class(self.cluster, self.options),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        return Translation(self.table.name, pod, truth)


def _shares(devices: Sequence[ListedDevice], size: Cut) -> list[int]:
    """Return how many shares each of the devices has that the slice may be on."""
    wanted = {gpu.device.uuid for gpu in size.gpus}
    return [each.shares for each in devices if each.gpu.device.uuid in wanted]
