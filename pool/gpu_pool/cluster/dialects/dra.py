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
- without it a GPU goes to one claim, and parts are MIG instances: those that exist, or with
  DynamicMIG those that can be made.

How its devices are listed, and claims read: ``resource_slices``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from gpu_pool.cluster.dialects.amounts import (
    ENFORCED,
    Cut,
    FixedOffer,
    closest,
    cut,
    refuse_index,
    refuse_limit,
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
    PodBans,
    PodHolding,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.objects import Pod, content_name
from gpu_pool.cluster.dialects.resource_slices import (
    DRIVER,
    GPU_CLASS,
    MIG_CLASS,
    ListedDevice,
    ListedDevices,
    MigPlacement,
    claim_holds,
    divided_by_claims,
    listed_devices,
    read_devices,
)
from gpu_pool_client import (
    WHOLE,
    BadRequest,
    Enforcement,
    Filters,
    Limit,
    NeverFits,
    SliceRequest,
    Strength,
    format_memory,
)
from gpu_pool_client._free import accepts

API: Final = "resource.k8s.io/v1"
_MODEL: Final = re.compile(r"[0-9a-z._-]{0,64}", re.ASCII)
#: What a uuid may be that is written into CEL, and how many are.
_UUID: Final = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)
_MOST_UUIDS: Final = 100

__all__ = ["API", "DRIVER", "GPU_CLASS", "MIG_CLASS", "Dra", "listed_devices"]


def selector(filters: Filters, least_mib: int, profile: str, not_of: Sequence[str] = ()) -> str:
    """Return the CEL expression that a device must meet, empty if any will do; it has none of these uuids.

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
    without = [uuid for uuid in not_of if _UUID.fullmatch(uuid)][:_MOST_UUIDS]
    if without and not profile:
        parts.append(f"!({attributes}.uuid in [{', '.join(map(repr, without))}])")
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
        return any(each.shared for each in self._gpus())

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the listed GPUs and MIG instances."""
        return tuple(each.gpu for each in self._listed)

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, for memory or shares of shared ones, or for the closest MIG instance."""
        refuse_index(request, self.table.title)
        refuse_limit(request, self.table.title)
        gpus = self._gpus()
        shared = [each for each in gpus if each.shared]
        if request.whole_devices:
            return self._whole(request, gpus)
        if shared:
            return self._part(request, shared)
        refuse_several(request, self.table.title, "MIG instances can be of the same GPU")
        return self._mig(request)

    def holds(self, pod: Pod) -> tuple[PodHolding, ...]:
        """Read the claims that are reserved for the pod."""
        return self._held.get((pod.namespace, pod.name), ())

    @cached_property
    def _read(self) -> ListedDevices:
        return read_devices(self.cluster, self.options)

    @cached_property
    def _listed(self) -> tuple[ListedDevice, ...]:
        # While a MIG instance of a card is in use, no claim can have a share of that card.
        divided = divided_by_claims(self.cluster, self._read.devices)
        return tuple(
            replace(each, gpu=replace(each.gpu, drained=True))
            if each.shared and each.gpu.device.uuid in divided
            else each
            for each in self._read.devices
        )

    @cached_property
    def _held(self) -> dict[tuple[str, str], tuple[PodHolding, ...]]:
        return claim_holds(self.cluster, self._listed)

    def _gpus(self) -> list[ListedDevice]:
        """Return the devices that can be had as a GPU, whole or in shares."""
        return [each for each in self._listed if not each.profile and each.is_offered]

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
        """Ask for a MIG instance: one that exists, or one that is made of a card."""
        offers = [
            offer
            for each in self._listed
            if accepts(request.filters, each.gpu.device)
            for offer in _offers(each)
        ]
        if not offers:
            cut(request, self.gpus(), self.options, self.table.title)
        taken = closest(request, offers, self.options)
        gpus = tuple(gpu for each in taken for gpu in each.gpus)
        size = Cut(gpus, taken[0].milli, taken[0].memory_mib, taken[0].memory_mib)
        truth = replace(statement(request, taken), counted=_counted(request, taken))
        return self._answer(request, size, MIG_CLASS, {}, truth, taken[0].resource)

    def _answer(
        self,
        request: SliceRequest,
        size: Cut,
        device_class: str,
        capacity: dict[str, str],
        truth: SliceStatement,
        profile: str = "",
    ) -> Translation:
        gpus = (each.gpu.device for each in self._gpus())
        smaller = any(gpu.memory_mib < size.smallest_mib for gpu in gpus)
        least = size.smallest_mib if smaller and not profile else 0
        cel = selector(request.filters, least, profile, self._read.divided)
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


def _offers(device: ListedDevice) -> list[FixedOffer]:
    """Return the MIG instance that a device is, or those that can be made of it, each profile once."""
    gpu = device.gpu.device
    if device.profile:
        label = f"a MIG instance {device.profile}"
        held_by = _COUNTED if device.is_common else None
        return [FixedOffer(device.profile, "mig", gpu.milli, gpu.memory_mib, label, (device.gpu,), held_by)]
    by_profile = {each.profile: each for each in device.placements if each.profile and each.milli}
    return [_part_of(device, each) for _, each in sorted(by_profile.items())]


def _part_of(device: ListedDevice, part: MigPlacement) -> FixedOffer:
    label = f"a MIG instance {part.profile}"
    # The lease of one is a part of the card, which says less of it than what it is.
    limit = Limit(Strength.HARD, f"{label} with {format_memory(part.memory_mib)}")
    held_by = _COUNTED if part.is_common else Enforcement(limit, limit)
    return FixedOffer(part.profile, "mig", part.milli, part.memory_mib, label, (device.gpu,), held_by)


def _counted(request: SliceRequest, taken: Iterable[FixedOffer]) -> SliceRequest | None:
    """Return by what a MIG instance that is a part of a card is counted: its share, or its memory if more.

    Two instances with three sevenths of the compute each have all of a card's memory.
    """
    parts = [
        (each, gpu.device.memory_mib) for each in taken for gpu in each.gpus if not gpu.device.mig_profile
    ]
    if not parts:
        return None
    offer, total = min(parts, key=lambda pair: pair[1])
    if offer.memory_mib * WHOLE > offer.milli * total:
        return replace(request, milli=None, memory_mib=offer.memory_mib)
    return replace(request, milli=offer.milli, memory_mib=None)
