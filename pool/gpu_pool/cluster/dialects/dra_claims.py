"""Objects of ``resource.k8s.io/v1``: what slices list, what claims hold, and the template of a claim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.dialects.base import Gpu, Hold
from gpu_pool.cluster.dialects.fixed_sizes import mig_milli
from gpu_pool.cluster.dialects.naming import content_name
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, listing, mapping, mib, quantity
from gpu_pool_client import WHOLE, BadRequest, Device, Filters

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
