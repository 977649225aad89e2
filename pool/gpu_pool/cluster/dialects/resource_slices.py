"""NVIDIA's devices as ResourceSlices list them, and what claims have of them. Pure.

The rules, from the API ``resource.k8s.io/v1`` and Kubernetes' allocator of devices:

- of one pool's slices only those of the highest generation count, and they are all there once
  their number is ``resourceSliceCount``. Until then nothing is granted of the pool;
- devices that consume counters of the same set exclude each other, as far as the counters
  reach. NVIDIA's driver lists a card so (DynamicMIG): the GPU as a whole, and every placement of
  every MIG profile (``cmd/gpu-kubelet-plugin/partitions.go``). Such a card is one device here: what
  is granted of it as MIG instances is a part of its memory and of its compute;
- where MIG instances exist already, the GPU that they are of is of no use as a whole, even if it is
  listed (dra-driver-nvidia-gpu#719);
- a taint closes a device with the effects ``NoSchedule`` and ``NoExecute``; with ``None``, or one of a
  later Kubernetes, it only informs. It is in the slice, or in a DeviceTaintRule;
- what is allocated with ``adminAccess``, for monitoring, takes nothing (KEP-5018).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpu_pool.cluster.dialects.amounts import mig_milli
from gpu_pool.cluster.dialects.base import DEFAULTS, DialectOptions, Gpu, PodHolding
from gpu_pool.cluster.dialects.objects import Cluster, Manifest, listing, mapping, mib, quantity
from gpu_pool_client import WHOLE, Device

DRIVER: Final = "gpu.nvidia.com"
GPU_CLASS: Final = "gpu.nvidia.com"
MIG_CLASS: Final = "mig.nvidia.com"
#: What a MIG profile may be, since it is written into CEL; empty for a GPU.
_PROFILE: Final = re.compile(r"[0-9a-z.+-]{0,32}", re.ASCII)
#: Most MIG instances that any card is divided into.
_MOST_INSTANCES: Final = 7
_CLOSING: Final = ("NoSchedule", "NoExecute")
_CLASSES: Final = {GPU_CLASS: "gpu", MIG_CLASS: "mig"}


@dataclass(frozen=True, slots=True)
class MigPlacement:
    """A MIG instance that can be made of a card, at one place."""

    name: str
    profile: str
    #: Thousandths of the card's compute, and MiB.
    milli: int
    memory_mib: int
    #: Thousandths of the card that nobody else can have beside it, by compute or by memory.
    charged_milli: int
    #: Whether several claims can have it at once.
    is_common: bool = False

    @property
    def hold(self) -> PodHolding:
        """What a pod has of the card by it."""
        return PodHolding(self.charged_milli, self.memory_mib)


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device as a ResourceSlice lists it; a card that can be divided is one, with its placements."""

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
    #: Which MIG instances can be made of it, one for each place.
    placements: tuple[MigPlacement, ...] = ()
    #: Whether it can be had as a whole.
    is_offered: bool = True

    @property
    def is_common(self) -> bool:
        """Whether others can have it beside a claim that asks for no part of it in particular."""
        return self.shared and (self.unlimited or self.shares > 0)


@dataclass(frozen=True, slots=True)
class _Listed:
    """One device of a slice, before those of one card are put together."""

    device: ListedDevice
    #: What is shown of its memory; ``device`` has what programs can have of it.
    shown_mib: int
    counters: frozenset[str]
    parent: str


@dataclass(frozen=True, slots=True)
class _Pool:
    """The slices of one pool that count."""

    name: str
    slices: tuple[Manifest, ...]
    is_complete: bool

    def counters(self) -> Mapping[str, Manifest]:
        """Return its sets of counters by name."""
        sets = (each for spec in self.slices for each in listing(spec.get("sharedCounters")))
        return {str(each.get("name")): mapping(each.get("counters")) for each in sets}


@dataclass(frozen=True, slots=True)
class ListedDevices:
    """All of NVIDIA's devices that a cluster lists."""

    devices: tuple[ListedDevice, ...] = ()
    #: uuids of the GPUs that are listed, and of which MIG instances exist.
    divided: tuple[str, ...] = ()


def listed_devices(cluster: Cluster, options: DialectOptions = DEFAULTS) -> tuple[ListedDevice, ...]:
    """Return NVIDIA's devices of all slices, by node and name; those for virtual machines are left out."""
    return read_devices(cluster, options).devices


def read_devices(cluster: Cluster, options: DialectOptions) -> ListedDevices:
    """Return the same, and which GPUs are listed beside MIG instances of theirs."""
    found: list[ListedDevice] = []
    divided: list[str] = []
    for pool in _pools(cluster.resource_slices):
        listed = list(_of_pool(cluster, pool, options))
        cards, alone = _cards(listed)
        parents = {each.parent for each in alone if each.device.profile}
        for each in alone:
            if not each.device.profile and each.device.gpu.device.uuid in parents:
                divided.append(each.device.gpu.device.uuid)
            else:
                found.append(each.device)
        found += [_card(card, pool.counters()) for card in cards]
    # No GPU is there twice, however often it is listed.
    unique = {each.gpu.device.uuid: each for each in reversed(found)}
    devices = sorted(unique.values(), key=lambda each: (each.gpu.node, each.name))
    return ListedDevices(tuple(devices), tuple(sorted(divided)))


def _pools(slices: Iterable[Manifest]) -> list[_Pool]:
    """Return the pools of NVIDIA's driver, each with the slices of its highest generation."""
    by_name: dict[str, list[Manifest]] = defaultdict(list)
    for each in slices:
        spec = mapping(each.get("spec"))
        if spec.get("driver") == DRIVER:
            by_name[str(mapping(spec.get("pool")).get("name", ""))].append(spec)
    return [_newest(name, specs) for name, specs in sorted(by_name.items())]


def _newest(name: str, specs: Sequence[Manifest]) -> _Pool:
    def generation(spec: Manifest) -> int:
        return quantity(mapping(spec.get("pool")).get("generation", 0))

    highest = max(map(generation, specs))
    newest = tuple(spec for spec in specs if generation(spec) == highest)
    counts = {quantity(mapping(spec.get("pool")).get("resourceSliceCount", len(newest))) for spec in newest}
    return _Pool(name, newest, counts == {len(newest)})


def _of_pool(cluster: Cluster, pool: _Pool, options: DialectOptions) -> Iterator[_Listed]:
    """Yield the devices of a pool, each name once: where one comes twice, the driver is amiss."""
    names: set[str] = set()
    for spec in pool.slices:
        for index, device in enumerate(listing(spec.get("devices"))):
            found = _listed_device(cluster, pool, spec, device, index, options)
            if found is not None and found.device.name not in names:
                names.add(found.device.name)
                yield found


def _listed_device(
    cluster: Cluster, pool: _Pool, spec: Manifest, device: Manifest, index: int, options: DialectOptions
) -> _Listed | None:
    attributes = {name: _value(each) for name, each in mapping(device.get("attributes")).items()}
    profile, kind = attributes.get("profile", ""), attributes.get("type")
    if kind not in ("gpu", "mig") or not _PROFILE.fullmatch(profile):
        return None
    node, name = str(spec.get("nodeName", "")), str(device.get("name", ""))
    capacity = mapping(device.get("capacity"))
    memory = mapping(capacity.get("memory"))
    shares = max(0, quantity(mapping(capacity.get("shares")).get("value", 0)))
    shared = device.get("allowMultipleAllocations") is True
    default = mapping(memory.get("requestPolicy")).get("default")
    model = attributes.get("productName", "NVIDIA GPU")
    total = max(0, mib(memory.get("value", 0)))
    gpu = Device(
        uuid=attributes.get("uuid") or f"{node}/{name}",
        index=index,
        model=model,
        memory_mib=total if profile else options.usable_mib(total, cluster.node(node)),
        milli=mig_milli(profile, model.replace(" ", "-")) if profile else WHOLE,
        contexts=None if shared else 1,
        driver=attributes.get("driverVersion", ""),
        mig_profile=profile or None,
    )
    taints = [*listing(device.get("taints")), *_ruled(cluster.device_taint_rules, pool.name, name, kind)]
    is_closed = cluster.node(node).cordoned or any(map(_closes, taints)) or not pool.is_complete
    notes = tuple(sorted({_say_taint(each) for each in taints}))
    if not pool.is_complete:
        notes += ("its ResourceSlices are not all there",)
    found = ListedDevice(
        gpu=Gpu(node, gpu, is_closed, notes=notes, is_complete=pool.is_complete),
        pool=pool.name,
        name=name,
        profile=profile,
        shared=shared,
        shares=shares,
        unlimited=shared and not shares and default is not None and quantity(default) == 0,
    )
    counters = frozenset(str(each.get("counterSet")) for each in listing(device.get("consumesCounters")))
    return _Listed(found, total, counters, attributes.get("parentUUID", ""))


def _value(attribute: object) -> str:
    return str(next(iter(mapping(attribute).values()), ""))


# -- Taints ----------------------------------------------------------------


def _closes(taint: Manifest) -> bool:
    return taint.get("effect") in _CLOSING


def _say_taint(taint: Manifest) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    effect = str(taint.get("effect") or "no effect") if _closes(taint) else "for information only"
    return f"taint {taint.get('key')}{value} ({effect})"


def _ruled(rules: Iterable[Manifest], pool: str, name: str, kind: str) -> Iterator[Manifest]:
    """Yield the taints that DeviceTaintRules put onto a device."""
    for rule in rules:
        spec = mapping(rule.get("spec"))
        selector = spec.get("deviceSelector")
        if isinstance(selector, Mapping) and _selects(selector, pool, name, kind):
            yield mapping(spec.get("taint"))


def _selects(selector: Manifest, pool: str, name: str, kind: str) -> bool:
    """Whether a rule is for a device. CEL expressions, of Kubernetes before 1.35, select none."""
    asked = {"driver": DRIVER, "pool": pool, "device": name}
    by_class = selector.get("deviceClassName")
    return (
        all(selector.get(key) in (None, value) for key, value in asked.items())
        and (by_class is None or _CLASSES.get(str(by_class)) == kind)
        and not selector.get("selectors")
    )


# -- Cards that can be divided ---------------------------------------------


def _cards(listed: Sequence[_Listed]) -> tuple[list[list[_Listed]], list[_Listed]]:
    """Return the devices that share counters, card by card, and all others."""
    cards: list[tuple[set[str], list[_Listed]]] = []
    alone = [each for each in listed if not each.counters]
    for each in listed:
        if not each.counters:
            continue
        joined = [card for card in cards if card[0] & each.counters]
        sets = set(each.counters).union(*(card[0] for card in joined))
        members = [*(member for card in joined for member in card[1]), each]
        cards = [card for card in cards if card not in joined] + [(sets, members)]
    return [members for _, members in cards], alone


def _card(members: Sequence[_Listed], counters: Mapping[str, Manifest]) -> ListedDevice:
    """Return the devices that share counters as the one card that they are of."""
    wholes = [each for each in members if not each.device.profile]
    parts = [each for each in members if each.device.profile]
    if not parts and len(wholes) == 1:
        return wholes[0].device
    largest = max(wholes, key=lambda each: each.shown_mib, default=None)
    card = largest or _unlisted(parts, counters)
    # The sizes of MIG instances are what programs can have of them.
    total = card.device.gpu.device.memory_mib if card.device.shared else card.shown_mib
    placements = [_placement(each.device, total) for each in members if each is not largest]
    contexts = card.device.gpu.device.contexts if not parts else None
    device = replace(card.device.gpu.device, memory_mib=total, contexts=contexts)
    notes = {note: None for each in members for note in each.device.gpu.notes}
    closed = any(each.device.gpu.drained for each in members)
    gpu = replace(card.device.gpu, device=device, drained=closed, notes=tuple(notes))
    return replace(card.device, gpu=gpu, placements=tuple(placements))


def _unlisted(parts: Sequence[_Listed], counters: Mapping[str, Manifest]) -> _Listed:
    """Return a card that is listed by its parts alone, as it is where MIG is switched on for good."""
    sets = sorted({name for each in parts for name in each.counters})
    said = [mib(mapping(mapping(counters.get(name)).get("memory")).get("value", 0)) for name in sets]
    sizes = [each.shown_mib for each in parts]
    total = max(*said, max(sizes), min(sizes) * min(sizes.count(min(sizes)), _MOST_INSTANCES))
    first = parts[0].device
    uuid = next((each.parent for each in parts if each.parent), f"{first.gpu.node}/{sets[0]}")
    device = replace(first.gpu.device, uuid=uuid, milli=WHOLE, mig_profile=None)
    card = replace(
        first,
        gpu=replace(first.gpu, device=device),
        name=sets[0],
        profile="",
        shared=False,
        shares=0,
        unlimited=False,
        is_offered=False,
    )
    return replace(parts[0], device=card, shown_mib=total)


def _placement(part: ListedDevice, total: int) -> MigPlacement:
    device = part.gpu.device
    memory = min(device.memory_mib, total)
    by_memory = -(-memory * WHOLE // total) if total else WHOLE
    milli = device.milli if part.profile else WHOLE
    charged = max(milli, by_memory)
    return MigPlacement(part.name, part.profile, milli, memory, charged, part.is_common)


# -- Claims ----------------------------------------------------------------


def claim_holds(
    cluster: Cluster, devices: Sequence[ListedDevice]
) -> dict[tuple[str, str], tuple[PodHolding, ...]]:
    """Return what each pod, by namespace and name, has of the devices by the claims reserved for it."""
    places = _places(devices)
    held: dict[tuple[str, str], tuple[PodHolding, ...]] = {}
    for claim in cluster.resource_claims:
        metadata, status = mapping(claim.get("metadata")), mapping(claim.get("status"))
        namespace, name = str(metadata.get("namespace", "default")), str(metadata.get("name", ""))
        # Several pods may use one claim, and have its devices together.
        holds = tuple(replace(each, common=f"{namespace}/{name}") for each in _results(claim, places))
        for user in listing(status.get("reservedFor")):
            if user.get("resource") == "pods":
                pod = namespace, str(user.get("name"))
                held[pod] = held.get(pod, ()) + holds
    return held


def claimed_devices(claims: Iterable[Manifest], devices: Sequence[ListedDevice]) -> frozenset[str]:
    """Return the uuids of the devices of which any of these claims has something, but for monitoring."""
    places = _places(devices)
    return frozenset(hold.uuid for claim in claims for hold in _results(claim, places))


def _places(
    devices: Sequence[ListedDevice],
) -> dict[tuple[str, str], tuple[ListedDevice, MigPlacement | None]]:
    """Return the devices and their parts by where claims find them."""
    return {
        **{(each.pool, each.name): (each, None) for each in devices if each.is_offered},
        **{(each.pool, part.name): (each, part) for each in devices for part in each.placements},
    }


def _results(
    claim: Manifest, places: Mapping[tuple[str, str], tuple[ListedDevice, MigPlacement | None]]
) -> Iterator[PodHolding]:
    """Yield what a claim was given of devices that are listed."""
    allocation = mapping(mapping(claim.get("status")).get("allocation"))
    monitoring = set(_for_monitoring(claim))
    for result in listing(mapping(allocation.get("devices")).get("results")):
        found = places.get((str(result.get("pool", "")), str(result.get("device", ""))))
        is_monitoring = result.get("adminAccess") is True or result.get("request") in monitoring
        if found is None or is_monitoring or result.get("driver") != DRIVER:
            continue
        device, part = found
        if part is None:
            yield _hold(device, mapping(result.get("consumedCapacity")))
        else:
            yield replace(part.hold, uuid=device.gpu.device.uuid)


def _for_monitoring(claim: Manifest) -> Iterator[str]:
    """Yield the names of the requests of a claim that ask for devices for monitoring."""
    devices = mapping(mapping(claim.get("spec")).get("devices"))
    for request in listing(devices.get("requests")):
        if mapping(request.get("exactly")).get("adminAccess") is True or request.get("adminAccess") is True:
            yield str(request.get("name"))


def _hold(device: ListedDevice, consumed: Manifest) -> PodHolding:
    """Return the whole device where the claim did not consume a part of it."""
    total, uuid = device.gpu.device.memory_mib, device.gpu.device.uuid
    if not device.shared:
        return PodHolding(device.gpu.device.milli, total, uuid)
    memory = max(0, mib(consumed.get("memory", 0)))
    if device.shares:
        milli = -(-max(0, quantity(consumed.get("shares", 1))) * WHOLE // device.shares)
    else:
        milli = -(-memory * WHOLE // total) if total else 0
    return PodHolding(min(WHOLE, milli), min(memory, total) if total else memory, uuid)


def divided_by_claims(cluster: Cluster, devices: Sequence[ListedDevice]) -> frozenset[str]:
    """Return the uuids of the cards of which claims have MIG instances now."""
    placed = {(each.pool, part.name): each for each in devices for part in each.placements}
    claims = (mapping(mapping(claim.get("status")).get("allocation")) for claim in cluster.resource_claims)
    results = (each for claim in claims for each in listing(mapping(claim.get("devices")).get("results")))
    found = (placed.get((str(each.get("pool", "")), str(each.get("device", "")))) for each in results)
    return frozenset(each.gpu.device.uuid for each in found if each is not None)
